"""What the roles send each other: decisions, prompts, completions over the bridge `control`, batches over `learners`.

Every function here is a collective over the bridge that it names: all ranks call it, in the same order. A collective
over `learners` returns None at once on the generators. Ragged numbers travel as flat CPU tensors with their lengths,
without padding. With `overlap_steps=1` nothing passes over `control` between `start_sampling_ahead` and
`finish_sampling_ahead`: generators sample for the next step, while learners train and talk over `learners`.
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
from torch import Tensor
from torch.distributed import ProcessGroup

from grpo.roles.process_groups import Roles
from grpo.types import Piece, Requests, Rollout, TrainBatch, check_saved

if TYPE_CHECKING:  # these load torchtitan
    from grpo.roles.engine.generator import Generator
    from grpo.roles.reference import Reference

Method = TypeVar("Method", bound=Callable)
# What `flatten_rollouts` writes of each rollout and of each piece besides tokens
ROLLOUT_FACTS = ("index", "lengths", "temperature", "ended_by", "episode")
PIECE_FACTS = ("num_tokens", "is_sampled", "num_kept", "version", "ended_by")


def broadcast(value: Any, group: ProcessGroup) -> Any:
    """Give every rank of a bridge the value of its first rank; the others pass anything. Picklable values."""
    values = [value]
    dist.broadcast_object_list(
        values,
        group_src=0,
        group=group,
        device=torch.device("cpu"),
    )
    return values[0]


def on_driver(
    method: Method,
    to_all: bool = False,
    bridge: str = "control",
    scores: bool = False,
) -> Method:
    """Make a method that every rank calls run on the driver alone; on the other ranks it returns None.

    Collective over the group `bridge` of the roles; arguments count on the driver alone. If the method raises there,
    its ranks stop: the driver with the exception, the others silently, so that one error is printed and no rank waits.
    scores: the method may ask `self.reward_model`, and the other learners compute their parts of its scores meanwhile.
    """

    @functools.wraps(method)
    def run(self, *arguments):
        group = getattr(self.roles, bridge)
        if group is None:
            return None
        result = None
        reward_model = self.reward_model if scores else None
        if self.roles.is_driver:
            try:
                with reward_model.asked() if reward_model else contextlib.nullcontext():
                    result = method(self, *arguments)
            except Exception:  # whatever it is, the others must not wait for a driver that is gone
                broadcast((True, None), group)
                raise
        elif reward_model:
            reward_model.respond()
        failed, shared = broadcast((False, result if to_all else None), group)
        if failed:
            raise SystemExit(1)
        return shared if to_all else result

    return run


from_driver = functools.partial(on_driver, to_all=True)
"""`on_driver` with the driver's result for every rank; it must be small and picklable."""
on_driver_for_learners = functools.partial(on_driver, bridge="learners")
"""`on_driver` over `self.roles.learners`: generators do not wait for it."""


def wait_for_all(roles: Roles) -> None:
    """Return when every rank is here. Collective over `roles.control`."""
    dist.barrier(group=roles.control)


def gather_to_driver(value: Any, roles: Roles) -> list[Any] | None:
    """Return every rank's picklable value on the driver, in the order of the ranks; None elsewhere.

    Collective over `roles.control`.
    """
    values = None
    if roles.is_driver:
        values = [None] * roles.control.size()
    dist.gather_object(value, values, group_dst=0, group=roles.control)
    return values


def gather_rollouts(local: list[Rollout] | None, requests: Requests, roles: Roles) -> list[Rollout] | None:
    """Return what every replica sampled for `requests` on the driver, in the order of `index`; None elsewhere.

    Collective over `roles.control`; ranks that are not the head of a replica pass None.
    """
    if roles.control.size() == 1:  # nothing has to travel
        return local
    parts = gather_to_driver(flatten_rollouts(local or []), roles)
    if parts is None:
        return None
    rollouts = [rollout for tensors in parts for rollout in unflatten_rollouts(tensors, requests)]
    return sorted(rollouts, key=lambda rollout: rollout.index)


@dataclass(frozen=True, eq=False)
class SampledAhead:
    """One rank's part of what is sampled ahead."""

    requests: Requests
    rollouts: list[Rollout] | None
    """On the head of a replica."""
    seconds: float
    """How long it sampled; about 0 on the learners, which do not wait."""


def start_sampling_ahead(requests: Requests | None, generator: "Generator | None") -> SampledAhead | None:
    """Sample ahead on the generators, while the learners go on at once. Returns None without requests."""
    if requests is None:
        return None
    began = time.monotonic()
    rollouts = generator.generate(requests) if generator else None
    return SampledAhead(requests, rollouts, time.monotonic() - began)


def finish_sampling_ahead(ahead: SampledAhead | None, driver: Any, roles: Roles) -> None:
    """Bring what was sampled ahead to the driver, once it and the generators are done.

    `driver` has a method `receive_ahead(rollouts, seconds)` that runs on rank 0. Collective over `roles.control`, if
    anything was sampled ahead.
    """
    if ahead is None:
        return
    rollouts = gather_rollouts(ahead.rollouts, ahead.requests, roles)
    seconds = gather_to_driver(ahead.seconds, roles)
    driver.receive_ahead(rollouts, seconds)


