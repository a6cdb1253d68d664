"""Groups in flight, on the driver: prompts with their rollouts, from when they are drawn until a step takes them.

A step takes the oldest complete groups until it is full, and asks for what it lacks. `sampling.dynamic` decides what is
full, `sampling.carry_over` what may be left for the next step, and `overlap_steps` when sampling begins.
docs/design/groups.md has the rules.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from grpo.algorithm.groups import are_informative
from grpo.config import SamplingConfig
from grpo.roles.comm import flatten_rollouts, unflatten_rollouts
from grpo.types import EpisodeFacts, Prompt, Request, Requests, Rollout, check_saved

# A round is one `take`. It asks for as many groups as the share of informative ones so far calls for, but expects at
# least this share.
LEAST_INFORMATIVE_FRAC = 1 / 8
Draw = Callable[[int], list[Prompt]]
"""Number of prompts -> fresh prompts."""
Score = Callable[[list[Rollout]], list[Rollout]]
"""Begins to score rollouts and returns them at once; with dynamic sampling it waits, and they have their rewards."""


class Life(enum.Enum):
    """Where a group is, from the draw to the update."""

    DRAWN = "nothing of it was sampled yet"
    BEGUN = "some of its rollouts go on"
    COMPLETE = "all of its rollouts have ended; a step takes the oldest such groups"
    TAKEN = "it belongs to the current step, and its scoring has begun"
    DULL = "taken, but comparing its rewards teaches nothing (dynamic sampling); trained on only if all are dull"


@dataclass(eq=False)
class Group:
    """A prompt in flight with its rollouts."""

    prompt: Prompt
    rollouts: list[Rollout]
    life: Life = Life.DRAWN

    def add(self, sampled: Mapping[int, Rollout]) -> None:
        """Join what was sampled, by `Rollout.index`, to the group's rollouts. Sets `life` by those that have ended."""
        for index, rollout in enumerate(self.rollouts):
            if rollout.index in sampled:
                self.rollouts[index] = rollout.go_on(sampled[rollout.index])
        has_ended = all(rollout.ended_by for rollout in self.rollouts)
        self.life = Life.COMPLETE if has_ended else Life.BEGUN


