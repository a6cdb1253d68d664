"""Prompts and chat examples, tokenized as they are drawn, in streams that resume exactly.

Only the driver (rank 0) reads data; generators and trainers see token ids.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpo.config import DataConfig, GRPOConfig, SamplingConfig, SFTConfig
from grpo.data.chat import Refused, TooLong, encode_prompt
from grpo.data.examples import Example
from grpo.data.rows import SourceRows
from grpo.data.turns import encode_example
from grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Token ids, and for each whether it is a label.
Labelled = tuple[list[int], list[bool]]
# What is saved of a source's order: what its place belongs to, and the place.
BELONGS_TO = ("num_rows", "source", "weight", "seed", "shuffle")
PLACE = ("epoch", "position", "num_drawn")


class RowOrder:
    """Goes through the usable rows of a source epoch after epoch, and can be saved and resumed.

    Each epoch's order follows from (seed, epoch) alone, so its place is two numbers and no global RNG is touched.
    """

    def __init__(self, rows: SourceRows, seed: int, shuffle: bool):
        self.rows = rows
        self.num_rows, self.source, self.weight = len(rows.usable), rows.source.text, rows.source.weight
        self.seed, self.shuffle = seed, int(shuffle)
        self.epoch = 0
        self.position = 0  # rows of this epoch that were taken or passed over
        self.num_drawn = 0
        self._order: list[int] | None = None

    @property
    def label(self) -> str:
        return self.rows.source.label

    def next(self, skip: Callable[[int], bool] = lambda row: False) -> int | None:
        """The next row. Those of which `skip` is true are passed over; None if it is true of a whole epoch."""
        num_passed_over = 0  # of this epoch, by this call: an epoch with nothing to draw lies within one call
        while num_passed_over < self.num_rows:
            row = self._next_row()
            if not skip(row):
                self.num_drawn += 1
                return row
            num_passed_over = 1 if self.position == 1 else num_passed_over + 1
        return None

    def _next_row(self) -> int:
        if self.position == self.num_rows:
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        if self._order is None:
            self._order = list(self.rows.usable)
            if self.shuffle:
                random.Random(" ".join(map(str, (self.seed, self.epoch, self.label))).rstrip()).shuffle(self._order)
        self.position += 1
        return self._order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """The place in the rows and what it belongs to; plain numbers and one text, fit for JSON."""
        return {name: getattr(self, name) for name in (*BELONGS_TO, *PLACE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        for name in BELONGS_TO:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved place in the data has {name}={state[name]!r}, this run has {getattr(self, name)!r}; "
                    "resume with the data sets, weights, limits, seed and shuffle it was saved with, or start a new run"
                )
        for name in PLACE:
            setattr(self, name, state[name])
        self._order = None


class PromptOrder(RowOrder):
    """Leaves out rows that were too hard or too easy when last sampled (`sampling.min_pass_rate`, `max_pass_rate`).

    With pass rates recorded, such rows are filtered: left out of the next `sampling.filter_epochs` epochs after that
    one, then tried again, since the policy has changed.
    """

    def __init__(self, rows: SourceRows, config: GRPOConfig):
        super().__init__(rows, config.seed, config.data.shuffle)
        self.sampling: SamplingConfig = config.sampling
        # Both are row: epoch in which it was last drawn; the filter's memory, empty without a filter.
        self._unrecorded: dict[int, int] = {}
        self._too_hard_or_easy: dict[int, int] = {}
        self._warned = False

    @property
    def num_filtered(self) -> int:
        """Rows left out of this epoch because of their pass rates."""
        return sum(map(self._is_filtered, self._too_hard_or_easy))

    def draw(self) -> int:
        """The next row that is not filtered."""
        row = self.next(self._is_filtered)
        if row is None:
            row = self._draw_from_filtered()
        if self.sampling.filters:
            self._unrecorded[row] = self.epoch
        return row

    def record(self, row: int, pass_rate: float) -> None:
        """Filter the row by the share of its completions that passed when it was last sampled."""
        # The order may be in a later epoch by now. A row recorded twice counts as sampled in this one.
        epoch = self._unrecorded.pop(row, self.epoch)
        if self.sampling.min_pass_rate <= pass_rate <= self.sampling.max_pass_rate:
            self._too_hard_or_easy.pop(row, None)
        else:
            self._too_hard_or_easy[row] = epoch

    def _is_filtered(self, row: int) -> bool:
        return 0 < self.epoch - self._too_hard_or_easy.get(row, self.epoch) <= self.sampling.filter_epochs

    def _draw_from_filtered(self) -> int:
        """In an epoch in which all rows are filtered: forget the filter's memory, because a run needs prompts."""
        if not self._warned:
            self._warned = True
            print(
                f"warning: in epoch {self.epoch + 1} of {self.rows.source.path} all {self.num_filtered} rows are "
                f"filtered, having passed less often than sampling.min_pass_rate={self.sampling.min_pass_rate:g} "
                f"or more often than sampling.max_pass_rate={self.sampling.max_pass_rate:g}: they are drawn all the "
                "same, now and without further notice later on; widen these bounds or bring other prompts",
                flush=True,
            )
        self._too_hard_or_easy.clear()
        return self.next()

    def state_dict(self) -> dict[str, Any]:
        """See RowOrder.state_dict; with a filter also its memory."""
        memory = {"unrecorded": dict(self._unrecorded), "too_hard_or_easy": dict(self._too_hard_or_easy)}
        return super().state_dict() | (memory if self.sampling.filters else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; see RowOrder.load_state_dict."""
        super().load_state_dict(state)
        self._unrecorded, self._too_hard_or_easy = (
            {int(row): epoch for row, epoch in state.get(name, {}).items()} if self.sampling.filters else {}
            for name in ("unrecorded", "too_hard_or_easy")
        )


Order = TypeVar("Order", bound=RowOrder)


class Mixture(Generic[Order]):
    """Draws from several sources in turn, each going through epochs of its own; resumes exactly.

    The next row comes from the source that is furthest behind its weight, so that after n draws each source has had its
    share of n up to less than one row per source, with no randomness in it.
    """

    def __init__(self, orders: Sequence[Order]):
        self.orders = {order.label: order for order in orders}
        self._total_weight = sum(order.weight for order in orders)

    @property
    def num_drawn(self) -> int:
        return sum(order.num_drawn for order in self.orders.values())

    def next_order(self) -> Order:
        """The source whose turn it is."""
        number = self.num_drawn + 1
        # max takes the first of equals, so the order of the config decides
        return max(self.orders.values(), key=lambda o: o.weight / self._total_weight * number - o.num_drawn)

    def state_dict(self) -> dict[str, Any]:
        """The place in each source, see RowOrder.state_dict; fit for JSON."""
        return {"sources": {label: order.state_dict() for label, order in self.orders.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it is of other sources, or of an older version."""
        if "sources" not in state:
            raise ValueError(
                "the checkpoint has its place in the data in the form of an older version, which is not read any more; "
                "start a new run, from the model that the old one exported if you like (--model.path)"
            )
        if list(state["sources"]) != list(self.orders):
            saved, ours = (", ".join(labels) or "none" for labels in (state["sources"], self.orders))
            raise ValueError(
                f"the saved place in the data has the data.sources {saved}, this run has {ours}; resume with those it "
                "was saved with, or start a new run"
            )
        for label, order in self.orders.items():
            order.load_state_dict(state["sources"][label])


class PromptStream(Mixture[PromptOrder]):
    """The run's prompts, one after the other without end."""

    def __init__(self, sources: Sequence[SourceRows], config: GRPOConfig, tokenizer: "PreTrainedTokenizerBase"):
        """sources: those of `usable_prompts`."""
        super().__init__([PromptOrder(rows, config) for rows in sources])
        self.data, self.tokenizer = config.data, tokenizer

    @property
    def num_filtered(self) -> int:
        """Rows left out of this epoch of their source because of their pass rates."""
        return sum(order.num_filtered for order in self.orders.values())

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs where needed; Prompt.index counts on through the whole run."""
        prompts = []
        for _ in range(count):
            index, order = self.num_drawn, self.next_order()
            row = order.draw()
            prompts.append(_make_prompt(index, row, order.rows, self.data, self.tokenizer))
        return prompts

    def prompt(self, index: int, source: str, row: int) -> Prompt:
        """One that was drawn before, made again; see `Prompt` for its three numbers."""
        return _make_prompt(index, row, self.orders[source].rows, self.data, self.tokenizer)

    def record(self, pass_rates: dict[tuple[str, int], float]) -> None:
        """Filter rows by what their completions achieved: (source, row) -> share that passed when it was last sampled.

        To resume exactly, take `state_dict` after it.
        """
        for (source, row), pass_rate in pass_rates.items():
            self.orders[source].record(row, pass_rate)


def _make_prompt(
    index: int, row: int, rows: SourceRows, data: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> Prompt:
    example = rows.example(row)
    try:
        ids = encode_prompt(tokenizer, data, example.prompt, data.max_prompt_tokens, example.tools)
    except (TooLong, Refused) as error:
        raise rows.changed(row, error) from error
    return Prompt(index, ids, example.columns, row, rows.source.label, example.prompt)


class ChatStream(Mixture[RowOrder]):
    """Chats and texts for SFT with their labels, one after the other without end."""

    def __init__(self, sources: Sequence[SourceRows], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase"):
        """sources: those of `usable_chats`."""
        super().__init__([RowOrder(rows, config.seed, config.data.shuffle) for rows in sources])
        self.config, self.tokenizer = config, tokenizer

    def draw(self, count: int) -> list[Labelled]:
        """The next `count` examples, across epochs where needed."""
        examples = []
        for _ in range(count):
            order = self.next_order()
            row = order.next()
            try:
                examples.append(encode_chat_row(order.rows.example(row), self.config, self.tokenizer))
            except (TooLong, Refused) as error:
                raise order.rows.changed(row, error) from error
        return examples


def encode_chat_row(example: Example, config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> Labelled:
    """What a row gave as token ids with their labels, cut off if `too_long` says so; raises TooLong and Refused."""
    max_tokens, truncates = config.max_sequence_tokens, config.too_long == "truncate"
    return encode_example(tokenizer, config.data, example.chat, config.train_on, max_tokens, truncates)
