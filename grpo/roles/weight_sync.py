"""New weights from the trainer ranks to every generator: versioned, bucketed, under HF names.

Whatever the sharding on either side, full tensors of one transformer block at a time are cast to the compute dtype,
gathered on trainer rank 0, joined into buckets and broadcast over the `weights` bridge. Colocated, every rank gathers
and loads, and nothing is sent.
"""

import pickle
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from grpo.models.build import ShardedModel
from grpo.models.export import hf_tensors
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles

BUCKET_BYTES = 512 * 2**20


def sync_weights(
    model: ShardedModel | None, generator: Generator | None, version: int, dtype: torch.dtype, roles: Roles
) -> None:
    """Bring the policy's weights into every generator and mark them as `version`.

    Collective over `roles.control`: every rank calls it. `model` is the policy on trainer ranks,
    `generator` the engine on generator ranks.
    """
    if roles.colocated:
        generator.load_weights(hf_tensors(model, dtype), version)
    elif roles.trains:
        send_weights(hf_tensors(model, dtype), roles.weights)
    elif roles.generates:
        generator.load_weights(receive_weights(dtype, roles), version)
    dist.barrier(group=roles.control)  # done everywhere, so that the time of a sync is its own


def send_weights(tensors: Iterator[tuple[str, torch.Tensor]], bridge: ProcessGroup | None) -> None:
    """Broadcast (HF name, tensor) pairs from rank 0 of `bridge`; trainer ranks without it only join the gathers."""
    for bucket in _buckets(tensors):
        if bridge is not None:
            _send_header([(name, tuple(tensor.shape)) for name, tensor in bucket], bridge)
            dist.broadcast(torch.cat([tensor.flatten() for _, tensor in bucket]), group_src=0, group=bridge)
    if bridge is not None:
        _send_header([], bridge)


def receive_weights(dtype: torch.dtype, roles: Roles) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs that `send_weights` broadcasts. Each bucket has its own buffer, since vLLM holds on to views."""
    while header := _receive_header(roles.weights):
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


def _send_header(header: list[tuple[str, tuple[int, ...]]], bridge: ProcessGroup) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(data)]), group_src=0, group=bridge)
    dist.broadcast(data, group_src=0, group=bridge)


def _receive_header(bridge: ProcessGroup) -> list[tuple[str, tuple[int, ...]]]:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, group_src=0, group=bridge)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group_src=0, group=bridge)
    return pickle.loads(data.numpy().tobytes())
