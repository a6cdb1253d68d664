"""Sampling alone: tokens per second of our generator beside plain `LLM.generate`, in turns within one process each.

    python tests/bench/generate.py [--shape qwen3-0.6b] [--variants ours plain plain-nologprobs]
        [--prompts 32] [--group-size 8] [--tokens 256] [--rounds 5] [--gib 20] [--profile]

`ours` is grpo/roles/engine/generator.py; `plain` is vllm.LLM with log-probs as a user would call it, no seeds, prefix
caching on; `plain-nologprobs` asks for none. Behind `/` an argument of the engine in JSON: `ours/block_size=64`,
`'ours/attention_config={"flash_attn_version": 2}'`. All sample every token up to the limit, so that the work is equal.
A step of 0 rounds only starts the engine. With `--profile`, the Python functions of one more round by their own time
(cProfile, which slows everything), and on a GPU the kernels of another.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from speed import ROOT, checkpoint, report, run_child, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--variants", nargs="+", default=["ours", "plain", "plain-nologprobs"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=20, help="of KV cache")
    parser.add_argument("--limit", type=int, default=280, help="seconds of one variant")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="generate", help="of the JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options)
        return
    checkpoint(options.shape)
    rows = []
    for variant in options.variants:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{options.name}-{options.shape}-{variant}")
        log = ROOT / "runs" / "bench" / f"{name}.log"
        figures = run_child([sys.executable, __file__, *sys.argv[1:], "--child", variant], log, options.limit)
        rows.append({"variant": variant, **figures})
        print(rows[-1], flush=True)
    report(options.name, rows, shape=options.shape, sequences=options.prompts * options.group_size)


def measure(variant: str, options: argparse.Namespace) -> None:
    """Sample in rounds and print tokens per second as JSON, in the process of a variant."""
    draw = random.Random(0)
    prompts = [[draw.randrange(1000) for _ in range(128)] for _ in range(options.prompts)]
    started = time.perf_counter()
    variant, _, argument = variant.partition("/")
    name, _, value = argument.partition("=")
    engine = {name: json.loads(value)} if name else {}
    start = plain_engine if variant.startswith("plain") else own_engine
    generate = start(variant, engine, options)
    start_seconds = time.perf_counter() - started
    rates = []
    for number in range(options.rounds + 1):
        begin = time.perf_counter()
        num_tokens = generate(prompts, number)
        rates.append(num_tokens / (time.perf_counter() - begin))
    if options.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            generate(prompts, options.rounds + 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        show_kernels(lambda: generate(prompts, options.rounds + 2))
    print(json.dumps({"tokens/s": spread(rates[1:] or rates), "engine start s": start_seconds}), flush=True)
    os._exit(0)


def show_kernels(generate: Callable[[], int]) -> None:
    """Print the kernels of a call by their time, and how long the GPU was busy."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin = time.perf_counter()
        generate()
        seconds = time.perf_counter() - begin
    kernels = profiled.key_averages()
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
    print(f"kernels: {busy:.3f} s of {seconds:.3f} s")
    print(kernels.table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90))


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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
