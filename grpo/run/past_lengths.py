"""How long the completions of each row were: what the next ones of the same row are expected to be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo.types import Completion, Prompt


class PastLengths:
    """Sums of tokens, of each row and of all; the driver's, and a part of its checkpoints.

    Left out: rows of streamed data, which would be too many to keep.
    """

    def __init__(self, keeps_rows: bool):
        self.keeps_rows = keeps_rows
        # [completions, tokens]
        self._of_all = [0, 0]
        self._of_row: dict[str, list[int]] = {}

    def expect(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with the mean length of their row's completions, of all rows' where it has none; 0 at first."""
        return [replace(prompt, expected_tokens=self._mean(prompt)) for prompt in prompts]

    def record(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Add completions that are whole, group after group."""
        group_size = len(completions) // len(prompts)
        for number, prompt in enumerate(prompts):
            group = completions[number * group_size : (number + 1) * group_size]
            sums = [self._of_all]
            if self.keeps_rows and prompt.row >= 0:
                sums.append(self._of_row.setdefault(_key(prompt), [0, 0]))
            for of in sums:
                of[0] += len(group)
                of[1] += sum(completion.num_tokens for completion in group)

    def _mean(self, prompt: Prompt) -> float:
        count, tokens = self._of_row.get(_key(prompt), self._of_all)
        return tokens / count if count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {"all": list(self._of_all), "rows": {key: list(sums) for key, sums in self._of_row.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._of_all = list(state["all"])
        self._of_row = {key: list(sums) for key, sums in state["rows"].items()}


def _key(prompt: Prompt) -> str:
    """Of its row, for JSON; a source's name has no space."""
    return f"{prompt.row} {prompt.source}".rstrip()
