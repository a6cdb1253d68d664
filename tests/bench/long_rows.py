"""Rows on several GPUs: seconds, peak and log-probs with each way of sharing them out. For each case one line.

    torchrun --nproc_per_node=2 tests/bench/long_rows.py FOLDER --cases fsdp cp2 [--tokens 32768] [--rows 2]
        [--documents 1] [--repeats 5] [--checkpointing full]
    torchrun --nproc_per_node=2 tests/bench/long_rows.py FOLDER --cases fsdp cp2 --tokens 512 --dtype float32   (a CPU)

FOLDER: of tests/bench/random_checkpoint.py. A case is `fsdp`, or degrees such as cp2, ep2, cp2tp2. All compute the same
`--rows` rows of `--tokens` tokens, of `--documents` documents each, forward and backward: seconds are median (lowest to
highest) of the repeats behind two that compile. Log-probs and norm of the gradient are compared with the first case's.
"""

import argparse
import gc
import re
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, ".")

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.models.build import ShardedModel, build_model
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.types import TrainBatch
from tests.rollouts import sequence

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpointing", default="full")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    roles = setup_trainers()
    batch = random_batch(options.rows * options.documents, options.tokens // options.documents)
    first = None
    for case in options.cases:
        degrees = dict(re.findall(r"(cp|ep|tp)(\d+)", case))
        trainer = TrainerConfig(
            context_parallel=int(degrees.get("cp", 1)),
            expert_parallel=int(degrees.get("ep", 1)),
            tensor_parallel=int(degrees.get("tp", 1)),
            micro_batch_tokens=options.tokens,
            activation_checkpointing=options.checkpointing,
            logprob_chunk_tokens=2048,
        )
        model = build_model(
            ModelConfig(dtype=options.dtype),
            trainer,
            options.folder,
            device=roles.device,
            tensor_parallel=trainer.tensor_parallel,
        )
        on_gpu = roles.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(WARM_UP + options.repeats):
            for parameter in model.module.parameters():
                parameter.grad = None
            seconds.append(seconds_of(model, batch))
        norm = model.clip_gradients(float("inf"))
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        logprobs_N = model.token_logprobs(batch).to(roles.device)
        dist.all_reduce(logprobs_N)
        first = first or (logprobs_N, norm)
        difference_N = (logprobs_N - first[0]).abs()[batch.loss_mask_N]
        if roles.is_driver:
            timed = seconds[WARM_UP:]
            print(
                f"{case}: {statistics.median(timed):.3f} s ({min(timed):.3f} to {max(timed):.3f}), "
                f"peak {peak:.1f} GiB, log-probs differ by {difference_N.mean():.1e} on average and "
                f"{difference_N.max():.1e} at most, norm {norm:.6g} ({norm / first[1] - 1:+.1e})",
                flush=True,
            )
        del model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    close_roles(roles)


def random_batch(num_sequences: int, num_tokens: int) -> TrainBatch:
    """Return sequences of equal length whose tokens all count but the first eight."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(num_sequences):
        ids = torch.randint(3, 1000, (num_tokens,), generator=generator)
        samples.append(sequence(ids, torch.arange(num_tokens) >= 8, prompt_tokens=8))
    return make_batch(samples)


def seconds_of(model: ShardedModel, batch: TrainBatch) -> float:
    """Compute the mean log-prob of the batch and its gradient. Returns the seconds on this rank."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for micro, is_last in model.lay_out(batch)[1]:
        model.accumulate(is_last)
        logprobs_BT, _ = model.logprobs(micro)
        loss = (logprobs_BT * micro.loss_mask_BT).sum() / batch.loss_mask_N.sum()
        loss.backward()
    model.drop_copy()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
