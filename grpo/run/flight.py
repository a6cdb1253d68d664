"""Groups in flight, on the driver: drawn, being sampled, complete, until a step takes them to train on.

A group is a prompt with its completions; the oldest come first. A step takes the oldest complete groups until it is
full, and what it lacks is sampled before. Three rules of the config are rules of this one buffer, and combine:

- `sampling.dynamic` says what is full: as many groups as `prompts_per_step` whose rewards are not all equal (DAPO,
  arXiv:2503.14476, section 3.2), where a step else takes that many of any.
- `sampling.carry_over` says what may be left: so many more groups are in flight, and those that are not complete when
  enough are keep their tokens, with log-probs and versions, and go on in the next step.
- `overlap_steps` says when sampling begins: for the next step, while this one trains.

Each group is trained on once, with all of its tokens, except for those that dynamic sampling drops: of equal rewards,
and without `carry_over` those for which the step has no room. A checkpoint has the whole buffer.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

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
TENSORS = ("facts", "ids", "loss_mask", "logprobs")


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
            self.score(score(*self.take(num_groups)))
        self.end_step()
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

    def add(self, completions: Sequence[Completion], requests: Requests) -> None:
        """Take in what was sampled on request: whole completions, or how those that were begun go on."""
        sampled = {completion.index: completion for completion in completions}
        asked = {prompt.index for prompt in requests.prompts}
        self.groups = [self._longer(group, sampled) if group.prompt.index in asked else group for group in self.groups]

    def _longer(self, group: Group, sampled: dict[int, Completion]) -> Group:
        first = group.prompt.index * self.group_size
        before: Sequence[Completion | None] = group.completions or [None] * self.group_size
        return replace(
            group,
            completions=tuple(join(whole, sampled.get(first + i), first + i) for i, whole in enumerate(before)),
        )

    # ---- what a step trains on ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Nothing is taken yet."""
        self.taken: list[Group] = []
        self.everything: list[Rollout] = []
        """Those of the groups taken, group after group."""
        self._is_informative: list[bool] = []
        self.num_rounds = 0
        self.num_carried = 0

    @property
    def num_informative(self) -> int:
        """Groups taken that a step may train on."""
        return sum(self._is_informative)

    @property
    def num_wanted(self) -> int:
        """Groups that the step takes in its next round; 0 if it is full, or has had `sampling.max_rounds`.

        With dynamic sampling as many as it is expected to need, and no more than a step has.
        """
        num_lacking = self.prompts_per_step - self.num_informative
        if num_lacking <= 0 or self.num_rounds >= self.sampling.max_rounds:
            return 0
        informative_frac = self.num_informative / len(self.taken) if self.taken else 1.0
        return min(math.ceil(num_lacking / max(informative_frac, LEAST_INFORMATIVE_FRAC)), self.prompts_per_step)

    def take(self, num_groups: int) -> tuple[list[Prompt], list[Completion]]:
        """Prompts and completions of the oldest complete groups, which leave the buffer for the step at hand.

        Raises RuntimeError if fewer are complete.
        """
        complete = [group for group in self.groups if group.is_complete][:num_groups]
        if len(complete) < num_groups:
            raise RuntimeError(f"only {len(complete)} of {num_groups} groups are complete: generators ended early")
        self.groups = [group for group in self.groups if group not in complete]
        self.taken += complete
        self.num_rounds += 1
        return [group.prompt for group in complete], completions_of(complete)

    def score(self, rollouts: list[Rollout]) -> None:
        """The rollouts of the last `take`: with dynamic sampling, their rewards say whether the step is full."""
        self.everything += rollouts
        same = [False] * (len(rollouts) // self.group_size)
        if self.sampling.dynamic:
            same = equal_rewards(*by_group(*reward_tensors(rollouts), self.group_size)).tolist()
        self._is_informative += [not one for one in same]

    def end_step(self) -> None:
        """The step is full. With `carry_over`, informative groups that it has no room for go back into the buffer.

        The step after takes them, and has them scored again.
        """
        if self.sampling.carry_over:
            informative = [group for group, is_one in zip(self.taken, self._is_informative, strict=True) if is_one]
            self.groups = informative[self.prompts_per_step :] + self.groups
        self.num_carried = len(self.groups)

    def rollouts(self) -> list[Rollout]:
        """What the step trains on, group after group: informative groups; without any, some of the others."""
        numbers = [number for number, is_one in enumerate(self._is_informative) if is_one] or range(len(self.taken))
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
        """What a checkpoint holds as JSON: of each group its prompt and the number of its completions."""
        return {
            "groups": [[asdict(group.prompt), len(group.completions)] for group in self.groups],
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds as tensors: the completions, group after group; nothing without any."""
        completions = completions_of(self.groups)
        return dict(zip(TENSORS, flatten_completions(completions), strict=True)) if completions else {}

    def load(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Undo `state` and `tensors`. Raises ValueError if the two do not fit together."""
        wanted = sum(count for _, count in state["groups"])
        completions = unflatten_completions(*(tensors[name] for name in TENSORS)) if wanted and tensors else []
        if len(completions) != wanted:
            raise ValueError(
                f"the checkpoint has {len(completions)} completions in flight and its driver.json says {wanted}; "
                "remove this checkpoint to resume from the one before"
            )
        rest = iter(completions)
        self.groups = [
            Group(Prompt(**prompt), tuple(itertools.islice(rest, count))) for prompt, count in state["groups"]
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
