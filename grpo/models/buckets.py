"""Weights in flat buckets, as they travel from trainers to engines: how they are gathered, what lies where, and out.

A bucket is gathered with one collective and lies as the gather leaves it: shard after shard, each with parts of the
same tensors in the same places. Nobody puts full tensors together on the way: a `BucketMap`, made once for a run, says
which block of which tensor each stretch of a bucket is, and whoever takes a bucket copies the blocks to where they
belong. This serves every sharding that torchtitan makes here: FSDP, TP, both, with and without replicas, and one rank.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from grpo.models.build import ShardedModel
from grpo.models.lora import LoRALinear, adapted_layers, merged_weight

# Large enough for the full bandwidth of NVLink; a tensor may lie in several buckets, so two in flight are all it takes
BUCKET_BYTES = 256 * 2**20
BUFFERS = 2  # buckets in flight: one for each of the two stages that a rank has at most
ALIGNMENT = 64  # elements: every stretch begins at a multiple, where copies by GPUs are fast

# (index of a bucket, its elements) -> puts the newest weights there; a collective of whoever has parts of them
Fill = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Piece:
    """A stretch of a bucket: one block of one tensor, row after row."""

    name: str
    """Hugging Face's."""
    offset: int
    """Of its first element in the bucket."""
    start: tuple[int, ...]
    """Its first index in the tensor, by dimension."""
    shape: tuple[int, ...]

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of its full `tensor` that it is."""
        return tensor[tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))]

    def values(self, bucket: torch.Tensor) -> torch.Tensor:
        """Its elements, a view of the bucket."""
        return bucket[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Elements that travel together."""

    numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class BucketMap:
    """What lies where in which bucket."""

    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]
    """Of the full tensors, by Hugging Face name, in the order in which they travel."""
    buckets: tuple[Bucket, ...]

    def empty_bucket(self, device: torch.device) -> torch.Tensor:
        """Room for any of the buckets."""
        return torch.empty(max(bucket.numel for bucket in self.buckets), dtype=self.dtype, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# On the trainers: gathering

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size by dimension: a part of a tensor."""


class Axis(NamedTuple):
    """A dimension of the mesh over which weights are sharded."""

    name: str
    size: int
    rank: int
    group: ProcessGroup


class Slot(NamedTuple):
    """Rows of a tensor's shard and their place in the shard's part of a bucket, the same on all ranks."""

    tensor: int
    first: int
    end: int
    """Behind its last row; a smaller shard may end earlier."""
    offset: int


class WeightBuckets:
    """The newest weights of a model in `dtype`, bucket by bucket. LoRA's are merged, tied heads left out."""

    def __init__(self, model: ShardedModel, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES):
        """Lay the weights out; nothing is communicated."""
        state = model.module.state_dict(keep_vars=True)  # FSDP puts its shards in place for that
        state |= {f"{layer.name}.weight": layer for layer in adapted_layers(model.module)}
        weights: dict[str, nn.Parameter | LoRALinear] = model.names.to_hf(state)
        self._weights, self._dtype = list(weights.values()), dtype
        meshes = [(name, model.parallel_dims.get_optional_mesh(name)) for name in ("fsdp", "tp")]  # replicas are equal
        meshes = [(name, mesh) for name, mesh in meshes if mesh is not None and mesh.size() > 1]
        self._axes = [Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group()) for name, mesh in meshes]
        coordinates = list(itertools.product(*(range(axis.size) for axis in self._axes)))
        self._rank = coordinates.index(tuple(axis.rank for axis in self._axes))
        tensors = [weight.weight if isinstance(weight, LoRALinear) else weight for weight in self._weights]
        blocks = [[_block(tensor, self._axes, at) for at in coordinates] for tensor in tensors]
        for name, tensor, of_tensor in zip(weights, tensors, blocks, strict=True):
            mine, shape = of_tensor[self._rank], tuple(_local(tensor).shape)
            if mine and mine[1] != shape:
                raise RuntimeError(f"{name}: this rank holds a shard of {shape}, where {mine[1]} was expected")
        self._slots, buckets = [], []
        for slots, size in _slots(blocks, bucket_bytes // dtype.itemsize // len(coordinates)):
            self._slots.append(slots)
            buckets.append(Bucket(size * len(coordinates), tuple(_pieces(slots, size, list(weights), blocks))))
        shapes = {name: tuple(tensor.shape) for name, tensor in zip(weights, tensors, strict=True)}
        self.bucket_map = BucketMap(dtype, shapes, tuple(buckets))

    @torch.no_grad()
    def fill(self, index: int, bucket: torch.Tensor) -> None:
        """Put bucket `index` of the map into `bucket`. Collective over the role's ranks, bucket after bucket.

        Shards are cast before they are gathered, which halves the traffic of bfloat16. On a GPU it is only queued.
        """
        size = len(bucket) // math.prod(axis.size for axis in self._axes)
        mine = bucket[self._rank * size : (self._rank + 1) * size]
        targets, shards = [], []
        for slot in self._slots[index]:
            weight = self._weights[slot.tensor]
            weight = merged_weight(weight, self._dtype) if isinstance(weight, LoRALinear) else weight
            rows = _local(weight)[slot.first : slot.end]
            if rows.numel():
                targets.append(mine[slot.offset : slot.offset + rows.numel()].view(rows.shape))
                shards.append(rows)
        if shards:
            torch._foreach_copy_(targets, shards)
        for axis in reversed(self._axes):  # in place: the neighbours' parts first, then what those ranks got together
            whole = size * axis.size
            first = self._rank * len(mine) // whole * whole
            part = bucket[first + axis.rank * size : first + (axis.rank + 1) * size]
            dist.all_gather_single(bucket[first : first + whole], part, group=axis.group)
            size = whole


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _block(tensor: torch.Tensor, axes: Sequence[Axis], at: tuple[int, ...]) -> Block | None:
    """What the shard at these coordinates has of a tensor; None for a copy of what another one has."""
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    where = {axis.name: (axis.size, rank) for axis, rank in zip(axes, at, strict=True)}
    if isinstance(tensor, DTensor):
        placements = list(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
        # FSDP shards what TP has left, which DTensor calls a strided shard of the whole
        for name, placement in sorted(placements, key=lambda pair: isinstance(pair[1], _StridedShard)):
            if name in where and not placement.is_replicate():
                size, rank = where.pop(name)
                rows = -(-shape[placement.dim] // size)  # as torch.chunk: all the same, except the last ones
                first = min(rank * rows, shape[placement.dim])
                start[placement.dim] += first
                shape[placement.dim] = min(rows, shape[placement.dim] - first)
    return None if any(rank for _, rank in where.values()) else (tuple(start), tuple(shape))


def _slots(blocks: Sequence[Sequence[Block | None]], limit: int) -> Iterator[tuple[list[Slot], int]]:
    """(Rows of tensors, elements of one shard's part), bucket by bucket: at most `limit` elements, or a single row."""
    slots, used = [], 0
    for tensor, of_tensor in enumerate(blocks):
        shapes = [block[1] for block in of_tensor if block]
        num_rows, row_numel = max(s[0] for s in shapes), max(math.prod(s[1:]) for s in shapes)
        row = 0
        while row < num_rows:
            rows = min(num_rows - row, (limit - used) // row_numel)
            if rows <= 0 and slots:
                yield slots, used
                slots, used = [], 0
                continue
            rows = max(rows, 1)
            slots.append(Slot(tensor, row, row + rows, used))
            row, used = row + rows, used + -(-rows * row_numel // ALIGNMENT) * ALIGNMENT
    if slots:
        yield slots, used


def _pieces(
    slots: Sequence[Slot], size: int, names: Sequence[str], blocks: Sequence[Sequence[Block | None]]
) -> Iterator[Piece]:
    """The stretches of a gathered bucket, of which each shard has a part of `size` elements with these slots."""
    for slot in slots:
        for rank, block in enumerate(blocks[slot.tensor]):
            if block is None:
                continue
            start, shape = block
            rows = min(slot.end, shape[0]) - slot.first
            if rows > 0 and math.prod(shape) > 0:
                at, part = (start[0] + slot.first, *start[1:]), (rows, *shape[1:])
                yield Piece(names[slot.tensor], rank * size + slot.offset, at, part)


# ---------------------------------------------------------------------------------------------------------------------
# On any rank: what is done with buckets


def whole_tensors(bucket_map: BucketMap, fill: Fill, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor), each with memory of its own. Collective as `fill`: iterate to the end."""
    bucket, tensors = bucket_map.empty_bucket(device), {}
    missing = {name: math.prod(shape) for name, shape in bucket_map.shapes.items()}
    for index, described in enumerate(bucket_map.buckets):
        fill(index, bucket[: described.numel])
        for piece in described.pieces:
            if piece.name not in tensors:
                tensors[piece.name] = torch.empty(bucket_map.shapes[piece.name], dtype=bucket_map.dtype, device=device)
            piece.place(tensors[piece.name]).copy_(piece.values(bucket))
            missing[piece.name] -= math.prod(piece.shape)
            if missing[piece.name] == 0:
                yield piece.name, tensors.pop(piece.name)


def in_pipeline(stages: Sequence[Fill], bucket_map: BucketMap, device: torch.device) -> None:
    """Run all stages on every bucket of the map, each after the one before it; return when all is done.

    On a GPU each stage has a stream of its own, so that it takes up a bucket while the next stage still has the one
    before; a buffer is filled again when the last stage is done with it. The memory is that of BUFFERS buckets. On a
    CPU it is a plain loop.
    """
    if device.type == "cpu":
        buffer = bucket_map.empty_bucket(device)
        for index, bucket in enumerate(bucket_map.buckets):
            for stage in stages:
                stage(index, buffer[: bucket.numel])
        return
    buffers = [bucket_map.empty_bucket(device) for _ in range(BUFFERS)]
    done = [torch.cuda.current_stream(device).record_event()] * BUFFERS  # the weights of an update are there
    streams = [torch.cuda.Stream(device) for _ in stages]
    for index, bucket in enumerate(bucket_map.buckets):
        event = done[index % BUFFERS]
        for stage, stream in zip(stages, streams, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(event)
                stage(index, buffers[index % BUFFERS][: bucket.numel])
                event = stream.record_event()
        done[index % BUFFERS] = event
    torch.cuda.synchronize(device)  # for whatever stream an engine computes on, and so that the time is a sync's own
