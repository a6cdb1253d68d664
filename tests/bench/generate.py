"""Sampling alone: tokens per second of our generator beside plain `LLM.generate`, each in a process, in turns.

    python tests/bench/generate.py [--shape qwen3-0.6b] [--variants ours plain plain-nologprobs]
        [--prompts 32] [--group-size 8] [--tokens 256] [--rounds 5] [--gib 20] [--limit 280] [--profile]

`ours` is grpo/roles/engine/generator.py; `plain` is vllm.LLM with log-probs as a user would call it, no seeds, prefix
caching on; `plain-nologprobs` asks for none. Behind `/` an argument of the engine in JSON: `ours/block_size=64`,
`'ours/attention_config={"flash_attn_version": 2}'`. All sample every token up to the limit, so that the work is equal.
Engines start side by side, because a start is the host's work, and capture graphs for an eighth, two eighths and so on
of the sequences. Each number is printed as it comes. With `--profile`, the Python functions of one more round by their
own time (cProfile, which slows everything), and on a GPU the kernels of another, in the variant's log in $OUT.
"""

import argparse
import cProfile
import faulthandler
import json
import os
import pstats
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from speed import answer, checkpoint, report, side_by_side, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--variants", nargs="+", default=["ours", "plain", "plain-nologprobs"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=20, help="of KV cache, for each engine")
    parser.add_argument("--limit", type=int, default=280, help="seconds until all have started")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="generate", help="of the JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.child, options)
        return
    checkpoint(options.shape)
    rates: dict[str, list[float]] = {variant: [] for variant in options.variants}
    with side_by_side(options.variants, f"{options.name}-{options.shape}", options.limit) as started:
        for number in range(options.rounds + 1):
            for variant, (child, _) in started.items():
                measured = answer(child, str(number))
                print(f"{variant}, round {number}: {measured}", flush=True)
                if measured and number:  # the first one compiles
                    rates[variant].append(measured["tokens/s"])
        if options.profile:
            for child, _ in started.values():
                answer(child, "profile")
    rows = []
    for variant, measured in rates.items():
        row = (
            {"variant": variant, "tokens/s": spread(measured)}
            if measured
            else {"variant": variant, "failed": "see its log"}
        )
        rows.append(row | (started[variant][1] if variant in started else {}))
    report(options.name, rows, shape=options.shape, sequences=options.prompts * options.group_size)


def serve(variant: str, options: argparse.Namespace) -> None:
    """Start the engine, say so, and sample for each line of the input, which is the number of a round or `profile`."""
    draw = random.Random(0)
    prompts = [[draw.randrange(1000) for _ in range(128)] for _ in range(options.prompts)]
    faulthandler.dump_traceback_later(60, repeat=True)  # where a start that takes long is
    started = time.perf_counter()
    variant, _, argument = variant.partition("/")
    name, _, value = argument.partition("=")
    engine = graphs(options) | ({name: json.loads(value)} if name else {})
    start = plain_engine if variant.startswith("plain") else own_engine
    generate = start(variant, engine, options)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"engine start s": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        if line == "profile\n":
            show_functions(lambda: generate(prompts, options.rounds + 1))
            show_kernels(lambda: generate(prompts, options.rounds + 2))
            print("{}", flush=True)
            continue
        begin = time.perf_counter()
        num_tokens = generate(prompts, int(line))
        print(json.dumps({"tokens/s": num_tokens / (time.perf_counter() - begin)}), flush=True)
    os._exit(0)


def graphs(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's option for graphs of the numbers of sequences that occur; vLLM's own 51 take longer."""
    if not torch.cuda.is_available():
        return {}
    most = min(512, options.prompts * options.group_size)
    sizes = sorted({max(1, most * eighth // 8) for eighth in range(1, 9)})
    return {"compilation_config": {"cudagraph_capture_sizes": sizes}}


def show_functions(generate: Callable[[], int]) -> None:
    """Log the Python functions of a call by their own time."""
    with cProfile.Profile() as profile:
        generate()
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(40)


def show_kernels(generate: Callable[[], int]) -> None:
    """Log the kernels of a call by their time, and how long the GPU was busy."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin = time.perf_counter()
        generate()
        seconds = time.perf_counter() - begin
    kernels = profiled.key_averages()
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
    print(f"kernels: {busy:.3f} s of {seconds:.3f} s", file=sys.stderr)
    print(kernels.table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90), file=sys.stderr)


def start_generator(engine: dict[str, Any], options: argparse.Namespace):
    """Start a Generator as the loop has it, with these engine options, in this process alone."""
    from grpo.config import GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig
    from grpo.roles.engine.generator import Generator
    from grpo.roles.process_groups import setup_roles

    folder = str(checkpoint(options.shape))
    config = GRPOConfig(
        roles=RolesConfig(colocated=True, num_trainers=1),
        model=ModelConfig(path=folder),
        generator=GeneratorConfig(
            max_completion_tokens=options.tokens,
            gpu_memory_utilization=0.1,  # vLLM asks whether so much is free, though `--gib` sets the cache
            engine={"kv_cache_memory_bytes": int(options.gib * 2**30)} | engine,
        ),
        group_size=options.group_size,
    )
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    return Generator(config.generator, config.model, config.data, config.seed, folder, [], roles)


def own_engine(_variant: str, engine: dict[str, Any], options: argparse.Namespace):
    """Start our Generator. Returns a function of prompts and the round that samples and returns how many tokens."""
    from grpo.types import Prompt, Requests

    generator = start_generator(engine, options)

    def generate(prompts: list[list[int]], number: int) -> int:
        rows = [Prompt(ids=ids, index=number * len(prompts) + i) for i, ids in enumerate(prompts)]
        completions = generator.generate(Requests(rows), options.group_size)
        generator.forget_prefixes()
        return sum(len(completion.ids_T) for completion in completions)

    return generate


def plain_engine(variant: str, engine: dict[str, Any], options: argparse.Namespace):
    """Start vllm.LLM. Returns a function as that of `own_engine`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch._inductor.config  # noqa: F401  (before vLLM, which has torch compile on one core, unless it is decided)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(checkpoint(options.shape)),
        dtype="bfloat16",
        max_model_len=128 + options.tokens,
        gpu_memory_utilization=0.1,  # as for ours
        kv_cache_memory_bytes=int(options.gib * 2**30),
        skip_tokenizer_init=True,
        max_num_seqs=512,
        **engine,
    )
    params = SamplingParams(
        n=options.group_size,
        temperature=1.0,
        max_tokens=options.tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=None if variant.endswith("nologprobs") else 0,
    )

    def generate(prompts: list[list[int]], number: int) -> int:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        llm.reset_prefix_cache()
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return generate


if __name__ == "__main__":
    main()
