"""New weights from the trainer ranks to every generator: versioned, bucketed, under HF names.

Whatever the sharding on either side, full tensors of one transformer block at a time are cast to the compute dtype,
gathered on trainer rank 0, joined into buckets and broadcast over the `weights` bridge. Colocated, every rank gathers
and loads, and nothing is sent.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from grpo.models.export import hf_tensors
from grpo.roles.comm import broadcast, wait_for_all
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.roles.trainer import Trainer

BUCKET_BYTES = 512 * 2**20


def sync_weights(trainer: Trainer | None, generator: Generator | None, version: int, roles: Roles) -> None:
    """Bring the policy's weights into every generator and mark them as `version`.

    Collective over `roles.control`: every rank calls it, with its trainer and its generator or None.
    """
    if generator:
        tensors = hf_tensors(trainer.model, trainer.dtype) if trainer else receive_weights(generator.dtype, roles)
        generator.load_weights(tensors, version)
    elif trainer:
        send_weights(hf_tensors(trainer.model, trainer.dtype), roles.weights)
    wait_for_all(roles)  # done everywhere, so that the time of a sync is its own


def check_sync(metrics: StepMetrics, tolerance: float) -> None:
    """Compare what trainer and generator say of the same completions, after the step's first forward.

    Raises RuntimeError if their log-probs differ by more than `tolerance` (nats) on average. A difference that is not
    finite is the policy's own, since other tokens are excluded, and no fault of the sync: that update is skipped.
    """
    measured = metrics.means()
    if metrics.num_loss_tokens:
        check_distance(measured["mismatch/mean"], measured["mismatch/max"], tolerance)


def check_distance(mean: float, largest: float, tolerance: float) -> None:
    """Raise RuntimeError if log-probs differ by more than `tolerance` (nats) on average, and by a finite number."""
    if tolerance < mean < math.inf:
        raise RuntimeError(
            "the generator does not hold the policy's weights: their log-probs of the same completions differ by "
            f"{mean:.2e} on average (tolerance {tolerance:.0e}, largest {largest:.2e}). Nothing was updated. If "
            "precision explains it, raise --sync-check-tolerance"
        )


def send_weights(tensors: Iterator[tuple[str, torch.Tensor]], bridge: ProcessGroup | None) -> None:
    """Broadcast (HF name, tensor) pairs from rank 0 of `bridge`; trainer ranks without it only join the gathers."""
    for bucket in _buckets(tensors):
        if bridge is not None:
            broadcast([(name, tuple(tensor.shape)) for name, tensor in bucket], bridge)
            dist.broadcast(torch.cat([tensor.flatten() for _, tensor in bucket]), group_src=0, group=bridge)
    if bridge is not None:
        broadcast([], bridge)


def receive_weights(dtype: torch.dtype, roles: Roles) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs that `send_weights` broadcasts. Each bucket has its own buffer, since vLLM holds on to views."""
    while header := broadcast(None, roles.weights):
        sizes = [torch.Size(shape).numel() for _, shape in header]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=roles.device)
        dist.broadcast(buffer, group_src=0, group=roles.weights)
        for (name, shape), flat in zip(header, buffer.split(sizes), strict=True):
            yield name, flat.view(shape)


def _buckets(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = [], 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
