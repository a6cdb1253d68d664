"""A sharded model's weights gathered into flat buckets, with one collective a bucket.

A bucket lies as the gather leaves it: shard after shard, each with parts of the same tensors in the same places. This
serves every sharding that torchtitan makes here: FSDP, TP, both, with and without replicas, and one rank. What lies
where follows from the model and its sharding alone.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from grpo.models.buckets import Bucket, BucketMap, Piece
from grpo.models.build import ShardedModel
from grpo.models.lora import LoRALinear, adapted_layers, merged_weight

# Large enough for the full bandwidth of NVLink; a tensor may lie in several buckets, so two in flight are all it takes
BUCKET_BYTES = 256 * 2**20
# Elements: every stretch begins at a multiple, where copies by GPUs are fast
ALIGNMENT = 64

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and size by dimension: a part of a tensor."""


@dataclass(frozen=True)
class Axis:
    """A dimension of the mesh over which weights are sharded."""

    name: str
    size: int
    rank: int
    group: ProcessGroup


@dataclass(frozen=True)
class Slot:
    """Rows of a tensor's shard and their place in the shard's part of a bucket, the same on all ranks."""

    index: int
    """Of the tensor."""
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
        self._axes = _sharding_axes(model)
        coordinates = list(itertools.product(*(range(axis.size) for axis in self._axes)))
        self._rank = coordinates.index(tuple(axis.rank for axis in self._axes))
        tensors = [weight.weight if isinstance(weight, LoRALinear) else weight for weight in self._weights]
        blocks = [[_block(tensor, self._axes, at) for at in coordinates] for tensor in tensors]
        self._slots = list(_slots(blocks, bucket_bytes // dtype.itemsize // len(coordinates)))
        names, shapes = list(weights), [tuple(tensor.shape) for tensor in tensors]
        for name, tensor, of_tensor in zip(names, tensors, blocks, strict=True):
            mine = of_tensor[self._rank]
            shape = tuple((tensor.to_local() if isinstance(tensor, DTensor) else tensor).shape)
            if mine and mine[1] != shape:
                raise RuntimeError(f"{name}: this rank holds a shard of {shape}, where {mine[1]} was expected")
        buckets = tuple(_bucket(slots, names, blocks) for slots in self._slots)
        self.bucket_map = BucketMap(dtype, dict(zip(names, shapes, strict=True)), buckets)

    @torch.no_grad()
    def fill(self, index: int, bucket: torch.Tensor) -> None:
        """Put bucket `index` of the map into `bucket`. Collective over the role's ranks, bucket after bucket.

        Shards are cast before they are gathered, which halves the traffic of bfloat16. On a GPU it is only queued.
        """
        size = len(bucket) // math.prod(axis.size for axis in self._axes)
        mine = bucket[self._rank * size : (self._rank + 1) * size]
        targets, shards = [], []
        for slot in self._slots[index]:
            rows = self._shard(slot.index)[slot.first : slot.end]
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

    def _shard(self, index: int) -> torch.Tensor:
        weight = self._weights[index]
        weight = merged_weight(weight, self._dtype) if isinstance(weight, LoRALinear) else weight
        return weight.to_local() if isinstance(weight, DTensor) else weight


def _sharding_axes(model: ShardedModel) -> list[Axis]:
    """Of more than one rank, in the order of the mesh; replicas hold the same and are none."""
    meshes = [(name, model.parallel_dims.get_optional_mesh(name)) for name in ("fsdp", "tp")]
    return [
        Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group())
        for name, mesh in meshes
        if mesh is not None and mesh.size() > 1
    ]


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


def _slots(blocks: Sequence[Sequence[Block | None]], limit: int) -> Iterator[list[Slot]]:
    """Rows of all tensors in lists, one a bucket, each of at most `limit` elements or a single row."""
    slots, used = [], 0
    for index, of_tensor in enumerate(blocks):
        shapes = [block[1] for block in of_tensor if block]
        num_rows, row_numel = max(s[0] for s in shapes), max(math.prod(s[1:]) for s in shapes)
        row = 0
        while row < num_rows:
            rows = min(num_rows - row, (limit - used) // row_numel)
            if rows <= 0 and slots:
                yield slots
                slots, used = [], 0
                continue
            slots.append(Slot(index, row, row + max(rows, 1), used))
            row, used = slots[-1].end, used + _aligned(max(rows, 1) * row_numel)
    if slots:
        yield slots


def _bucket(slots: Sequence[Slot], names: Sequence[str], blocks: Sequence[Sequence[Block | None]]) -> Bucket:
    """The gathered bucket of these slots."""

    def numel(slot: Slot) -> int:
        return max(math.prod(((slot.end - slot.first), *block[1][1:])) for block in blocks[slot.index] if block)

    size = slots[-1].offset + _aligned(numel(slots[-1]))  # of one shard's part
    pieces = []
    for slot in slots:
        for rank, block in enumerate(blocks[slot.index]):
            if block is None:
                continue
            start, shape = block
            rows = min(slot.end, shape[0]) - slot.first
            if rows > 0 and math.prod(shape) > 0:
                at, part = (start[0] + slot.first, *start[1:]), (rows, *shape[1:])
                pieces.append(Piece(names[slot.index], rank * size + slot.offset, at, part))
    return Bucket(size * len(blocks[0]), tuple(pieces))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
