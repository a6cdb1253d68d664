"""Weights in flat buckets, as they travel from trainers to engines: what lies where, and full tensors out of them.

Nobody puts full tensors together on the way. A `BucketMap` says of which block of which tensor each stretch of a bucket
is, and whoever takes a bucket copies the blocks to where they belong. It is made once, by gather.py, for a whole run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

BUFFERS = 2  # buckets in flight: one for each of the two stages that a rank has at most
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
