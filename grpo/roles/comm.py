"""What the roles say to each other: decisions, prompts, completions and log-probs over the `control` bridge.

Every function here is a collective over `roles.control`: all ranks call it, in the same order. Ragged numbers travel as
flat CPU tensors with their lengths, without padding; only small decisions are pickled.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from grpo.roles.process_groups import Roles
from grpo.types import Completion, TrainBatch

T = TypeVar("T")


def share(value: T | None, roles: Roles) -> T:
    """Give every rank the driver's value (any picklable object; other ranks' arguments are ignored).

    Collective over `roles.control`. The one way decisions reach the ranks.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if roles.is_driver else None
    size = torch.tensor([len(data) if roles.is_driver else 0])
    dist.broadcast(size, group_src=0, group=roles.control)
    buffer = data if roles.is_driver else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, group_src=0, group=roles.control)
    return value if roles.is_driver else pickle.loads(buffer.numpy().tobytes())


def on_driver(roles: Roles, function: Callable[..., T], *arguments: Any) -> T | None:
    """Run `function` on the driver alone; its result there, None elsewhere.

    If it raises, every rank stops: the driver with the exception, the others silently, so that one error is seen and
    nobody waits. Collective over `roles.control`.
    """
    result, failure = None, None
    if roles.is_driver:
        try:
            result = function(*arguments)
        except Exception as error:  # whatever it is, the others must not wait for a driver that is gone
            failure = error
    failed = share(failure is not None if roles.is_driver else None, roles)
    if failure is not None:
        raise failure
    if failed:
        raise SystemExit(1)
    return result


def gather_completions(local: list[Completion] | None, roles: Roles) -> list[Completion] | None:
    """Bring every replica's completions to the driver, in replica order.

    Collective over `roles.control`; ranks that are not the head of a replica pass None. Returns the completions on the
    driver, None elsewhere.
    """
    sends = roles.rank in roles.heads
    parts = _gather(_flatten(local) if sends else (_EMPTY_INT, _EMPTY_INT, _EMPTY_FLOAT), roles)
    return [c for head in roles.heads for c in _unflatten(*parts[head])] if roles.is_driver else None


def send_batch(batch: TrainBatch | None, roles: Roles) -> TrainBatch | None:
    """Deliver the driver's batch to reference and trainer ranks.

    Collective over `roles.control`. Returns the batch on trainer and reference ranks, None on generator ranks.
    """
    tensors = None
    if roles.is_driver:
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if getattr(batch, f.name) is not None}
    tensors = share_tensors(tensors, roles)
    return TrainBatch(**tensors) if roles.trains or roles.references else None


def add_advantages(batch: TrainBatch | None, advantages_S: torch.Tensor | None, roles: Roles) -> TrainBatch | None:
    """Deliver the driver's advantages (float32 [S]) into everyone's batch. Collective over `roles.control`."""
    shared = share_tensors({"advantages_S": advantages_S} if roles.is_driver else None, roles)
    return batch and replace(batch, **shared)


def add_ref_logprobs(batch: TrainBatch | None, ref_logprobs_C: torch.Tensor | None, roles: Roles) -> TrainBatch | None:
    """Join the reference ranks' log-probs into everyone's batch, if there is a reference. Collective over `control`.

    Each reference rank passes a float32 [C] tensor that holds its own share and 0 elsewhere, so that the sum over
    ranks is the whole and exact. Ranks without a reference pass None.
    """
    if not roles.reference_ranks:
        return batch
    size = share(batch.num_completion_tokens if roles.is_driver else None, roles)
    total_C = torch.zeros(size) if ref_logprobs_C is None else ref_logprobs_C.clone()
    dist.all_reduce(total_C, group=roles.control)
    return batch and replace(batch, ref_logprobs_C=total_C)


def share_tensors(tensors: dict[str, torch.Tensor] | None, roles: Roles) -> dict[str, torch.Tensor]:
    """Give every rank the driver's CPU tensors by name, unpickled. Collective over `roles.control`."""
    specs = share({name: (t.shape, t.dtype) for name, t in tensors.items()} if roles.is_driver else None, roles)
    buffers = (
        tensors if roles.is_driver else {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in specs.items()}
    )
    for buffer in buffers.values():
        if buffer.numel():
            dist.broadcast(buffer, group_src=0, group=roles.control)
    return buffers


_EMPTY_INT, _EMPTY_FLOAT = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)


def _gather(tensors: Sequence[torch.Tensor], roles: Roles) -> dict[int, Sequence[torch.Tensor]] | None:
    """Flat tensors of every replica head to the driver, whatever their lengths; dtypes are the same on all ranks."""
    sizes = [torch.empty(len(tensors), dtype=torch.int64) for _ in range(roles.num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(t) for t in tensors]), group=roles.control)
    if roles.is_driver:
        parts = {}
        for head in roles.heads:
            parts[head] = tensors
            if head != roles.rank:
                like = zip(sizes[head].tolist(), tensors, strict=True)
                parts[head] = [torch.empty(size, dtype=mine.dtype) for size, mine in like]
                for buffer in parts[head]:
                    if len(buffer):
                        dist.recv(buffer, group_src=head, group=roles.control)
        return parts
    for tensor in tensors:
        if len(tensor):
            dist.send(tensor, group_dst=0, group=roles.control)
    return None


def _flatten(completions: list[Completion]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(header, ids, logprobs); the header holds each completion's length, then truncated (0 or 1), then version."""
    header = [len(c.ids) for c in completions] + [int(c.truncated) for c in completions]
    header += [c.version for c in completions]
    ids = numpy.fromiter((token for c in completions for token in c.ids), dtype=numpy.int64)
    logprobs = numpy.fromiter((x for c in completions for x in c.logprobs), dtype=numpy.float32)
    return torch.tensor(header, dtype=torch.int64), torch.from_numpy(ids), torch.from_numpy(logprobs)


def _unflatten(header: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> list[Completion]:
    lengths, truncated, versions = header.view(3, -1).tolist()
    pieces = zip(ids.split(lengths), logprobs.split(lengths), truncated, versions, strict=True)
    return [Completion(i.tolist(), x.tolist(), bool(cut), version) for i, x, cut, version in pieces]
