"""What the roles say to each other: decisions, prompts, completions over the bridge `control`, batches over `learners`.

Every function here is a collective over the bridge that it names: all ranks call it, in the same order. One over
`learners` returns None at once on the other ranks, the generators. Ragged numbers travel as flat CPU tensors with their
lengths, without padding.

With `overlap_steps=1` the generators sample for the next step while the learners train on this one. Between `launch`
and `land` nothing passes over `control`: the generators are busy, and the learners talk over `learners`. The weights
that sample are then one step older than those that are trained, except in a run's first step.
"""

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from grpo.roles.process_groups import Roles
from grpo.types import Completion, Piece, Requests, TrainBatch

if TYPE_CHECKING:  # these load torchtitan
    from grpo.roles.generator import Generator
    from grpo.roles.reference import Reference

Method = TypeVar("Method", bound=Callable)


def broadcast(value: Any, group: ProcessGroup) -> Any:
    """Give every rank of a bridge the value of its first rank; the others pass anything. Small picklable values."""
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group, device=torch.device("cpu"))
    return values[0]


def on_driver(method: Method, to_all: bool = False, bridge: str = "control") -> Method:
    """Make a method of an object that every rank holds one that only the driver runs; elsewhere it returns None.

    Collective over `self.roles.control`: every rank calls it, arguments count on the driver alone. If it raises there,
    every rank stops: the driver with the exception, the others silently, so that one error is seen and no rank waits.
    """

    @functools.wraps(method)
    def run(self, *arguments):
        group, result = getattr(self.roles, bridge), None
        if group is None:
            return None
        if self.roles.is_driver:
            try:
                result = method(self, *arguments)
            except Exception:  # whatever it is, the others must not wait for a driver that is gone
                broadcast((True, None), group)
                raise
        failed, shown = broadcast((False, result if to_all else None), group)
        if failed:
            raise SystemExit(1)
        return shown if to_all else result

    return run


def from_driver(method: Method) -> Method:
    """`on_driver` with the driver's result for every rank; it must be small and picklable."""
    return on_driver(method, to_all=True)


def on_driver_for_learners(method: Method) -> Method:
    """`on_driver` over `self.roles.learners`: generators do not wait for it."""
    return on_driver(method, bridge="learners")


def wait_for_all(roles: Roles) -> None:
    """Return when every rank is here. Collective over `roles.control`."""
    dist.barrier(group=roles.control)


def gather_to_driver(value: Any, roles: Roles) -> list[Any] | None:
    """Every rank's picklable value, in the order of the ranks; None except on the driver.

    Collective over `roles.control`.
    """
    values = [None] * roles.control.size() if roles.is_driver else None
    dist.gather_object(value, values, group_dst=0, group=roles.control)
    return values


def gather_completions(local: list[Completion] | None, roles: Roles) -> list[Completion] | None:
    """Every replica's completions in the order of their `index`, on the driver; None elsewhere.

    Collective over `roles.control`; ranks that are not the head of a replica pass None.
    """
    parts = gather_to_driver(flatten_completions(local or []), roles)
    if parts is None:
        return None
    completions = [completion for part in parts for completion in unflatten_completions(*part)]
    return sorted(completions, key=lambda completion: completion.index)


@dataclass(frozen=True, eq=False)
class Ahead:
    """One rank's part of what is sampled ahead, and when; seconds of the wall clock, which hosts have in common."""

    completions: list[Completion] | None
    """On the head of a replica."""
    began: float
    ended: float
    """When it had sampled; `began` on the learners, which do not wait."""


def launch(requests: Requests | None, group_size: int, generator: "Generator | None") -> Ahead | None:
    """Sample ahead on the generators; the learners go on at once. None if nothing is asked for."""
    if requests is None:
        return None
    began = time.time()
    completions = generator.generate(requests, group_size) if generator else None
    return Ahead(completions, began, time.time() if generator else began)


def land(ahead: Ahead | None, driver: Any, roles: Roles) -> None:
    """Bring what was sampled ahead to the driver, once it and the generators are done.

    `driver` has a method `land_ahead(completions, seconds, overlap_seconds)` that runs on rank 0. Collective over
    `roles.control`, if anything was sampled ahead.
    """
    if ahead is None:
        return
    arrived, seconds, overlap = time.time(), 0.0, 0.0
    completions = gather_completions(ahead.completions, roles)
    if times := gather_to_driver((ahead.began, ahead.ended), roles):
        began, ended = min(times[head][0] for head in roles.heads), max(times[head][1] for head in roles.heads)
        seconds, overlap = ended - began, max(0.0, min(ended, arrived) - max(began, ahead.began))
    driver.land_ahead(completions, seconds, overlap)


