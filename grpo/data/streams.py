"""Prompts and chat examples, tokenized as they are drawn: streams that resume exactly, and the held-out prompts.

Only the driver (rank 0) reads data; generators and trainers see token ids. Left out: conversations of more than one
turn.
"""

import random
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.config import DataConfig, EvaluationConfig, GRPOConfig, SFTConfig
from grpo.data.chat import TooLong, check_characters, encode_prompt
from grpo.data.rows import is_json_lines, load_rows, usable_rows
from grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo.data.rows import Rows

Encoded = TypeVar("Encoded")

# What is saved of a stream: what its place belongs to, and the place.
BELONGS_TO = ("num_rows", "path", "seed", "shuffle")
PLACE = ("epoch", "position", "num_drawn", "num_too_long")


class RowOrder:
    """Goes through the rows epoch after epoch, leaves out those that are too long, and can be saved and resumed.

    Each epoch's order follows from (seed, epoch) alone, so its place is two numbers and no global RNG is touched.
    """

    limit: str  # the config field that `max_tokens` comes from, for messages

    def __init__(
        self,
        rows: "Rows",
        usable: Sequence[int],
        data: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        max_tokens: int,
    ):
        """rows: those of `load_rows`; usable: indices of those that may be drawn, from `usable_rows`."""
        self.rows, self.usable, self.data, self.tokenizer = rows, usable, data, tokenizer
        self.num_rows, self.path, self.seed, self.shuffle = len(usable), data.path, seed, int(data.shuffle)
        self.max_tokens = max_tokens
        self.epoch = 0
        self.position = 0  # rows of this epoch that were taken or left out
        self.num_drawn = 0
        self.num_too_long = 0  # rows, counted in the first epoch only: each once
        self._order: list[int] | None = None

    def next(
        self, encode: Callable[[int], Encoded], skip: Callable[[int], bool] = lambda row: False
    ) -> tuple[int, Encoded] | None:
        """The next row that fits, and what `encode(row)` made of it, which raises TooLong for one that does not.

        Rows of which `skip` is true are passed over; if a whole epoch has no other that fits, it returns None.
        Raises ValueError if not one row fits into `max_tokens`.
        """
        too_long: dict[int, int] = {}
        num_passed_over = 0  # of this epoch, by this call: an epoch with nothing to draw lies within one call
        while len(too_long) < self.num_rows:
            if num_passed_over == self.num_rows:
                return None
            row = self._next_row()
            num_passed_over = 1 if self.position == 1 else num_passed_over + 1
            if skip(row):
                continue
            try:
                encoded = encode(row)
            except TooLong as error:
                too_long[row] = error.num_tokens
                if self.epoch == 0:
                    self._count_too_long(row, error)
                continue
            self.num_drawn += 1
            return row, encoded
        raise ValueError(all_too_long(self.path, self.limit, self.max_tokens, too_long.values()))

    def _count_too_long(self, row: int, error: TooLong) -> None:
        self.num_too_long += 1
        if self.num_too_long == 1:
            print(
                f"warning: row {row + 1} of {self.path} has {error}, more than {self.limit}={self.max_tokens}: rows "
                "like this are left out, without further notice",
                flush=True,
            )

    def _next_row(self) -> int:
        if self.position == self.num_rows:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = list(self.usable)
            if self.shuffle:
                random.Random(f"{self.seed} {self.epoch}").shuffle(self._order)
        self.position += 1
        return self._order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream and what it belongs to; plain numbers and one path, fit for JSON."""
        return {name: getattr(self, name) for name in (*BELONGS_TO, *PLACE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        for name in BELONGS_TO:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved place in the data has {name}={state[name]!r}, this run has {getattr(self, name)!r}; "
                    "resume with the data set, seed and shuffle it was saved with, or start a new run"
                )
        for name in PLACE:
            setattr(self, name, state[name])
        self._order = None


def all_too_long(path: str, limit: str, max_tokens: int, lengths: Collection[int]) -> str:
    """The error message for a data set none of whose rows fits."""
    return (
        f"all {len(lengths)} rows of {path} are longer than {limit}={max_tokens} tokens, "
        f"the shortest has {min(lengths)}; raise {limit} to at least {min(lengths)}"
    )


class PromptStream(RowOrder):
    """The run's prompts, one after the other without end; resumes exactly.

    With pass rates recorded, rows that were too hard or too easy when last sampled are filtered: left out of the next
    `sampling.filter_epochs` epochs after that one, then tried again, since the policy has changed.
    """

    limit = "data.max_prompt_tokens"

    def __init__(self, rows: "Rows", usable: Sequence[int], config: GRPOConfig, tokenizer: "PreTrainedTokenizerBase"):
        super().__init__(rows, usable, config.data, tokenizer, config.seed, config.data.max_prompt_tokens)
        self.sampling = config.sampling
        # Both are row: epoch in which it was last drawn; the filter's memory, empty without a filter.
        self._unrecorded: dict[int, int] = {}
        self._too_hard_or_easy: dict[int, int] = {}
        self._warned = False

    @property
    def num_filtered(self) -> int:
        """Rows left out of this epoch because of their pass rates."""
        return sum(map(self._is_filtered, self._too_hard_or_easy))

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs where needed; Prompt.index counts on through the whole run.

        Raises:
            ValueError: no prompt fits into data.max_prompt_tokens.
        """
        prompts = []
        for _ in range(count):
            index = self.num_drawn
            row, ids = self.next(self._encode, self._is_filtered) or self._draw_from_filtered()
            if self.sampling.filters:
                self._unrecorded[row] = self.epoch
            prompts.append(Prompt(index, ids, _prompt_columns(self.rows[row], self.data), row=row))
        return prompts

    def record(self, pass_rates: dict[int, float]) -> None:
        """Filter rows by what their completions achieved: row -> share that passed when it was last sampled.

        To resume exactly, take `state_dict` after it.
        """
        for row, pass_rate in pass_rates.items():
            # The stream may be in a later epoch by now. A row recorded twice counts as sampled in this one.
            epoch = self._unrecorded.pop(row, self.epoch)
            if self.sampling.min_pass_rate <= pass_rate <= self.sampling.max_pass_rate:
                self._too_hard_or_easy.pop(row, None)
            else:
                self._too_hard_or_easy[row] = epoch

    def _is_filtered(self, row: int) -> bool:
        return 0 < self.epoch - self._too_hard_or_easy.get(row, self.epoch) <= self.sampling.filter_epochs

    def _draw_from_filtered(self) -> tuple[int, list[int]]:
        """In an epoch in which all rows are filtered: forget the filter's memory, because a run needs prompts."""
        if not self._warned:
            self._warned = True
            print(
                f"warning: in epoch {self.epoch + 1} of {self.path} all {self.num_filtered} rows that fit "
                f"are filtered, having passed less often than sampling.min_pass_rate={self.sampling.min_pass_rate:g} "
                f"or more often than sampling.max_pass_rate={self.sampling.max_pass_rate:g}: they are drawn all the "
                "same, now and without further notice later on; widen these bounds or bring other prompts",
                flush=True,
            )
        self._too_hard_or_easy.clear()
        return self.next(self._encode, self._is_filtered)

    def _encode(self, row: int) -> list[int]:
        return encode_prompt(self.tokenizer, self.data, self.rows[row][self.data.prompt_column], self.max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, see RowOrder.state_dict, and with a filter its memory; fit for JSON."""
        memory = {"unrecorded": dict(self._unrecorded), "too_hard_or_easy": dict(self._too_hard_or_easy)}
        return super().state_dict() | (memory if self.sampling.filters else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; see RowOrder.load_state_dict."""
        super().load_state_dict(state)
        self._unrecorded, self._too_hard_or_easy = (
            {int(row): epoch for row, epoch in state.get(name, {}).items()} if self.sampling.filters else {}
            for name in ("unrecorded", "too_hard_or_easy")
        )


def _prompt_columns(row: dict[str, Any], config: DataConfig) -> dict[str, Any]:
    return {column: row[column] for column in dict.fromkeys([config.prompt_column, *config.columns])}


class ChatStream(RowOrder):
    """Prompt and completion pairs for SFT, one after the other without end; resumes exactly.

    `data.max_prompt_tokens` does not apply: the limit is on prompt plus completion.
    """

    limit = "max_sequence_tokens"

    def __init__(self, rows: "Rows", usable: Sequence[int], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase"):
        super().__init__(rows, usable, config.data, tokenizer, config.seed, config.max_sequence_tokens)
        self.completion_column = config.completion_column

    def draw(self, count: int) -> list[tuple[list[int], list[int]]]:
        """The next `count` pairs of prompt ids and completion ids (EOS included), across epochs where needed.

        Raises:
            ValueError: no pair fits into max_sequence_tokens.
        """
        return [self.next(self._encode)[1] for _ in range(count)]

    def _encode(self, row: int) -> tuple[list[int], list[int]]:
        prompt, completion = (self.rows[row][column] for column in (self.data.prompt_column, self.completion_column))
        prompt_ids = encode_prompt(self.tokenizer, self.data, prompt, self.max_tokens)
        check_characters(self.tokenizer, completion, self.max_tokens)
        completion_ids = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        completion_ids = [*completion_ids, self.tokenizer.eos_token_id]  # it ends what is to be imitated
        if len(prompt_ids) + len(completion_ids) > self.max_tokens:
            raise TooLong(len(prompt_ids) + len(completion_ids), exact=True)
        return prompt_ids, completion_ids


def load_eval_prompts(
    data: DataConfig, evaluation: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[Prompt]:
    """The first `evaluation.num_prompts` held-out prompts that fit, in file order, with Prompt.index from 0.

    Fewer if the data set has fewer. `data.name` applies only if the path is the same as the training data's.

    Raises:
        ValueError: rows cannot be used (see `usable_rows`), or no prompt fits into data.max_prompt_tokens.
    """
    path = evaluation.path or data.path
    if path == data.path and (is_json_lines(path) or evaluation.split == data.split):
        print(f"warning: evaluation uses the training data {path}; set evaluation.path or evaluation.split", flush=True)
    rows = load_rows(path, evaluation.name or (data.name if path == data.path else ""), evaluation.split)
    prompts, too_long = [], []
    for index in usable_rows(rows, [data.prompt_column], data.columns, path, data.bad_rows):
        if len(prompts) == evaluation.num_prompts:
            break
        row = rows[index]
        try:
            ids = encode_prompt(tokenizer, data, row[data.prompt_column], data.max_prompt_tokens)
        except TooLong as error:
            too_long.append(error.num_tokens)
            continue
        prompts.append(Prompt(len(prompts), ids, _prompt_columns(row, data), row=index))
    if too_long and not prompts:
        raise ValueError(all_too_long(path, "data.max_prompt_tokens", data.max_prompt_tokens, too_long))
    if too_long:
        print(
            f"warning: {len(too_long)} held-out prompts of {path} are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and were left out",
            flush=True,
        )
    return prompts
