"""The order in which encoded rows are drawn: epochs, windows and weights; it resumes exactly.

Only the driver (rank 0) reads data; generators and trainers see token ids.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.config import GRPOConfig, SFTConfig
from grpo.data.columns import BadRow
from grpo.data.encode import Encoded, EncodedRows, Fate, as_prompt
from grpo.data.sources import READ_ROWS, no_rows
from grpo.data.streaming import SHUFFLED_ROWS, RowStream
from grpo.types import Prompt

# What is saved of a source's order: what its place belongs to, and the place.
BELONGS_TO = ("num_rows", "window", "source", "weight", "seed", "shuffle")
PLACE = ("epoch", "start", "position", "num_drawn", "left_out")
# Rows of streams that were passed over since the start of the run, by the names of their metrics.
LEFT_OUT = {
    Fate.BAD: "data/bad_rows",
    Fate.REFUSED: "data/bad_rows",
    Fate.TOO_LONG: "data/too_long",
    Fate.UNLABELLED: "data/unlabelled",
}


class TableReader:
    """The usable rows of a table, from any place."""

    def __init__(self, rows: EncodedRows):
        self.rows = rows
        self.seek(None)

    def seek(self, place: dict[str, Any] | None) -> None:
        """Go on from a `place`; None is the beginning."""
        self.place = place or {"row": 0}

    def read(self, count: int) -> Sequence[int]:
        """The numbers of the next rows, fewer than `count` at the end."""
        numbers = self.rows.usable[self.place["row"] :][:count]
        self.place = {"row": self.place["row"] + len(numbers)}
        return numbers

    def get(self, number: int) -> Encoded:
        """A row of those that were read last."""
        return self.rows.get(number)


class StreamReader(RowStream):
    """The rows of a source that is streamed, usable or not; as TableReader."""

    def __init__(self, rows: EncodedRows):
        """rows: the first of the source, which say how all are encoded and what they must be like."""
        super().__init__(rows.source)
        self.encoder, self.kinds = rows.encoder, rows.get(rows.usable[0]).kinds

    def get(self, number: int) -> Encoded:
        """A row of those that were read last."""
        try:
            row = self.row(number)
        except BadRow as error:
            return Encoded(Fate.BAD, str(error))
        (encoded,) = self.encoder.encode([row], bounded=False)
        if encoded.kinds and encoded.kinds != self.kinds:
            return Encoded(Fate.BAD, f"its columns are {encoded.kinds}, and in the first rows {self.kinds}")
        return encoded


class Order:
    """Goes through a source epoch after epoch, window by window, and can be saved and resumed.

    A window is what is shuffled together: all rows of a table, SHUFFLED_ROWS of a stream. Its order follows from the
    seed, the epoch and its place alone, so no global RNG is touched and the order's own place is a few numbers.
    """

    def __init__(self, rows: EncodedRows, config: GRPOConfig | SFTConfig):
        """The source's rows in the order of the config's seed, from the beginning."""
        self.rows, self.bad_rows, self.is_streamed = rows, config.data.bad_rows, config.data.streaming
        self.reader = StreamReader(rows) if self.is_streamed else TableReader(rows)
        self.source, self.label, self.weight = rows.source.text, rows.source.label, rows.source.weight
        self.seed, self.shuffle = config.seed, int(config.data.shuffle)
        self.num_rows = None if self.is_streamed else len(rows.usable)  # None: not known
        self.window = self.num_rows or (SHUFFLED_ROWS if self.shuffle else READ_ROWS)
        self.epoch = 0
        self.start: dict[str, Any] | None = None  # the place where the window begins
        self.position = 0  # rows of the window that were drawn or passed over
        self.num_drawn = 0
        self.left_out = dict.fromkeys(LEFT_OUT.values() if self.is_streamed else (), 0)
        self._window: list[int] | None = None

    def draw(self) -> tuple[int, Encoded]:
        """The number of the next row that can be used, and the row.

        Raises ValueError for a row that cannot be used if `data.bad_rows` is refuse, and if a whole epoch has none.
        """
        is_whole = False  # this call began the epoch that it is in
        while True:
            if not self._window_has_rows():
                if is_whole:
                    raise ValueError(f"no row of epoch {self.epoch + 1} of {self.source} can be used; bring other rows")
                is_whole = True
                self.epoch += 1
                self._open_window(None)
                if not self._window:
                    raise no_rows(self.rows.source)
            row = self._window[self.position]
            self.position += 1
            encoded = self.reader.get(row)
            if encoded.fate == Fate.USED:
                self.num_drawn += 1
                return row, encoded
            self._leave_out(row, encoded)

    def _window_has_rows(self) -> bool:
        """Whether a row of this epoch is left; opens its next window if this one is drawn."""
        if self._window is None:  # at the place that was loaded
            position = self.position
            self._open_window(self.start)
            self.position = position
        while self.position == len(self._window):
            if len(self._window) < self.window:
                return False
            self._open_window(self.reader.place)
        return True

    def _open_window(self, start: dict[str, Any] | None) -> None:
        if start is not self.reader.place:
            self.reader.seek(start)
        self.start, self.position = self.reader.place, 0
        self._window = list(self.reader.read(self.window))
        if self.shuffle:
            place = f"{self.start['row']} " if self.is_streamed else ""
            random.Random(f"{self.seed} {self.epoch} {place}{self.label}".rstrip()).shuffle(self._window)

    def _leave_out(self, row: int, encoded: Encoded) -> None:
        """Count a row of a stream that cannot be used; raises ValueError if it must not be left out."""
        if encoded.fate == Fate.DROPPED:  # by data.row, which was meant so
            return
        name = LEFT_OUT[Fate(encoded.fate)]
        self.left_out[name] += 1
        if name != "data/bad_rows":
            return
        told = f"row {row + 1} of {self.source} cannot be used: {encoded.reason}"
        if self.bad_rows == "refuse":
            raise ValueError(f"{told}; correct it, or use --data.bad-rows skip, and go on with --resume")
        if self.left_out[name] == 1:
            print(f"warning: {told}; it is left out, and so are others, which data/bad_rows counts", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """The place in the rows and what it belongs to; fit for JSON."""
        return copy.deepcopy({name: getattr(self, name) for name in (*BELONGS_TO, *PLACE)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        for name in BELONGS_TO:
            _check_same(name, state.get(name), getattr(self, name))
        for name in PLACE:
            setattr(self, name, copy.deepcopy(state[name]))
        self._window = None


class Mixture:
    """Draws from several sources in turn, each going through epochs of its own; resumes exactly.

    Each draw owes every source its share of a row, and the source that is owed most gives the next one, so that after n
    draws each has had its share of n up to less than one row per source, with no randomness in it.
    """

    def __init__(self, sources: Sequence[EncodedRows], config: GRPOConfig | SFTConfig):
        """sources: those of `usable_prompts` or `usable_chats`."""
        self.orders = {rows.source.label: Order(rows, config) for rows in sources}
        self._owed = dict.fromkeys(self.orders, 0.0)  # rows
        self.set_weights({label: order.weight for label, order in self.orders.items()})

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Draw by these weights from now on, by the names of the sources; 1 where not named, 0 draws none.

        Raises ValueError for a name that there is not, and if no weight is above 0.
        """
        if unknown := [name for name in weights if name not in self.orders]:
            raise ValueError(f"weights name {unknown}, and data.sources has {list(self.orders)}")
        self.weights = {name: float(weights.get(name, 1.0)) for name in self.orders}
        if min(self.weights.values()) < 0 or not 0 < sum(self.weights.values()) < math.inf:
            raise ValueError(f"weights are {self.weights}; each must be 0 or more, and one above 0")

    @property
    def num_drawn(self) -> int:
        return sum(order.num_drawn for order in self.orders.values())

    def metrics(self) -> dict[str, int]:
        """Rows that were passed over because they cannot be used, by why; empty if all were looked at before."""
        counts = [order.left_out for order in self.orders.values()]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def next_order(self) -> Order:
        """Return the source whose turn it is; the call counts as its draw."""
        total = sum(self.weights.values())
        for name, weight in self.weights.items():
            self._owed[name] += weight / total
        # max takes the first of equals, but for rounding, so the order of the config decides
        name = max(filter(self.weights.get, self.orders), key=lambda name: round(self._owed[name], 9))
        self._owed[name] -= 1
        return self.orders[name]

    def state_dict(self) -> dict[str, Any]:
        """The place in each source, see Order.state_dict, and how many rows each owes; fit for JSON."""
        sources = {label: order.state_dict() for label, order in self.orders.items()}
        return {"sources": sources, "owed": dict(self._owed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it is of other sources."""
        _check_same("data.sources", list(state["sources"]), list(self.orders))
        for label, order in self.orders.items():
            order.load_state_dict(state["sources"][label])
        self._owed = dict(state["owed"])


class PromptStream(Mixture):
    """The run's prompts, one after the other without end."""

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across epochs where needed; Prompt.index counts on through the whole run."""
        prompts = []
        for _ in range(count):
            index, order = self.num_drawn, self.next_order()
            row, encoded = order.draw()
            prompts.append(as_prompt(encoded, index, row, order.label))
        return prompts


class ChatStream(Mixture):
    """Chats and texts for SFT with their labels, one after the other without end."""

    def draw(self, count: int) -> list[Encoded]:
        """The next `count` examples, across epochs where needed."""
        return [self.next_order().draw()[1] for _ in range(count)]


def _check_same(name: str, saved: Any, ours: Any) -> None:
    if saved != ours:
        raise ValueError(
            f"the saved place in the data has {name}={saved!r}, this run has {ours!r}; resume with the data sets, "
            "weights, limits, seed and shuffle it was saved with, or start a new run"
        )