def send_batch(batch: TrainBatch | None, roles: Roles) -> TrainBatch | None:
    """Deliver the driver's batch to reference and trainer ranks.

    Collective over `roles.learners`. Returns the batch on trainer and reference ranks, None on the others.
    """
    tensors = broadcast_tensors([getattr(batch, f.name) for f in fields(batch)] if roles.is_driver else None, roles)
    return TrainBatch(*tensors) if roles.learns else None


def add_ref_logprobs(batch: TrainBatch | None, reference: "Reference | None", roles: Roles) -> TrainBatch | None:
    """Compute the reference's log-probs and join them into every learner's batch, if there is a reference.

    Collective over `roles.learners`: reference ranks pass theirs, the others None. Each computes its part of the tokens
    that count in the loss and has 0 where others do, so that the sum over ranks is the whole and exact.
    """
    if not roles.reference_ranks or not roles.learns:
        return batch
    total_N = reference.logprobs(batch) if reference else torch.zeros(batch.num_tokens)
    dist.all_reduce(total_N, group=roles.learners)
    return replace(batch, ref_logprobs_N=total_N)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor | None] | None, roles: Roles
) -> Sequence[torch.Tensor | None] | None:
    """Give every learner the driver's flat CPU tensors (and its Nones), in one message; None on the other ranks.

    Collective over `roles.learners`.
    """
    if not roles.learns:
        return None
    specs = [None if t is None else (t.dtype, t.nbytes) for t in tensors] if roles.is_driver else None
    specs = broadcast(specs, roles.learners)
    sizes = [spec[1] for spec in specs if spec]
    if roles.is_driver:
        data = torch.cat([t.contiguous().view(torch.uint8) for t in tensors if t is not None])
    else:
        data = torch.empty(sum(sizes), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, group_src=0, group=roles.learners)
    pieces = iter(data.split(sizes))
    # copies, because a view of a larger dtype must begin at a multiple of its size
    return tensors if roles.is_driver else [spec and next(pieces).clone().view(spec[0]) for spec in specs]


def flatten_completions(completions: list[Completion]) -> list[torch.Tensor]:
    """Completions as flat tensors: of each its pieces, truncated, index, ended and bytes of its episode, column after
    column; temperatures; of each piece its tokens, version, sampled, likewise; ids, loss mask, log-probs, episodes."""
    pieces = [piece for completion in completions for piece in completion.pieces]
    episodes = [b"" if c.episode is None else json.dumps(c.episode).encode() for c in completions]
    both = zip(completions, episodes, strict=True)
    of_completions = [(len(c.pieces), c.truncated, c.index, c.ended, len(episode)) for c, episode in both]
    of_pieces = [(piece.num_tokens, piece.version, piece.logprobs_T is not None) for piece in pieces]
    nothing = torch.empty(0)
    return [
        torch.tensor(of_completions, dtype=torch.int64).view(-1, 5).T.flatten(),
        torch.tensor([c.temperature for c in completions], dtype=torch.float64),
        torch.tensor(of_pieces, dtype=torch.int64).view(-1, 3).T.flatten(),
        torch.cat([nothing.long(), *(piece.ids_T for piece in pieces)]),
        torch.cat([nothing.bool(), *(piece.loss_mask_T for piece in pieces)]),
        torch.cat([nothing, *(c.logprobs_T for c in completions)]),
        torch.frombuffer(bytearray(b"".join(episodes)), dtype=torch.uint8) if any(episodes) else nothing.byte(),
    ]


def unflatten_completions(
    header: torch.Tensor,
    temperatures: torch.Tensor,
    of_pieces: torch.Tensor,
    ids: torch.Tensor,
    loss_mask: torch.Tensor,
    logprobs: torch.Tensor,
    episodes: torch.Tensor,
) -> list[Completion]:
    """Undo `flatten_completions`."""
    num_pieces, truncated, indices, ended, num_bytes = header.view(5, -1).tolist()
    lengths, versions, sampled = of_pieces.view(3, -1).tolist()
    tokens = zip(ids.split(lengths), loss_mask.split(lengths), logprobs.split(lengths), sampled, versions, strict=True)
    pieces = (Piece(i, mask, lp if is_sampled else None, version) for i, mask, lp, is_sampled, version in tokens)
    taken = [tuple(itertools.islice(pieces, number)) for number in num_pieces]
    notes = [json.loads(bytes(part.tolist())) if len(part) else None for part in episodes.split(num_bytes)]
    columns = taken, map(bool, truncated), temperatures.tolist(), indices, map(bool, ended), notes
    return [Completion(*values) for values in zip(*columns, strict=True)]
