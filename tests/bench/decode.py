"""Decoding alone: milliseconds of a token step over what reading weights and KV cache once takes, and where they go.

    python tests/bench/decode.py [--shape qwen3-1.7b] [--loads 128x1024 256x256] [--steps 100] [--rounds 3]
        [--together 4] [--gib 18] [--profile] [--limit 240] [--variants ours ours+block_size=64 ...]

A variant is `ours` (the generator of a run) with, each behind `+`, an engine option in JSON, a variable of the
environment in capitals (`ours+VLLM_USE_V2_MODEL_RUNNER=0`) or a Python file that is run first (`ours+patch.py`).
`--together` engines start side by side, because a start is the host's work, and are then measured one at a time, in
turns. Prompts are random and differ. A load of 128x1024 is 128 sequences that have 1,024 tokens in the middle of the
steps.

`floor ms` is all weights and the cache of these tokens, read at the bandwidth of a copy that the variant measures
itself; untied input embeddings count too, though a step hardly reads them. Host milliseconds of a step: `schedule`;
`launch`, until the GPU has its work; `wait` for its result; `update`, what becomes of the tokens; what is left is
`rest`. Where `wait` is near 0 the host is the limit. `--profile` adds the milliseconds of kernels in a round of its
own, by kind, and tables of kernels and of Python's functions to the variant's log in $OUT.
"""

import argparse
import cProfile
import json
import os
import pstats
import random
import re
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from generate import start_generator
from speed import answer, checkpoint, report, side_by_side, spread

