"""Groups in flight, on the driver: drawn, being sampled, complete, until a step takes them to train on.

A group is a prompt with its completions. A step takes the oldest complete groups until it is full, and what it lacks is
sampled before. Three rules of the config are rules of this one buffer, and combine:

- `sampling.dynamic` says what is full: `prompts_per_step` groups whose rewards are not all equal (DAPO,
  arXiv:2503.14476, section 3.2), where a step else takes that many of any.
- `sampling.carry_over` says what may be left: so many more groups are in flight, and those that are not complete when
  enough are keep their tokens, with log-probs and versions, and go on in the next step.
- `overlap_steps` says when sampling begins: for the next step, while this one trains.

Each group is trained on once, with all of its tokens, except those that dynamic sampling drops: of equal rewards, and
without `carry_over` those for which the step has no room. A checkpoint has the whole buffer.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo.algorithm.advantages import by_group, equal_rewards
from grpo.config import SamplingConfig
from grpo.report.rollout_metrics import reward_tensors
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.types import Completion, Piece, Prompt, Requests, Rollout

# A round asks for as many groups as the share of informative ones so far calls for, but expects no less.
LEAST_INFORMATIVE_FRAC = 1 / 8
Draws = Callable[[int], list[Prompt]]
"""Number -> so many further prompts."""
Scores = Callable[[list[Prompt], list[Completion]], list[Rollout]]
"""Prompts and their completions -> rollouts; with dynamic sampling, their rewards are there."""


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt in flight and what there is of its completions; none before it was asked for."""

    prompt: Prompt
    completions: tuple[Completion, ...] = ()

    @property
    def is_complete(self) -> bool:
        return bool(self.completions) and all(completion.ended for completion in self.completions)


class Flight:
    """The buffer, and what the step at hand took out of it."""

    def __init__(self, sampling: SamplingConfig, prompts_per_step: int, group_size: int):
        """Nothing is in flight."""
        self.sampling, self.prompts_per_step, self.group_size = sampling, prompts_per_step, group_size
        self.groups: list[Group] = []
        self.begin_step()

    # ---- what to sample -----------------------------------------------------------------------------------------

    def fill(self, draw: Draws, score: Scores) -> Requests | None:
        """Take complete groups into the step until it is full; returns what must be sampled before, None if nothing."""
        while num_groups := self.num_wanted:
            if requests := self.ask(num_groups, draw):
                return requests
            self.take(num_groups, score)
        if self.sampling.carry_over:  # groups that the step has no room for are for the next, which scores them again
            informative = list(itertools.compress(self.taken, self._is_informative))
            self.groups = informative[self.prompts_per_step :] + self.groups
        self.num_carried = len(self.groups)
        return None

    def ask(self, num_groups: int, draw: Draws) -> Requests | None:
        """What must be sampled so that `num_groups` groups are complete, None if they are; draws what is missing."""
        if (num_prompts := num_groups + self.sampling.carry_over - len(self.groups)) > 0:
            self.groups += [Group(prompt) for prompt in draw(num_prompts)]
        groups = [group for group in self.groups if not group.is_complete]
        num_complete = len(self.groups) - len(groups)
        if num_complete >= num_groups:
            return None
        begun = {c.index: None if c.ended else c.ids_T.tolist() for group in groups for c in group.completions}
        return Requests([group.prompt for group in groups], begun, num_left=len(self.groups) - num_groups)

    def add(self, completions: Sequence[Completion]) -> None:
        """Take in what was sampled of what `ask` returned: whole completions, or how those that were begun go on."""
        sampled = {completion.index: completion for completion in completions}
        for number, group in enumerate(self.groups):
            indices = range(group.prompt.index * self.group_size, (group.prompt.index + 1) * self.group_size)
            before = group.completions or [None] * self.group_size
            longer = (join(one, sampled.get(index), index) for one, index in zip(before, indices, strict=True))
            self.groups[number] = Group(group.prompt, tuple(longer))

    # ---- what a step trains on ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Nothing is taken yet."""
        self.taken: list[Group] = []
        self.everything: list[Rollout] = []  # of the groups taken, group after group
        self._is_informative: list[bool] = []  # each group taken
        self.num_rounds = self.num_carried = 0

    @property
    def num_informative(self) -> int:
        """Groups taken that a step may train on."""
        return sum(self._is_informative)

    @property
    def num_wanted(self) -> int:
        """Groups that the step takes in its next round: as many as it is expected to need, 0 after the last one."""
        num_lacking = self.prompts_per_step - self.num_informative
        if num_lacking <= 0 or self.num_rounds >= self.sampling.max_rounds:
            return 0
        informative_frac = self.num_informative / len(self.taken) if self.taken else 1.0
        return min(math.ceil(num_lacking / max(informative_frac, LEAST_INFORMATIVE_FRAC)), self.prompts_per_step)

    def take(self, num_groups: int, score: Scores) -> None:
        """Move the oldest complete groups into the step, as many as `ask` found; their rewards say if it is full."""
        taken = [group for group in self.groups if group.is_complete][:num_groups]
        self.groups = [group for group in self.groups if group not in taken]
        self.taken += taken
        self.num_rounds += 1
        rollouts = score([group.prompt for group in taken], completions_of(taken))
        self.everything += rollouts
        if self.sampling.dynamic:
            same = equal_rewards(*by_group(*reward_tensors(rollouts), self.group_size)).tolist()
        self._is_informative += [not one for one in same] if self.sampling.dynamic else [True] * len(taken)

    def rollouts(self) -> list[Rollout]:
        """What the step trains on, group after group: informative groups; without any, some of the others."""
        numbers = list(itertools.compress(range(len(self.taken)), self._is_informative)) or range(len(self.taken))
        size = self.group_size
        groups = [self.everything[n * size : (n + 1) * size] for n in numbers[: self.prompts_per_step]]
        return [rollout for group in groups for rollout in group]

    def metrics(self) -> dict[str, float]:
        """What the step's sampling was like, by name."""
        metrics = {"sampling/carried": self.num_carried} if self.sampling.carry_over else {}
        if self.sampling.dynamic:
            metrics |= {
                "sampling/rounds": self.num_rounds,
                "sampling/informative_frac": self.num_informative / len(self.taken),
                "sampling/full_frac": min(1.0, self.num_informative / self.prompts_per_step),
            }
        return metrics

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: of each group its prompt and the number of its completions, which are tensors."""
        return {
            "prompts": [asdict(group.prompt) for group in self.groups],
            "counts": [len(group.completions) for group in self.groups],
            "completions": flatten_completions(completions_of(self.groups)),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        rest = iter(unflatten_completions(*state["completions"]))
        self.groups = [
            Group(Prompt(**prompt), tuple(itertools.islice(rest, count)))
            for prompt, count in zip(state["prompts"], state["counts"], strict=True)
        ]


def completions_of(groups: Iterable[Group]) -> list[Completion]:
    """The completions of the groups, group after group."""
    return [completion for group in groups for completion in group.completions]


def join(before: Completion | None, further: Completion | None, index: int) -> Completion:
    """A completion with the tokens that were sampled now; either may be missing, or have none."""
    if further is None or not (further.num_tokens or further.ended):
        return before or further or Completion((Piece.nothing(),), truncated=False, index=index, ended=False)
    if before is None or not before.num_tokens:
        return further
    *earlier, last = before.pieces
    first, *later = further.pieces
    if last.version == first.version:  # no sync in between: one stretch
        return replace(further, pieces=(*earlier, last.then(first), *later))
    return replace(further, pieces=before.pieces + further.pieces)
