"""Weight syncs alone: real trainers and engines, six syncs, and a flat broadcast of as many bytes in the same process.

    python tests/bench/sync.py [--shapes qwen3-1.7b qwen3-8b] [--layouts fsdp2:2x1 tp2:1x2 colocated1:1x1]
        [--syncs 6] [--lora-rank 16] [--limit 200]

A layout is trainers:engines, as fsdp2:2x1 for two FSDP ranks and two engines of tensor_parallel 1, tp2:1x2 for two
tensor-parallel ranks and one engine of 2; colocated2:1x2 has all on the same two ranks. Layouts for which there are too
few GPUs are left out. Each case is a torchrun of its own. Weights are changed before every sync by a function of their
values, so that any sharding changes them equally. In the table:

first ms, later ms      wall time of sync_weights on rank 0
gather, flat ms         the parts alone: all gathers; a broadcast of as many bytes
over flat               later / flat
trainer, engine GiB     most memory of torch above what was held before a later sync, on any such rank
stale, first, last      mean difference of log-probs (nats) before the first sync, after it and after the last one

The first layout of a shape captures CUDA graphs, as a run does; the others start without, which is faster.
"""

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Callable

from speed import ROOT, checkpoint, report, run_child, spread

LAYOUTS = (
    "fsdp2:2x1",
    "fsdp1:1x1",
    "colocated1:1x1",
    "tp2:1x2",
    "fsdp2:1x2",
    "colocated2:1x2",
    "fsdp4:4x1",
    "fsdp4:2x2",
)
REPEATS = 5
GROUP_SIZE, PROMPTS = 2, [[5, 9, 12, 7], list(range(20, 90)), [13, 400, 77]]
FLAT_BYTES = 2**30
"""Of the buffer that is broadcast again and again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--limit", type=int, default=200, help="seconds of one case")
    parser.add_argument("--name", default="sync", help="of the JSON file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*options.child, options.syncs, options.lora_rank)
        return
    import torch

    num_gpus, rows = torch.cuda.device_count(), []
    for shape in options.shapes:
        checkpoint(shape)
        graphs = True
        for layout in options.layouts:
            ranks = parse(layout)[-1]
            if num_gpus and ranks > num_gpus:
                print(f"{layout} needs {ranks} GPUs, there are {num_gpus}: left out", flush=True)
                continue
            log = ROOT / "runs" / "bench" / f"{options.name}-{shape}-{layout.replace(':', '-')}.log"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command += [
                __file__,
                "--syncs",
                options.syncs,
                "--lora-rank",
                options.lora_rank,
                "--child",
                shape,
                layout,
                "graphs" if graphs else "eager",
            ]
            rows.append({"shape": shape, "layout": layout, **run_child(command, log, options.limit)})
            print(rows[-1], flush=True)
            graphs = False
    report(options.name, rows, syncs=options.syncs, lora_rank=options.lora_rank)


def parse(layout: str) -> tuple[str, int, int, int, int]:
    """Kind and number of trainers, engines, their tensor_parallel, and ranks in all."""
    trainers, engines = layout.split(":")
    kind = trainers.rstrip("0123456789")
    num_trainers, (replicas, parallel) = int(trainers.removeprefix(kind)), map(int, engines.split("x"))
    ranks = num_trainers if kind == "colocated" else num_trainers + replicas * parallel
    return kind, num_trainers, replicas, parallel, ranks


def measure(shape: str, layout: str, graphs: str, num_syncs: int, lora_rank: int) -> None:
    """Print one case's row as JSON; called in each rank."""
    import math

    import torch
    import torch.distributed as dist

    from grpo.config import GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig, TrainerConfig
    from grpo.models.export import stacked_shapes, stacked_tensors
    from grpo.roles.comm import broadcast, wait_for_all
    from grpo.roles.engine.generator import Generator
    from grpo.roles.process_groups import close_roles, setup_roles
    from grpo.roles.trainer import Trainer
    from grpo.roles.weight_sync import sync_weights

    kind, num_trainers, replicas, parallel, _ = parse(layout)
    folder, on_gpu, colocated = str(checkpoint(shape)), torch.cuda.is_available(), kind == "colocated"
    config = GRPOConfig(
        # nothing is compiled: what is timed does not run the model
        model=ModelConfig(path=folder, dtype="bfloat16" if on_gpu else "float32", attention="documents"),
        roles=RolesConfig(
            colocated=colocated,
            num_trainers=num_trainers,
            num_references=0,
            num_generators=0 if colocated else replicas * parallel,
        ),
        generator=GeneratorConfig(
            tensor_parallel=parallel,
            max_completion_tokens=64,
            engine={"max_num_seqs": 16, "enforce_eager": graphs == "eager" or not on_gpu}
            | ({"kv_cache_memory_bytes": 2 * 2**30} if on_gpu else {}),
        ),
        trainer=TrainerConfig(tensor_parallel=num_trainers if kind == "tp" else 1, lora_rank=lora_rank, compile=False),
        group_size=GROUP_SIZE,
    )
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    generator = (
        Generator(config.generator, config.model, config.data, config.seed, folder, [], roles)
        if roles.generates
        else None
    )
    trainer = Trainer(config.model, config.trainer, folder, 1, roles) if roles.trains else None
    seconds, extra, differences = [], [], []

    def timed(work: Callable[[], None]) -> float:
        """Wall seconds of it on this rank, with nothing left to do on any GPU before and after."""
        synchronize()
        wait_for_all(roles)
        start = time.perf_counter()
        work()
        synchronize()
        wait_for_all(roles)
        return time.perf_counter() - start

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    for version in range(1, num_syncs + 1):
        if trainer:
            change(trainer)
        if version == 1:
            differences.append(difference(version, config, trainer, generator, roles))
        held = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds.append(timed(lambda version=version: sync_weights(trainer, generator, version, roles)))
        extra.append((torch.cuda.max_memory_allocated() - held) / 2**30 if on_gpu else math.nan)
        if version in (1, num_syncs):
            differences.append(difference(version, config, trainer, generator, roles))

    shapes = stacked_shapes(trainer.model) if trainer else {}
    shapes = broadcast(shapes, roles.control)
    num_bytes = sum(math.prod(shape) for shape in shapes.values()) * getattr(torch, config.model.dtype).itemsize
    flat = torch.empty(min(FLAT_BYTES, num_bytes), dtype=torch.uint8, device=roles.device)

    def broadcast_flat() -> None:
        for sent in range(0, num_bytes if roles.weights else 0, FLAT_BYTES):
            dist.broadcast(flat[: min(FLAT_BYTES, num_bytes - sent)], group_src=0, group=roles.weights)

    flat_seconds = [timed(broadcast_flat) for _ in range(REPEATS)]
    gathers = (
        (lambda: collections.deque(stacked_tensors(trainer.model, trainer.dtype), 0)) if trainer else (lambda: None)
    )
    gather_seconds = [timed(gathers) for _ in range(REPEATS)]

    facts = (roles.trains, roles.generates, max(extra[1:]))
    all_facts = [None] * roles.control.size()
    dist.all_gather_object(all_facts, facts, group=roles.control)
    if roles.is_driver:
        stale, first, last = differences
        flat_ms = 1000 * statistics.median(flat_seconds) if roles.weights else math.nan
        row = {
            "GB": num_bytes / 1e9,
            "first ms": 1000 * seconds[0],
            "later ms": spread([1000 * s for s in seconds[1:]]),
            "flat ms": flat_ms,
            "over flat": 1000 * statistics.median(seconds[1:]) / flat_ms,
            "gather ms": 1000 * statistics.median(gather_seconds),
            "trainer GiB": max(gib for trains, _, gib in all_facts if trains),
            "engine GiB": max(gib for _, generates, gib in all_facts if generates),
            "stale": stale,
            "first": first,
            "last": last,
        }
        print(json.dumps(row), flush=True)
    close_roles(roles, generator.close if generator else None)


def change(trainer) -> None:
    """Move every weight by a function of itself, so that equal ones stay equal on all ranks."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for part in trainer.model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward alone leaves some unsharded
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(torch.sin(1e4 * local), alpha=0.005)


def difference(version: int, config, trainer, generator, roles) -> float | None:
    """Mean |trainer - generator| of the log-probs of new completions, nats, on the trainers. Every rank calls it."""
    from grpo.data.batches import make_batch, sample_of
    from grpo.roles.comm import gather_completions, send_batch
    from grpo.types import Prompt, Requests

    prompts = [Prompt(index=version * len(PROMPTS) + i, ids=ids) for i, ids in enumerate(PROMPTS)]
    completions = gather_completions(generator.generate(Requests(prompts), GROUP_SIZE) if generator else None, roles)
    batch = None
    if roles.is_driver:
        repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
        batch = make_batch([sample_of(prompt, c) for prompt, c in zip(repeated, completions, strict=True)])
    batch = send_batch(batch, roles)
    if not trainer:
        return None
    error_N = trainer.logprobs(batch) - batch.generator_logprobs_N
    return error_N[batch.loss_mask_N].abs().mean().item()


if __name__ == "__main__":
    main()