KINDS = {
    "attention": "flash|attention|attn",
    "products": "gemm|nvjet|cutlass|splitk",
    "sampling": "gumbel|softmax|rank",
}
PARTS = ("schedule", "launch", "wait", "update", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--variants", nargs="+", default=["ours"])
    parser.add_argument("--loads", nargs="+", default=["128x1024"], help="sequences and their tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=4, help="engines that are started side by side")
    parser.add_argument("--gib", type=float, default=18, help="of KV cache, for each engine")
    parser.add_argument("--limit", type=float, default=240, help="seconds until all have started")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="decode", help="of the JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    most_context = max(int(load.partition("x")[2]) for load in options.loads)
    options.tokens = most_context + 8 * options.steps  # with drafts a step can add several tokens
    if options.child:
        serve(options.child, options)
        return
    checkpoint(options.shape)
    rows = []
    for first in range(0, len(options.variants), options.together):
        rows += measure_together(options.variants[first : first + options.together], options)
        report(options.name, rows, shape=options.shape)


# ---- One process for each variant, which waits for its turns


def measure_together(variants: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start an engine for each variant, then take rounds in turns. Returns a row for each variant and load."""
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = {
        (variant, load): [] for variant in variants for load in options.loads
    }
    with side_by_side(variants, options.name, options.limit) as started:
        for load in options.loads:
            for number in range(options.rounds + options.profile):
                for variant, (child, _) in started.items():
                    kind = "profile" if number == options.rounds else "round"
                    measured = answer(child, f"{kind} {load}")
                    if measured:
                        rounds[variant, load].append(measured)
                        print(f"{variant}, {load}: {measured}", flush=True)
    starts = {variant: start for variant, (_, start) in started.items()}
    return [
        {"variant": variant, "load": load} | starts.get(variant, {}) | summary(its_rounds, options)
        for (variant, load), its_rounds in rounds.items()
    ]


def summary(rounds: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a variant's rounds, or that some are missing."""
    if len(rounds) < options.rounds:
        return {"failed": f"{len(rounds)} of {options.rounds} rounds: see its log"}
    kernels = {}
    for profiled in rounds[options.rounds :]:
        kernels |= {name: value for name, value in profiled.items() if "kernel" in name}
    rounds = rounds[: options.rounds]
    row = {}
    for name in ("ms/token step", "tokens/s", "prefill s"):
        row[name] = spread([figures[name] for figures in rounds])
    for name in ("copy TB/s", "floor ms", "over floor", *PARTS):
        row[name] = statistics.median(figures[name] for figures in rounds)
    return row | kernels


# ---- In the process of a variant


def serve(variant: str, options: argparse.Namespace) -> None:
    """Start the engine, say so, and measure a round for each line of the input."""
    began = time.perf_counter()
    engine = {}
    for argument in variant.split("+")[1:]:
        name, is_option, value = argument.partition("=")
        if not is_option:
            runpy.run_path(name)
        elif name.isupper():
            os.environ[name] = value
        else:
            engine[name] = json.loads(value)
    options.group_size = 1
    generator = start_generator(engine, options)
    seconds = timed_parts(generator)
    print(json.dumps({"start s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        kind, load = line.split()
        num_sequences, _, context = load.partition("x")
        figures = one_round(
            generator,
            seconds,
            profile=kind == "profile",
            num_sequences=int(num_sequences),
            context=int(context),
            num_steps=options.steps,
        )
        print(json.dumps(figures), flush=True)


def copy_rate() -> float:
    """Measure a copy of 1 GiB: bytes per second, read and written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(2**30 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    rates = []
    for _ in range(5):
        wait()
        began = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        wait()
        rates.append(20 * len(source) / (time.perf_counter() - began))
    return statistics.median(rates)


def timed_parts(generator: Any) -> Counter:
    """Time the parts of the engine's steps from now on. Returns a counter of their seconds, which grows."""
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture

    seconds: Counter = Counter()

    def time_calls(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                seconds[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    core = generator.llm.llm_engine.engine_core.engine_core
    time_calls(core.scheduler, "schedule", "schedule")
    time_calls(core.model_executor, "execute_model", "launch")
    time_calls(core.model_executor, "sample_tokens", "launch")
    time_calls(AsyncOutputFuture, "result", "wait")
    time_calls(core.scheduler, "update_from_output", "update")
    return seconds


def one_round(
    generator: Any,
    parts: Counter,
    *,
    profile: bool,
    num_sequences: int,
    context: int,
    num_steps: int,
) -> dict:
    """Prefill all sequences, then time steps in which each gets a token. They do not end by themselves.

    context: tokens of a sequence in the middle of the steps.
    """
    from grpo.roles.engine.vllm_engine import sampling_params

    draw = random.Random(time.perf_counter())
    loop = generator.loop
    rate = copy_rate()
    num_prompt_tokens = context - num_steps // 2
    began = time.perf_counter()
    for number in range(num_sequences):
        ids = [draw.randrange(1000) for _ in range(num_prompt_tokens)]
        params = sampling_params(generator.config, [], {"ignore_eos": True}, 1.0, number, 8 * num_steps)
        loop.add(number, ids, params)
    sampled = loop.sampled_tokens._by_request
    while len(sampled) < num_sequences:
        loop.step()
    figures = {"prefill s": time.perf_counter() - began}
    if profile:
        figures |= kernels(loop.step, num_steps // 2)
        with cProfile.Profile() as functions:
            for _ in range(num_steps // 2):
                loop.step()
        pstats.Stats(functions, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    parts.clear()
    before = sum(len(tokens.ids) for tokens in sampled.values())
    began = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    seconds = time.perf_counter() - began
    after = sum(len(tokens.ids) for tokens in sampled.values())
    loop.end()
    generator.forget_prefixes()
    floor = floor_bytes(generator, num_prompt_tokens * num_sequences + (before + after) / 2) / rate
    step = seconds * num_sequences / (after - before)
    host = {name: 1000 * parts[name] / num_steps for name in PARTS}
    host["rest"] = 1000 * seconds / num_steps - sum(host.values())
    figures |= {
        "copy TB/s": rate / 1e12,
        "ms/token step": 1000 * step,
        "floor ms": 1000 * floor,
        "over floor": step / floor,
    }
    return figures | {"tokens/s": (after - before) / seconds} | host


def floor_bytes(generator: Any, num_tokens: float) -> float:
    """Return the bytes of all weights, and of keys and values of so many tokens."""
    (model,) = generator.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    config = generator.llm.llm_engine.vllm_config
    hf = config.model_config.hf_config
    in_fp8 = config.cache_config.cache_dtype.startswith("fp8")
    of_token = 2 * hf.num_hidden_layers * hf.num_key_value_heads * hf.head_dim
    of_token *= 1 if in_fp8 else config.model_config.dtype.itemsize
    return sum(parameter.nbytes for parameter in model.parameters()) + num_tokens * of_token


def kernels(step: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Measure the kernels of some steps: milliseconds of a step, by kind. Their table goes to the log."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            step()
    averages = profiled.key_averages()
    total: Counter = Counter()
    print(averages.table(sort_by="self_device_time_total" if on_gpu else None, row_limit=30), file=sys.stderr)
    for kernel in averages:
        kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.key, re.IGNORECASE)]
        total[kinds[0] if kinds else "others"] += kernel.self_device_time_total / 1000 / num_steps
    return {f"kernel ms, {kind}": total[kind] for kind in (*KINDS, "others")}


if __name__ == "__main__":
    main()
