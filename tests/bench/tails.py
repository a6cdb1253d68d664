"""Sampling with long tails: groups as drawn, and with groups that go on in the next step.

    python tests/bench/tails.py [--shape qwen3-0.6b] [--prompts 32] [--group-size 8] [--tokens 1024] [--slots 256 64]
        [--carry-over 8] [--steps 6] [--gib 20]
    python tests/bench/tails.py --shape tiny --prompts 8 --group-size 4 --tokens 96 --carry-over 2 --slots 32 8 --gib .1

On a GPU (5 minutes), and on a CPU (1). The variants take turns within one engine, which decodes `--slots` sequences at
once. A completion's length is forced, and the same in every variant: log-normal, with a median of a fifth of
`--tokens`, a spread of 0.6 between prompts and of 0.5 within a group. Weights stay. A row of the table is the median
(lowest to highest) step after the first two; `tail` is the share of the slots, over all of them, in which
nothing is decoded while the longest goes on, `groups/s` what the trainers get.
"""

import argparse
import heapq
import json
import os
import random
import statistics
import sys
import time

from lengths import draw_length
from speed import ROOT, checkpoint, report, run_child, spread

WARM_UP_STEPS = 2  # CUDA graphs, and until as many groups are carried over as will be
VARIANTS = ("as drawn", "carried over")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--prompts", type=int, default=32, help="groups that a step trains on")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--carry-over", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--gib", type=float, default=20, help="of KV cache")
    parser.add_argument("--limit", type=int, default=420, help="seconds of one engine")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options)
        return
    checkpoint(options.shape)
    rows = []
    for slots in options.slots:
        log = ROOT / "runs" / "bench" / f"tails-{options.shape}-{slots}.log"
        result = run_child([sys.executable, __file__, *sys.argv[1:], "--child", slots], log, options.limit)
        rows += [{"slots": slots, **row} for row in result.get("rows", [result])]
    facts = {name: getattr(options, name) for name in ("shape", "prompts", "group_size", "tokens", "carry_over")}
    report("tails", rows, **facts)


def measure(slots: int, options: argparse.Namespace) -> None:
    """Print one row per variant as JSON."""
    generator = forced_lengths(slots, options)
    steps = {variant: Steps(generator, variant, options) for variant in VARIANTS}
    measured_steps = {variant: [] for variant in VARIANTS}
    for _ in range(options.steps + WARM_UP_STEPS):
        for variant in VARIANTS:
            measured_steps[variant].append(steps[variant].next())
    rows = []
    for variant, measured in measured_steps.items():
        seconds, tokens, room = zip(*measured[WARM_UP_STEPS:], strict=True)
        rates = [count / s for s, count in zip(seconds, tokens, strict=True)]
        rows.append(
            {
                "variant": variant,
                "tokens/s": spread(rates),
                "s/step": spread(seconds),
                "groups/s": options.prompts / statistics.mean(seconds),
                "tail": 1 - sum(tokens) / sum(room),
                "over as drawn": sum(step[0] for step in measured_steps["as drawn"][WARM_UP_STEPS:]) / sum(seconds),
            }
        )
    print(json.dumps({"rows": rows}), flush=True)
    os._exit(0)


def forced_lengths(slots: int, options: argparse.Namespace):
    """Start a Generator of the loop whose completions end where `length_of` says."""
    from grpo.config import GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig, SamplingConfig
    from grpo.roles.engine.generator import Generator
    from grpo.roles.process_groups import setup_roles

    class ForcedLengths(Generator):
        def generate(self, requests, *arguments):
            add = self.loop.add
            asked = asked_of(requests, options)

            def add_forced(number, ids, params):
                index, num_begun = asked[number]
                params.max_tokens = length_of(index, options) - num_begun
                add(number, ids, params)

            self.loop.add = add_forced
            try:
                return super().generate(requests, *arguments)
            finally:
                self.loop.add = add

    folder = str(checkpoint(options.shape))
    config = GRPOConfig(
        roles=RolesConfig(colocated=True, num_trainers=1),
        model=ModelConfig(path=folder),
        generator=GeneratorConfig(
            max_completion_tokens=options.tokens,
            engine={"kv_cache_memory_bytes": int(options.gib * 2**30), "max_num_seqs": slots},
        ),
        prompts_per_step=options.prompts,
        group_size=options.group_size,
        sampling=SamplingConfig(carry_over=options.carry_over),
    )
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    return ForcedLengths(config.generator, config.model, config.data, config.seed, folder, [], roles)


def length_of(index: int, options: argparse.Namespace) -> int:
    """Return the tokens of a completion of the run."""
    prompt = f"prompt {index // options.group_size}"
    return draw_length(prompt, f"completion {index}", options.tokens / 5, options.tokens)


def asked_of(requests, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (index in the run, tokens so far) of each completion of the replica, in the order in which they begin."""
    from grpo.roles.engine.generator import share_out

    [mine] = share_out(requests, options.group_size, 1)
    return [(r.index, len(r.begun)) for r in mine]


def room_of(lengths: list[int], num_slots: int) -> int:
    """Return the sum of slots in use over steps. A sequence gets a token in a step; a free slot takes the next one."""
    ends = [0] * min(num_slots, len(lengths))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return len(ends) * max(ends)


class Steps:
    """One variant's steps, one after the other; a new prompt for each that is drawn."""

    def __init__(self, generator, variant: str, options: argparse.Namespace):
        from grpo.config import SamplingConfig
        from grpo.run.groups import GroupBuffer

        self.generator = generator
        self.options = options
        sampling = SamplingConfig(carry_over=options.carry_over if variant == "carried over" else 0)
        self.buffer = GroupBuffer(sampling, options.prompts, options.group_size)
        self.num_drawn = 0

    def draw(self, count: int):
        from grpo.types import Prompt

        numbers = range(self.num_drawn, self.num_drawn + count)
        self.num_drawn = numbers.stop
        return [Prompt(n, [random.Random(f"ids {n}").randrange(1000) for _ in range(128)]) for n in numbers]

    def next(self):
        """Return (seconds, tokens sampled, tokens for which there was room) of the next step."""
        options = self.options
        requests = self.buffer.ask(options.prompts, self.draw)
        began = time.perf_counter()
        completions = self.generator.generate(requests, options.group_size)
        seconds = time.perf_counter() - began
        self.generator.forget_prefixes()
        self.buffer.add(completions)
        self.buffer.take(options.prompts, lambda *_: [])
        length_of = {completion.index: completion.num_tokens for completion in completions}
        lengths = [length_of.get(index, 0) for index, _ in asked_of(requests, options)]
        return seconds, sum(lengths), room_of(lengths, self.generator.config.max_num_seqs)


if __name__ == "__main__":
    main()
