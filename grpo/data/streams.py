"""Prompts and chat examples, tokenized as they are drawn, in streams that resume exactly.

Only the driver (rank 0) reads data; generators and trainers see token ids.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from grpo.config import GRPOConfig, SamplingConfig, SFTConfig
from grpo.data.chat import Refused, TooLong, encode_prompt
from grpo.data.examples import Example
from grpo.data.rows import SourceRows
from grpo.data.streaming import LEFT_OUT, StreamedOrder, Unlabelled, check_belongs
from grpo.data.turns import encode_example
from grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Labelled(NamedTuple):
    """An example of SFT as tokens."""

    ids: list[int]
    mask: list[bool]
    """For each token whether it is a label."""
    truncated: bool = False
    """Its end was cut off."""


Encoded = TypeVar("Encoded")
# What is saved of a source's order: what its place belongs to, and the place. Of those that are streamed: streaming.py.
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

    def take(self, encode: Callable[[Example], Encoded]) -> tuple[int, Example, Encoded]:
        """The next row: its number, what it gives, and that encoded."""
        row = self.draw()
        example = self.rows.example(row)
        try:
            return row, example, encode(example)
        except (TooLong, Refused, Unlabelled) as error:
            raise self.rows.changed(row, error) from error

    def draw(self) -> int:
        """The number of the next row."""
        return self.next()

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
        check_belongs(state, self, BELONGS_TO)
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


class Mixture:
    """Draws from several sources in turn, each going through epochs of its own; resumes exactly.

    The next row comes from the source that is furthest behind its weight, so that after n draws each source has had its
    share of n up to less than one row per source, with no randomness in it.
    """

    def __init__(self, orders: Sequence[RowOrder | StreamedOrder]):
        self.orders = {order.label: order for order in orders}
        self._total_weight = sum(order.weight for order in orders)

    @property
    def num_drawn(self) -> int:
        return sum(order.num_drawn for order in self.orders.values())

    def metrics(self) -> dict[str, int]:
        """Rows that were passed over because they cannot be used, by why; empty if all were looked at before."""
        counts = [order.left_out for order in self.orders.values() if isinstance(order, StreamedOrder)]
        return {name: sum(count[name] for count in counts) for name in (LEFT_OUT if counts else ())}

    def next_order(self) -> RowOrder | StreamedOrder:
        """The source whose turn it is."""
        number = self.num_drawn + 1
        # max takes the first of equals, so the order of the config decides
        return max(self.orders.values(), key=lambda o: o.weight / self._total_weight * number - o.num_drawn)

    def state_dict(self) -> dict[str, Any]:
        """The place in each source, see RowOrder.state_dict; fit for JSON."""
        return {"sources": {label: order.state_dict() for label, order in self.orders.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it is of other sources."""
        if list(state["sources"]) != list(self.orders):
            saved, ours = (", ".join(labels) or "none" for labels in (state["sources"], self.orders))
            raise ValueError(
                f"the saved place in the data has the data.sources {saved}, this run has {ours}; resume with those it "
                "was saved with, or start a new run"
            )
        for label, order in self.orders.items():
            order.load_state_dict(state["sources"][label])


class PromptStream(Mixture):
    """The run's prompts, one after the other without end."""

    def __init__(self, sources: Sequence[SourceRows], config: GRPOConfig, tokenizer: "PreTrainedTokenizerBase"):
        """sources: those of `usable_prompts`."""
        streaming = config.data.streaming
        super().__init__(
            [StreamedOrder(r, config.seed, config.data) if streaming else PromptOrder(r, config) for r in sources]
        )
        self.data, self.sampling, self.tokenizer = config.data, config.sampling, tokenizer

    @property
    def num_filtered(self) -> int:
        """Rows left out of this epoch of their source because of their pass rates."""
        return sum(order.num_filtered for order in self.orders.values())

    def metrics(self) -> dict[str, int]:
        """See Mixture.metrics; with a filter also how many rows it leaves out."""
        return super().metrics() | ({"sampling/filtered": self.num_filtered} if self.sampling.filters else {})

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs where needed; Prompt.index counts on through the whole run."""
        prompts = []
        for _ in range(count):
            index, order = self.num_drawn, self.next_order()
            row, example, ids = order.take(self._encode)
            prompts.append(Prompt(index, ids, example.columns, row, order.label, example.prompt))
        return prompts

    def draw_again(self, place: dict[str, Any], count: int) -> list[Prompt]:
        """The prompts that were drawn at an earlier `place`, which a `state_dict` told; the next draw is as without."""
        here = self.state_dict()
        self.load_state_dict(place)
        prompts = self.draw(count)
        self.load_state_dict(here)
        return prompts

    def _encode(self, example: Example) -> list[int]:
        return encode_prompt(self.tokenizer, self.data, example.prompt, self.data.max_prompt_tokens, example.tools)

    def record(self, pass_rates: dict[tuple[str, int], float]) -> None:
        """Filter rows by what their completions achieved: (source, row) -> share that passed when it was last sampled.

        To resume exactly, take `state_dict` after it.
        """
        if self.sampling.filters:
            for (source, row), pass_rate in pass_rates.items():
                self.orders[source].record(row, pass_rate)


class ChatStream(Mixture):
    """Chats and texts for SFT with their labels, one after the other without end."""

    def __init__(self, sources: Sequence[SourceRows], config: SFTConfig, tokenizer: "PreTrainedTokenizerBase"):
        """sources: those of `usable_chats`."""
        data, seed = config.data, config.seed
        super().__init__(
            [StreamedOrder(r, seed, data) if data.streaming else RowOrder(r, seed, data.shuffle) for r in sources]
        )
        self.config, self.tokenizer = config, tokenizer

    def draw(self, count: int) -> list[Labelled]:
        """The next `count` examples, across epochs where needed."""
        return [self.next_order().take(self._encode)[2] for _ in range(count)]

    def _encode(self, example: Example) -> Labelled:
        labelled = encode_chat_row(example, self.config, self.tokenizer)
        if not any(labelled.mask):
            raise Unlabelled("no token is a label")
        return labelled


def encode_chat_row(example: Example, config: SFTConfig, tokenizer: "PreTrainedTokenizerBase") -> Labelled:
    """What a row gave as token ids with their labels, cut off if `too_long` says so; raises TooLong and Refused."""
    max_tokens, truncates = config.max_sequence_tokens, config.too_long == "truncate"
    # one token more, if there is one, says that something is cut off
    most = max_tokens + 1 if truncates else max_tokens
    ids, mask = encode_example(tokenizer, config.data, example.chat, config.train_on, most, truncates)
    return Labelled(ids[:max_tokens], mask[:max_tokens], truncated=len(ids) > max_tokens)
