"""Groups that a step has begun and not completed, and that go on in the next (`sampling.carry_over`), on the driver.

`prompts_per_step` + `carry_over` groups are in flight. A step ends once `prompts_per_step` of them are complete, and
trains on these, the oldest first; the others keep their tokens with log-probs and versions, and go on from there. So no
token is lost, each group is trained on once, and a step always has as many. Long completions come a step later than
short ones of the same draw.
"""

import pathlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo.data.streams import PromptStream
from grpo.folder.pending import completion_tensors, read_completions
from grpo.types import Carried, Completion, Piece, Prompt


@dataclass(frozen=True)
class Draw:
    """Prompts that were drawn together: so many, at a place in the data as a checkpoint has it."""

    place: dict[str, Any]
    count: int


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt in flight and what there is of its completions; none before its first step."""

    prompt: Prompt
    draw: Draw
    completions: list[Completion]

    @property
    def is_complete(self) -> bool:
        return bool(self.completions) and all(completion.ended for completion in self.completions)


class CarryOver:
    """The groups in flight, the oldest first."""

    def __init__(self, prompts_per_step: int, carry_over: int, group_size: int):
        self.num_trained, self.num_in_flight = prompts_per_step, prompts_per_step + carry_over
        self.group_size = group_size
        self.groups: list[Group] = []

    @property
    def num_missing(self) -> int:
        """Prompts to draw."""
        return self.num_in_flight - len(self.groups)

    @property
    def has_begun(self) -> bool:
        """Whether any group was in flight in a step before, with other weights."""
        return any(group.completions for group in self.groups)

    def begin(self, prompts: list[Prompt], place: dict[str, Any]) -> None:
        """Take in prompts that were drawn at this place."""
        draw = Draw(place, len(prompts))
        self.groups += [Group(prompt, draw, []) for prompt in prompts]

    def to_sample(self) -> tuple[list[Prompt], Carried]:
        """The prompts of groups that are not complete, and what there is of their completions."""
        groups = [group for group in self.groups if not group.is_complete]
        begun = {c.index: None if c.ended else c.ids_T.tolist() for group in groups for c in group.completions}
        num_complete = len(self.groups) - len(groups)
        return [group.prompt for group in groups], Carried(begun, self.num_trained - num_complete)

    def take(self, sampled: list[Completion]) -> tuple[list[Prompt], list[Completion]]:
        """Add what was sampled; returns the prompts and completions of the oldest complete groups, which leave.

        Raises RuntimeError if fewer are complete than a step trains on.
        """
        by_index = {completion.index: completion for completion in sampled}
        groups = [replace(group, completions=self._added(group, by_index)) for group in self.groups]
        trained = [group for group in groups if group.is_complete][: self.num_trained]
        if len(trained) < self.num_trained:
            raise RuntimeError(f"only {len(trained)} of {self.num_trained} groups are complete: generators ended early")
        self.groups = [group for group in groups if group not in trained]
        return [group.prompt for group in trained], [c for group in trained for c in group.completions]

    def _added(self, group: Group, sampled: dict[int, Completion]) -> list[Completion]:
        first = group.prompt.index * self.group_size
        before: list[Completion | None] = [*group.completions] or [None] * self.group_size
        return [join(completion, sampled.get(first + i), first + i) for i, completion in enumerate(before)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it as JSON: from which draws which prompts."""
        draws = list({id(group.draw): group.draw for group in self.groups}.values())
        indices = [[g.prompt.index for g in self.groups if g.draw is draw] for draw in draws]
        return {
            "draws": [{"place": d.place, "count": d.count, "prompts": of} for d, of in zip(draws, indices, strict=True)]
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it as tensors: the completions, group after group."""
        return completion_tensors([c for group in self.groups for c in group.completions])

    def load(self, checkpoint: pathlib.Path, state: dict[str, Any], stream: PromptStream) -> None:
        """Undo `state` and `tensors`. Raises ValueError if the two do not fit together."""
        drawn = []
        for of_draw in state["draws"]:
            draw, wanted = Draw(of_draw["place"], of_draw["count"]), set(of_draw["prompts"])
            drawn += [(p, draw) for p in stream.draw_again(draw.place, draw.count) if p.index in wanted]
        completions = read_completions(checkpoint, len(drawn) * self.group_size, "carried over")
        parts = [completions[i : i + self.group_size] for i in range(0, len(completions), self.group_size)]
        self.groups = [Group(prompt, draw, part) for (prompt, draw), part in zip(drawn, parts, strict=True)]


def join(before: Completion | None, piece: Completion | None, index: int) -> Completion:
    """A completion with the tokens that were sampled now; either may be missing, or have none."""
    if piece is None or not (piece.num_tokens or piece.ended):
        return before or piece or _nothing(index)
    if before is None or not before.num_tokens:
        return piece
    (first, *_), last = piece.pieces, before.pieces[-1]
    if last.version != first.version:
        return replace(piece, pieces=(*before.pieces, first))
    whole = Piece.sampled(
        torch.cat([last.ids_T, first.ids_T]), torch.cat([last.logprobs_T, first.logprobs_T]), last.version
    )
    return replace(piece, pieces=(*before.pieces[:-1], whole))  # no sync in between: one stretch


def _nothing(index: int) -> Completion:
    return Completion.of(torch.empty(0, dtype=torch.int64), torch.empty(0), False, index=index, ended=False)