def send_batch(batch: TrainBatch | None, roles: Roles) -> TrainBatch | None:
    """Deliver the driver's batch to reference and trainer ranks.

    Collective over `roles.learners`. Returns the batch on trainer and reference ranks, None on the others.
    """
    tensors = None
    if roles.is_driver:
        tensors = [getattr(batch, field.name) for field in fields(batch)]
    tensors = broadcast_tensors(tensors, roles)
    return TrainBatch(*tensors) if tensors else None


def add_ref_logprobs(batch: TrainBatch | None, reference: "Reference | None", roles: Roles) -> TrainBatch | None:
    """Compute the reference's log-probs and join them into every learner's batch, if there is a reference.

    Collective over `roles.learners`: reference ranks pass their reference, the others None. Each rank computes its part
    of the tokens that count and has 0 elsewhere, so the sum over ranks is the whole and exact.
    """
    if not roles.has_reference or not roles.learns:
        return batch
    total_N = torch.zeros(batch.num_tokens)
    if reference:
        total_N = reference.logprobs(batch)
    dist.all_reduce(total_N, group=roles.learners)
    return replace(batch, ref_logprobs_N=total_N)


def add_rewards(
    batch: TrainBatch | None,
    rewards: tuple[Tensor, Tensor, Tensor] | None,
    roles: Roles,
) -> TrainBatch | None:
    """Join the driver's rewards, as `reward_tensors` returns them, into every learner's batch.

    Collective over `roles.learners`.
    """
    if not roles.learns:
        return batch
    rewards_R, has_reward_R, parts_FR = broadcast_tensors(rewards, roles)
    return replace(
        batch,
        rewards_R=rewards_R,
        has_reward_R=has_reward_R,
        parts_FR=parts_FR,
    )


def broadcast_tensors(tensors: Sequence[Tensor | None] | None, roles: Roles) -> Sequence[Tensor | None] | None:
    """Give every learner the driver's flat CPU tensors (and its Nones); returns None on the other ranks.

    Collective over `roles.learners`.
    """
    if not roles.learns:
        return None
    arrays = None
    if roles.is_driver:
        arrays = [None if tensor is None else tensor.numpy() for tensor in tensors]
    arrays = broadcast(arrays, roles.learners)  # tensors would be pickled more slowly
    return [None if array is None else torch.from_numpy(array) for array in arrays]


def flatten_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return rollouts that are not scored yet as flat tensors: facts as bytes of JSON, ids, loss mask, log-probs, kept.

    So they go over the wire quickly, and into a checkpoint without pickles. Prompts are left out.
    """
    pieces = [piece for rollout in rollouts for piece in rollout.pieces]
    by_rollout = {name: [getattr(rollout, name) for rollout in rollouts] for name in ROLLOUT_FACTS}
    by_piece = {name: [getattr(piece, name) for piece in pieces] for name in PIECE_FACTS}
    facts = json.dumps([by_rollout, by_piece])
    empty = torch.empty(0)
    return {
        "facts": torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8),
        "ids": torch.cat([empty.long(), *(piece.ids_T for piece in pieces)]),
        "loss_mask": torch.cat([empty.bool(), *(piece.loss_mask_T for piece in pieces)]),
        "logprobs": torch.cat([empty, *(piece.logprobs_T for piece in pieces if piece.is_sampled)]),
        "kept": torch.cat([empty.int(), *(piece.kept_C for piece in pieces)]),
    }


def unflatten_rollouts(tensors: dict[str, Tensor], requests: Requests) -> list[Rollout]:
    """Undo `flatten_rollouts` of what was sampled for `requests`, which have the prompts.

    Raises ValueError if `flatten_rollouts` of another version has made them.
    """
    check_saved("rollouts", tensors, flatten_rollouts([]))
    by_rollout, by_piece = json.loads(tensors["facts"].numpy().tobytes())
    check_saved("a rollout", by_rollout, ROLLOUT_FACTS)
    check_saved("a piece of a rollout", by_piece, PIECE_FACTS)
    lengths = by_piece["num_tokens"]
    is_sampled = by_piece["is_sampled"]
    num_logprobs = [length * sampled for length, sampled in zip(lengths, is_sampled, strict=True)]
    logprobs = tensors["logprobs"].split(num_logprobs)
    pieces = map(
        Piece,
        tensors["ids"].split(lengths),
        tensors["loss_mask"].split(lengths),
        [logprobs_T if sampled else None for logprobs_T, sampled in zip(logprobs, is_sampled, strict=True)],
        by_piece["version"],
        tensors["kept"].split(by_piece["num_kept"]),
        by_piece["ended_by"],
    )

    prompts = {request.index: request.prompt for request in requests.requests}
    rollouts = []
    for index, lengths, *others in zip(*(by_rollout[name] for name in ROLLOUT_FACTS), strict=True):
        sequences = tuple(tuple(itertools.islice(pieces, length)) for length in lengths)
        rollouts.append(Rollout(prompts[index], index, sequences, *others))
    return rollouts
