"""Groups in flight, on the driver: prompts with their completions, from when they are drawn until a step takes them.

A step takes the oldest complete groups until it is full, and asks for what it lacks. `sampling.dynamic` decides what is
full, `sampling.carry_over` what may be left for the next step, and `overlap_steps` when sampling begins. See GROUPS.md.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from grpo.algorithm.groups import are_informative
from grpo.config import SamplingConfig
from grpo.environments.play import NOTED
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.types import Completion, Piece, Prompt, Requests, Rollout, check_saved

# A round asks for as many groups as the share of informative ones so far calls for, but expects at least this share.
LEAST_INFORMATIVE_FRAC = 1 / 8
Draw = Callable[[int], list[Prompt]]
"""Number of prompts -> fresh prompts."""
Score = Callable[[list[Prompt], list[Completion]], list[Rollout]]
"""Prompts and their completions -> rollouts. With dynamic sampling they have their rewards already."""


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt in flight with its completions. It has none before anything was sampled."""

    prompt: Prompt
    completions: tuple[Completion, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if every completion has ended."""
        has_ended = [completion.ended for completion in self.completions]
        return bool(has_ended) and all(has_ended)


class GroupBuffer:
    """The groups in flight, and those that the current step took."""

    def __init__(
        self,
        sampling: SamplingConfig,
        prompts_per_step: int,
        group_size: int,
        groups: Iterable[Group] = (),
        judging_parts: Sequence[str] = (),
    ):
        """Begin with the groups that are in flight already. judging_parts: as in `are_informative`."""
        self.sampling = sampling
        self.judging_parts = judging_parts
        self.prompts_per_step = prompts_per_step
        self.group_size = group_size
        self.groups = [*groups]
        self.begin_step()

    # ---- what to sample -----------------------------------------------------------------------------------------

    def fill(self, draw: Draw, score: Score) -> Requests | None:
        """Take complete groups until the step is full. Returns what must be sampled first, None if the step is full."""
        while num_groups := self.num_groups_to_take:
            requests = self.ask(num_groups, draw)
            if requests:
                return requests
            self.take(num_groups, score)
        if self.sampling.carry_over:
            informative = list(itertools.compress(self.taken, self.is_informative))
            too_many = informative[self.prompts_per_step :]
            self.groups = too_many + self.groups  # the next step scores them again
        self.num_carried = len(self.groups)
        return None

    def ask(self, num_groups: int, draw: Draw) -> Requests | None:
        """Return what must be sampled until `num_groups` groups are complete, None if they are. Draws fresh prompts."""
        num_fresh = num_groups + self.sampling.carry_over - len(self.groups)
        if num_fresh > 0:
            self.groups += [Group(prompt) for prompt in draw(num_fresh)]
        unfinished = [group for group in self.groups if not group.is_complete]
        num_complete = len(self.groups) - len(unfinished)
        if num_complete >= num_groups:
            return None
        begun = {}
        for completion in completions_of(unfinished):
            begun[completion.index] = None
            if not completion.ended:
                begun[completion.index] = completion.ids_T.tolist()
        return Requests(
            prompts=[group.prompt for group in unfinished],
            begun=begun,
            num_left=len(self.groups) - num_groups,
        )

    def add(self, completions: Sequence[Completion]) -> None:
        """Add what was sampled for `ask`: new completions, and further tokens of those that were begun."""
        sampled = {completion.index: completion for completion in completions}
        for place, group in enumerate(self.groups):
            first_index = group.prompt.index * self.group_size
            begun = group.completions or [None] * self.group_size
            joined = []
            for index, completion in enumerate(begun, start=first_index):
                joined.append(join(completion, sampled.get(index), index))
            self.groups[place] = Group(group.prompt, tuple(joined))

    # ---- what a step trains on ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what the step before took."""
        self.taken: list[Group] = []
        self.everything: list[Rollout] = []  # of the groups taken, group after group
        self.is_informative: list[bool] = []  # for each group taken: may a step train on it?
        self.num_rounds = 0
        self.num_carried = 0

    @property
    def num_informative(self) -> int:
        """Number of groups taken that a step may train on."""
        return sum(self.is_informative)

    @property
    def num_groups_to_take(self) -> int:
        """Number of groups that the step is expected to need still. 0 if it is full or had its last round."""
        num_lacking = self.prompts_per_step - self.num_informative
        if num_lacking <= 0 or self.num_rounds >= self.sampling.max_rounds:
            return 0
        informative_frac = 1.0
        if self.taken:
            informative_frac = self.num_informative / len(self.taken)
        informative_frac = max(informative_frac, LEAST_INFORMATIVE_FRAC)
        num_groups = math.ceil(num_lacking / informative_frac)
        return min(num_groups, self.prompts_per_step)

    def take(self, num_groups: int, score: Score) -> None:
        """Move the oldest `num_groups` complete groups into the step, and begin to score them."""
        complete = [group for group in self.groups if group.is_complete]
        taken = complete[:num_groups]
        self.groups = [group for group in self.groups if group not in taken]
        self.taken += taken
        self.num_rounds += 1
        prompts = [group.prompt for group in taken]
        rollouts = score(prompts, completions_of(taken))
        self.everything += rollouts
        if self.sampling.dynamic:
            self.is_informative += are_informative(rollouts, self.group_size, self.judging_parts).tolist()
        else:
            self.is_informative += [True] * len(taken)

    def finished(self) -> Iterator[tuple[Prompt, list[Rollout]]]:
        """Yield the prompt and the rollouts of each group taken, except those that go back."""
        in_flight = {group.prompt.index for group in self.groups}
        for place, group in enumerate(self.taken):
            if group.prompt.index not in in_flight:
                yield group.prompt, self._rollouts_of(place)

    def rollouts(self) -> list[Rollout]:
        """Return what the step trains on, group after group: informative groups, or any if there are none."""
        places = range(len(self.taken))
        informative = list(itertools.compress(places, self.is_informative))
        places = informative or places
        groups = map(self._rollouts_of, places[: self.prompts_per_step])
        return list(itertools.chain(*groups))

    def _rollouts_of(self, place: int) -> list[Rollout]:
        start = place * self.group_size
        return self.everything[start : start + self.group_size]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step's sampling by name."""
        metrics = {}
        if self.sampling.carry_over:
            metrics["sampling/carried"] = self.num_carried
        if self.sampling.dynamic:
            metrics["sampling/rounds"] = self.num_rounds
            metrics["sampling/informative_frac"] = self.num_informative / len(self.taken)
            metrics["sampling/full_frac"] = min(1.0, self.num_informative / self.prompts_per_step)
        return metrics

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: prompts, how many completions each has, and these as tensors."""
        return {
            "prompts": [asdict(group.prompt) for group in self.groups],
            "counts": [len(group.completions) for group in self.groups],
            "completions": flatten_completions(completions_of(self.groups)),
        }


def saved_groups(state: Mapping[str, Any]) -> list[Group]:
    """Return the groups of what `GroupBuffer.state` returned. Raises ValueError if another version saved them."""
    check_saved("groups in flight", state, ("prompts", "counts", "completions"))
    completions = iter(unflatten_completions(state["completions"]))
    groups = []
    for facts, count in zip(state["prompts"], state["counts"], strict=True):
        check_saved("a prompt", facts, (field.name for field in fields(Prompt)))
        own_completions = tuple(itertools.islice(completions, count))
        for completion in own_completions:
            if completion.episode is not None:
                check_saved("an episode", completion.episode, NOTED)
        groups.append(Group(Prompt(**facts), own_completions))
    return groups


def completions_of(groups: Iterable[Group]) -> list[Completion]:
    """Return the completions of the groups, group after group."""
    return [completion for group in groups for completion in group.completions]


def join(
    begun: Completion | None,
    further: Completion | None,
    index: int,
) -> Completion:
    """Append the tokens that were sampled now to a completion. Either part may be missing or without tokens."""
    if further is None or not (further.num_tokens or further.ended):
        if begun or further:
            return begun or further
        nothing = (Piece.nothing(),)
        return Completion(nothing, truncated=False, index=index, ended=False)
    if begun is None or not begun.num_tokens:
        return further
    *earlier, last = begun.pieces
    first, *later = further.pieces
    joined = (last, first)
    if last.version == first.version:  # no sync in between, so it is one piece
        joined = (last.then(first),)
    return replace(further, pieces=(*earlier, *joined, *later))
