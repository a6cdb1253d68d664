"""What the roles say to each other: decisions, prompts, completions over the bridge `control`, batches over `learners`.

Every function here is a collective over the bridge that it names: all ranks call it, in the same order. One over
`learners` returns None at once on the other ranks, the generators. Ragged numbers travel as flat CPU tensors with their
lengths, without padding; only small decisions are pickled.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed import ProcessGroup

import grpo.roles.timed_collectives as dist  # torch's own, and how long they take
from grpo.roles.process_groups import Roles
from grpo.roles.progress import direct_messages
from grpo.types import Completion, TrainBatch

if TYPE_CHECKING:
    from grpo.roles.reference import Reference  # which loads torchtitan

Method = TypeVar("Method", bound=Callable)


def broadcast(value: Any, group: ProcessGroup) -> Any:
    """Give every rank of a bridge the value of its first rank; the others pass anything. Small picklable values."""
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group, device=torch.device("cpu"))
    return values[0]


def on_driver(method: Method, to_all: bool = False, bridge: str = "control") -> Method:
    """Make a method of an object that every rank holds one that only the driver runs. Returns None elsewhere.

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
    """As `on_driver`, except that every rank gets the driver's result, which must be small and picklable."""
    return on_driver(method, to_all=True)


def on_driver_for_learners(method: Method) -> Method:
    """As `on_driver`, except that generators do not wait for it. Collective over `self.roles.learners`."""
    return on_driver(method, bridge="learners")


def wait_for_all(roles: Roles) -> None:
    """Return when every rank is here. Collective over `roles.control`."""
    dist.barrier(group=roles.control)


def gather_to_driver(value: Any, roles: Roles) -> list[Any] | None:
    """Every rank's small picklable value, in the order of the ranks; None except on the driver.

    Collective over `roles.control`.
    """
    values = [None] * roles.control.size() if roles.is_driver else None
    dist.gather_object(value, values, group_dst=0, group=roles.control)
    return values


def gather_completions(local: list[Completion] | None, roles: Roles) -> list[Completion] | None:
    """Bring every replica's completions to the driver, in the order of their `index`.

    Collective over `roles.control`; ranks that are not the head of a replica pass None. Returns the completions on the
    driver, None elsewhere.
    """
    tensors = flatten_completions(local or [])
    sizes = [torch.empty(len(tensors), dtype=torch.int64) for _ in range(roles.control.size())]
    dist.all_gather(sizes, torch.tensor([len(t) for t in tensors]), group=roles.control)
    if not roles.is_driver:
        for tensor in tensors:
            if len(tensor):
                dist.send(tensor, group_dst=0, group=roles.control)
                direct_messages[roles.control.group_name] += 1
        return None
    completions = []
    for head in roles.heads:
        parts = tensors
        if head != roles.rank:
            like = zip(sizes[head].tolist(), tensors, strict=True)  # dtypes are the same on all ranks
            parts = [torch.empty(size, dtype=mine.dtype) for size, mine in like]
            for buffer in parts:
                if len(buffer):
                    dist.recv(buffer, group_src=head, group=roles.control)
                    direct_messages[roles.control.group_name] += 1
        completions += unflatten_completions(*parts)
    return sorted(completions, key=lambda completion: completion.index)


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


def flatten_completions(
    completions: list[Completion],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(header, earlier, temperatures, ids, logprobs).

    The header has all lengths, then all truncated (0 or 1), versions, indices and ended (0 or 1); earlier pieces are
    (position in the list, version, number of tokens).
    """
    header = [(c.num_tokens, c.truncated, c.version, c.index, c.ended) for c in completions]
    earlier = [(position, *piece) for position, c in enumerate(completions) for piece in c.earlier]
    return (
        torch.tensor(header, dtype=torch.int64).view(-1, 5).T.flatten(),
        torch.tensor(earlier, dtype=torch.int64).flatten(),
        torch.tensor([c.temperature for c in completions], dtype=torch.float64),
        torch.cat([torch.empty(0, dtype=torch.int64), *(c.ids_T for c in completions)]),
        torch.cat([torch.empty(0), *(c.logprobs_T for c in completions)]),
    )


def unflatten_completions(
    header: torch.Tensor,
    earlier: torch.Tensor,
    temperatures: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
) -> list[Completion]:
    """Undo `flatten_completions`."""
    lengths, truncated, versions, indices, ended = header.view(5, -1).tolist()
    earlier_of: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for position, version, count in earlier.view(-1, 3).tolist():
        earlier_of[position].append((version, count))
    tokens = ids.split(lengths), logprobs.split(lengths)
    flags = map(bool, truncated), versions, temperatures.tolist(), indices, map(bool, ended)
    return [Completion(*fields) for fields in zip(*tokens, *flags, map(tuple, earlier_of), strict=True)]
