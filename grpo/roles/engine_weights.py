"""Where a running vLLM engine keeps each Hugging Face tensor, so that new weights are copied straight there.

vLLM's `load_weights` maps names, stacks projections and takes a rank's slices in Python, tensor by tensor. Here it is
asked once what it would copy where: it gets tensors without memory, and what it does with them is watched. It answers
for any model and any tensor parallelism, and where it does more than copy, its own loading stays in use.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.models.buckets import BucketMap, Piece

aten = torch.ops.aten


class NotCopies(Exception):
    """What vLLM does with a weight is more than to copy parts of it."""


class Home(NamedTuple):
    """Where a block of a tensor lies in the engine."""

    start: tuple[int, ...]
    """First index of the block in the tensor, by dimension."""
    memory: torch.Tensor
    """A view of a parameter, as large as the block."""


class Copy(NamedTuple):
    """A part of a bucket to copy."""

    memory: torch.Tensor
    """Where to."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Of its first element in the bucket."""
    dense: bool
    """Neither side has gaps."""


class EngineWeights:
    """The parameters of a model in a running engine, as places to copy buckets to."""

    def __init__(self, model: nn.Module, bucket_map: BucketMap):
        """Ask `model.load_weights` where it would put tensors of these names and shapes. Changes no weight.

        Raises NotCopies if that cannot be told.
        """
        self._homes, self._filled = find_homes(model, bucket_map)
        self._copies = [
            [copy for piece in bucket.pieces for home in self._homes[piece.name] if (copy := _copy(piece, home))]
            for bucket in bucket_map.buckets
        ]

    @torch.no_grad()
    def load(self, index: int, bucket: torch.Tensor) -> None:
        """Copy bucket `index` of the map to its places. On a GPU it is only queued."""
        if index == 0:
            for memory, value in self._filled:
                memory.fill_(value)
        first = bucket.storage_offset()
        for dense in (True, False):  # what has no gaps goes in one launch
            copies = [copy for copy in self._copies[index] if copy.dense == dense]
            values = [bucket.as_strided(copy.shape, copy.strides, first + copy.offset) for copy in copies]
            if copies:
                torch._foreach_copy_([copy.memory for copy in copies], values)

    @torch.no_grad()
    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the engine has this full tensor, or its part of it, where `load` would put it."""
        parts = [Piece(name, 0, home.start, tuple(home.memory.shape)).place(tensor) for home in self._homes[name]]
        return all(bool((home.memory == part).all()) for home, part in zip(self._homes[name], parts, strict=True))


def load_and_learn(
    model: nn.Module, bucket_map: BucketMap, tensors: Iterator[tuple[str, torch.Tensor]]
) -> EngineWeights | None:
    """Load all tensors of the map by vLLM's own means; returns where they went, None if that cannot be told.

    Nothing is believed that the load does not confirm: each tensor must then lie where it was said to be.
    """
    learned, problem, elsewhere = None, "", []
    try:
        learned = EngineWeights(model, bucket_map)
    except NotCopies as reason:
        problem = str(reason)

    def compared() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if learned and not learned.holds(name, tensor):  # vLLM asks for the next one when it has loaded this one
                elsewhere.append(name)

    model.load_weights(compared())
    if elsewhere:
        problem = f"{len(elsewhere)} of {len(bucket_map.shapes)} tensors are not where expected, {elsewhere[0]} first"
    if problem:
        print(f"weights are loaded by vLLM's own means, which is slower: {problem}", flush=True)
    return None if problem else learned


def find_homes(model: nn.Module, bucket_map: BucketMap) -> tuple[dict[str, list[Home]], list[tuple[torch.Tensor, Any]]]:
    """Where `model.load_weights` puts which block of each tensor; and what it fills with a number meanwhile.

    Raises NotCopies as EngineWeights does.
    """
    names, shapes = list(bucket_map.shapes), list(bucket_map.shapes.values())
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(itertools.accumulate(sizes))
    # one after the other in one range, so that the place of a view there says whose view it is
    everything = torch.empty(ends[-1], dtype=bucket_map.dtype, device="meta")
    tensors = [part.view(shape) for part, shape in zip(everything.split(sizes), shapes, strict=True)]
    with torch.no_grad(), _Watch() as watch:
        model.load_weights(zip(names, tensors, strict=True))
    homes: dict[str, list[Home]] = {name: [] for name in names}
    for memory, block in watch.copies:
        index = bisect.bisect_right(ends, block.storage_offset())
        name, strides = names[index], tensors[index].stride()
        rest, start = block.storage_offset() - (ends[index] - sizes[index]), []
        for stride in strides:
            first, rest = divmod(rest, stride)
            start.append(first)
        keeps_rank = block.dim() == len(strides) and block.shape == memory.shape
        steps = zip(block.shape, block.stride(), strides, strict=keeps_rank)
        if not keeps_rank or any(size > 1 and mine != whole for size, mine, whole in steps):
            raise NotCopies(f"{name}: it is copied in another shape")
        homes[name].append(Home(tuple(start), memory))
    written = [home.memory for found in homes.values() for home in found] + [memory for memory, _ in watch.filled]
    num_written, num_there = (sum(map(torch.Tensor.numel, tensors)) for tensors in (written, model.parameters()))
    if num_written != num_there:
        raise NotCopies(f"{num_written} elements are written, where parameters have {num_there}")
    return homes, watch.filled


class _Watch(TorchDispatchMode):
    """Notes what is copied out of tensors without memory, which is not done, and what is filled with a number."""

    def __init__(self):
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.filled: list[tuple[torch.Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and args[1].is_meta:
            if args[0].is_meta:
                raise NotCopies("a weight is copied to a place that is not the engine's")
            if args[1].numel():
                self.copies.append((args[0], args[1]))
            return args[0]
        of_ours = any(isinstance(value, torch.Tensor) and value.is_meta for value in tree_leaves((args, kwargs)))
        if of_ours and not func.is_view:
            raise NotCopies(f"{func} is done with a weight")
        if func is aten.fill_.Scalar and args[0].numel():
            self.filled.append((args[0], args[1]))
        return func(*args, **kwargs)


def _copy(piece: Piece, home: Home) -> Copy | None:
    """What of a piece belongs there, if anything."""
    ends = [first + size for first, size in zip(piece.start, piece.shape, strict=True)]
    home_ends = [first + size for first, size in zip(home.start, home.memory.shape, strict=True)]
    start = tuple(map(max, piece.start, home.start))
    shape = tuple(end - first for end, first in zip(map(min, ends, home_ends), start, strict=True))
    if min(shape) <= 0:
        return None
    strides = tuple(math.prod(piece.shape[dim + 1 :]) for dim in range(len(shape)))
    offset = piece.offset + sum((s - p) * stride for s, p, stride in zip(start, piece.start, strides, strict=True))
    at = tuple(first - home_first for first, home_first in zip(start, home.start, strict=True))
    memory = Piece(piece.name, 0, at, shape).place(home.memory)
    return Copy(memory, shape, strides, offset, memory.is_contiguous() and shape[1:] == piece.shape[1:])
