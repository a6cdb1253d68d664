"""What the roles say to each other: decisions, prompts, completions over the bridge `control`, batches over `learners`.

Every function here is a collective over the bridge that it names: all ranks call it, in the same order. One over
`learners` returns None at once on the other ranks, the generators. Ragged numbers travel as flat CPU tensors with their
lengths, without padding. With `overlap_steps=1` nothing passes over `control` between `launch` and `land`: generators
sample for the next step, while learners train and talk over `learners`.
"""

import contextlib
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
    from grpo.roles.engine.generator import Generator
    from grpo.roles.reference import Reference

Method = TypeVar("Method", bound=Callable)


def broadcast(value: Any, group: ProcessGroup) -> Any:
    """Give every rank of a bridge the value of its first rank; the others pass anything. Small picklable values."""
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group, device=torch.device("cpu"))
    return values[0]


def on_driver(method: Method, to_all: bool = False, bridge: str = "control", scores: bool = False) -> Method:
    """Make a method of an object that every rank holds one that only the driver runs; elsewhere it returns None.

    Collective over `self.roles.control`: every rank calls it, arguments count on the driver alone. If it raises there,
    every rank stops: the driver with the exception, the others silently, so that one error is seen and no rank waits.
    scores: the method may ask `self.reward_model`, for which the other learners compute their parts meanwhile.
    """

    @functools.wraps(method)
    def run(self, *arguments):
        group, result = getattr(self.roles, bridge), None
        if group is None:
            return None
        reward_model = self.reward_model if scores else None
        if self.roles.is_driver:
            try:
                with reward_model.asked() if reward_model else contextlib.nullcontext():
                    result = method(self, *arguments)
            except Exception:  # whatever it is, the others must not wait for a driver that is gone
                broadcast((True, None), group)
                raise
        elif reward_model:
            reward_model.answer()
        failed, shown = broadcast((False, result if to_all else None), group)
        if failed:
            raise SystemExit(1)
        return shown if to_all else result

    return run


from_driver = functools.partial(on_driver, to_all=True)
"""`on_driver` with the driver's result for every rank; it must be small and picklable."""
on_driver_for_learners = functools.partial(on_driver, bridge="learners")
"""`on_driver` over `self.roles.learners`: generators do not wait for it."""


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
    """One rank's part of what is sampled ahead, and when, in seconds of the wall clock, which hosts have in common."""

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


def add_ref_logprobs(
    batch: TrainBatch | None, reference: "Reference | None", roles: Roles, read: TrainBatch | None = None
) -> TrainBatch | None:
    """Compute the reference's log-probs and join them into every learner's batch, if there is a reference.

    read: what the reference reads, if not the batch: the same completions behind other prompts, so that the tokens that
    count in the loss are the same in the same order. Collective over `roles.learners`: reference ranks pass theirs, the
    others None. Each computes its part of those tokens and has 0 where others do, so that the sum over ranks is the
    whole and exact.
    """
    if not roles.has_reference or not roles.learns:
        return batch
    read = read or batch
    total_N = reference.logprobs(read) if reference else torch.zeros(read.num_tokens)
    dist.all_reduce(total_N, group=roles.learners)
    if read is not batch:
        total_N = torch.zeros(batch.num_tokens).masked_scatter(batch.loss_mask_N, total_N[read.loss_mask_N])
    return replace(batch, ref_logprobs_N=total_N)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor | None] | None, roles: Roles
) -> Sequence[torch.Tensor | None] | None:
    """Give every learner the driver's flat CPU tensors (and its Nones); None on the other ranks.

    Collective over `roles.learners`.
    """
    if not roles.learns:
        return None
    specs = [None if t is None else (t.shape, t.dtype) for t in tensors] if roles.is_driver else None
    specs = broadcast(specs, roles.learners)
    if not roles.is_driver:
        tensors = [None if spec is None else torch.empty(spec[0], dtype=spec[1]) for spec in specs]
    for tensor in tensors:
        if tensor is not None and len(tensor):
            dist.broadcast(tensor.view(torch.uint8), group_src=0, group=roles.learners)  # gloo knows not every dtype
    return tensors


def flatten_completions(completions: list[Completion]) -> list[torch.Tensor]:
    """Completions as flat tensors: what is known of each and of its pieces as bytes of JSON; ids, loss mask, log-probs.

    So they go over the wire quickly, and into a checkpoint without pickles.
    """
    pieces = [piece for completion in completions for piece in completion.pieces]
    facts = [
        {f.name: getattr(completion, f.name) for f in fields(completion)}
        | {"pieces": [(p.num_tokens, p.version, p.logprobs_T is not None) for p in completion.pieces]}
        for completion in completions
    ]
    nothing = torch.empty(0)
    return [
        torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
        torch.cat([nothing.long(), *(piece.ids_T for piece in pieces)]),
        torch.cat([nothing.bool(), *(piece.loss_mask_T for piece in pieces)]),
        torch.cat([nothing, *(completion.logprobs_T for completion in completions)]),
    ]


def unflatten_completions(
    facts: torch.Tensor, ids: torch.Tensor, loss_mask: torch.Tensor, logprobs: torch.Tensor
) -> list[Completion]:
    """Undo `flatten_completions`."""
    completions = json.loads(facts.numpy().tobytes())
    pieces = [piece for completion in completions for piece in completion["pieces"]]
    lengths = [num_tokens for num_tokens, *_ in pieces]
    tokens = zip(pieces, ids.split(lengths), loss_mask.split(lengths), logprobs.split(lengths), strict=True)
    whole = (
        Piece(ids_T, mask_T, logprobs_T if sampled else None, version)
        for (_, version, sampled), ids_T, mask_T, logprobs_T in tokens
    )
    return [Completion(**c | {"pieces": tuple(itertools.islice(whole, len(c["pieces"])))}) for c in completions]