@dataclass(eq=False)
class GroupBuffer:
    """The groups in flight, and those that the current step took.

    With groups of 2, of which a step takes 2 and 1 may be left, 3 are drawn for the first step:

    >>> import itertools
    >>> from dataclasses import replace
    >>> prompts = map(Prompt, itertools.count(), itertools.repeat([5]))
    >>> draw = lambda number: list(itertools.islice(prompts, number))
    >>> buffer = GroupBuffer(SamplingConfig(carry_over=1), prompts_per_step=2, group_size=2)
    >>> first, *others = buffer.fill(draw, score=list).requests
    >>> lives = lambda groups: [f"{group.prompt.index} {group.life.name}" for group in groups]
    >>> lives(buffer.groups)
    ['0 DRAWN', '1 DRAWN', '2 DRAWN']

    The engine stops when two groups are complete. The step takes these, and the other one goes on in the next step:

    >>> end = lambda request: replace(Rollout.begin(request.prompt, request.index), ended_by="stop")
    >>> buffer.add([end(request) for request in others])
    >>> lives(buffer.groups)
    ['0 BEGUN', '1 COMPLETE', '2 COMPLETE']
    >>> buffer.fill(draw, score=list)  # None, because the step is full
    >>> lives(buffer.taken), lives(buffer.groups)
    (['1 TAKEN', '2 TAKEN'], ['0 BEGUN'])
    >>> buffer.begin_step()
    >>> [request.index for request in buffer.fill(draw, score=list).requests]  # 1 of group 0, those of 3 and 4
    [0, 6, 7, 8, 9]
    """

    sampling: SamplingConfig
    prompts_per_step: int
    group_size: int
    groups: Sequence[Group] = ()
    """Those in flight."""
    judging_parts: Sequence[str] = ()
    """The parts of the reward that look at more than length."""

    def __post_init__(self) -> None:
        """Begin the first step."""
        self.groups = list(self.groups)
        self.begin_step()

    # ---- what to sample -----------------------------------------------------------------------------------------

    def fill(self, draw: Draw, score: Score) -> Requests | None:
        """Take complete groups until the step is full. Returns what must be sampled first, None if the step is full.

        Informative groups beyond that go back to the front of the buffer, with carry_over; else the next step forgets
        them.
        """
        while num_groups := self.num_groups_to_take:
            requests = self.ask(num_groups, draw)
            if requests:
                return requests
            self.take(num_groups, score)
        if self.sampling.carry_over:
            spare = self.informative[self.prompts_per_step :]  # the next step scores them again
            for group in spare:
                group.life = Life.COMPLETE
            self.taken = [group for group in self.taken if group not in spare]
            self.groups = spare + self.groups
        self.num_carried = len(self.groups)
        return None

    def ask(self, num_groups: int, draw: Draw) -> Requests | None:
        """Return what must be sampled until `num_groups` groups are complete, None if they are. Draws fresh prompts.

        `num_left` of the result is the number of groups that may be incomplete when sampling ends.
        """
        num_fresh = num_groups + self.sampling.carry_over - len(self.groups)
        if num_fresh > 0:
            for prompt in draw(num_fresh):
                requests = Requests.of([prompt], self.group_size).requests
                rollouts = [Rollout.begin(prompt, request.index) for request in requests]
                self.groups.append(Group(prompt, rollouts))
        unfinished = [group for group in self.groups if group.life is not Life.COMPLETE]
        if len(self.groups) - len(unfinished) >= num_groups:
            return None
        requests = []
        for rollout in rollouts_of(unfinished):
            if not rollout.ended_by:
                begun = rollout.ids_T.tolist()
                requests.append(Request(rollout.prompt, rollout.index, begun))
        num_left = len(self.groups) - num_groups
        return Requests(requests, self.group_size, num_left)

    def add(self, sampled: Sequence[Rollout]) -> None:
        """Add what was sampled for `ask`: whole rollouts, and further tokens of those that were begun."""
        by_index = {rollout.index: rollout for rollout in sampled}
        for group in self.groups:
            group.add(by_index)

    # ---- what a step trains on ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what the step before took."""
        self.taken: list[Group] = []  # groups of this step; `fill` gives spare ones back
        self.num_taken = 0
        self.num_informative = 0
        self.num_rounds = 0
        self.num_carried = 0

    @property
    def informative(self) -> list[Group]:
        """Groups taken that a step may train on."""
        return [group for group in self.taken if group.life is not Life.DULL]

    @property
    def num_groups_to_take(self) -> int:
        """Number of groups that the step is expected to need still. 0 if it is full or had its last round."""
        num_lacking = self.prompts_per_step - self.num_informative
        if num_lacking <= 0 or self.num_rounds >= self.sampling.max_rounds:
            return 0
        informative_frac = 1.0
        if self.num_taken:
            informative_frac = self.num_informative / self.num_taken
        informative_frac = max(informative_frac, LEAST_INFORMATIVE_FRAC)
        num_groups = math.ceil(num_lacking / informative_frac)
        return min(num_groups, self.prompts_per_step)

    def take(self, num_groups: int, score: Score) -> None:
        """Move the oldest `num_groups` complete groups into the step, and begin to score them."""
        complete = [group for group in self.groups if group.life is Life.COMPLETE]
        taken = complete[:num_groups]
        self.groups = [group for group in self.groups if group not in taken]
        self.taken += taken
        self.num_taken += num_groups
        self.num_rounds += 1
        rollouts = score(rollouts_of(taken))
        set_rollouts(taken, rollouts)
        informative = [True] * num_groups
        if self.sampling.dynamic:
            informative_P = are_informative(rollouts, self.group_size, self.judging_parts)
            informative = informative_P.tolist()
        self.num_informative += sum(informative)
        for group, is_informative in zip(taken, informative, strict=True):
            group.life = Life.TAKEN if is_informative else Life.DULL

    def rollouts(self) -> list[Rollout]:
        """Return what the step trains on, group after group: informative groups, or any if there are none."""
        groups = self.informative or self.taken
        return rollouts_of(groups[: self.prompts_per_step])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step's sampling by name."""
        metrics = {}
        if self.sampling.carry_over:
            metrics["sampling/carried"] = self.num_carried
        if self.sampling.dynamic:
            metrics["sampling/rounds"] = self.num_rounds
            metrics["sampling/informative_frac"] = self.num_informative / self.num_taken
            metrics["sampling/full_frac"] = min(1.0, self.num_informative / self.prompts_per_step)
        return metrics

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the prompts, and their rollouts as tensors."""
        return {
            "prompts": [asdict(group.prompt) for group in self.groups],
            "group_size": self.group_size,
            "rollouts": flatten_rollouts(rollouts_of(self.groups)),
        }


def saved_groups(state: Mapping[str, Any]) -> list[Group]:
    """Return the groups of what `GroupBuffer.state` returned. Raises ValueError if other code saved them."""
    check_saved("groups in flight", state, ("prompts", "group_size", "rollouts"))
    prompts = []
    for facts in state["prompts"]:
        check_saved("a prompt", facts, (field.name for field in fields(Prompt)))
        prompts.append(Prompt(**facts))
    requests = Requests.of(prompts, state["group_size"])
    rollouts = unflatten_rollouts(state["rollouts"], requests)
    for rollout in rollouts:
        if rollout.episode is not None:
            check_saved("an episode", rollout.episode, EpisodeFacts.__annotations__)
    groups = [Group(prompt, []) for prompt in prompts]
    set_rollouts(groups, rollouts)
    for group in groups:
        group.add({})  # sets `life`
    return groups


def set_rollouts(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
    """Give groups their rollouts, which lie group after group."""
    for index, group in enumerate(groups):
        group_size = len(rollouts) // len(groups)
        first = index * group_size
        group.rollouts = list(rollouts[first : first + group_size])


def rollouts_of(groups: Iterable[Group]) -> list[Rollout]:
    """Return the rollouts of the groups, group after group."""
    return [rollout for group in groups for rollout in group.rollouts]
