"""Rows that are read as they come (`data.streaming`): sources larger than memory or disk, in an order that resumes.

The first rows of a source are checked like those of any other; each later row when it is drawn, where `data.bad_rows`
decides. To shuffle, `data.shuffle_buffer` rows are read together and drawn in random order before the next are read; so
a row is drawn at most that many places from where it is in the source, and a place in the data is the place where the
rows at hand begin, and how many of them were drawn. Resuming reads those rows once more, and what comes before them in
the same file (a shard of a hub data set). Left out: shuffling shards, reading ahead, parts of a split.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from grpo.config import DataConfig
from grpo.config.sources import Source
from grpo.data.chat import Refused, TooLong
from grpo.data.columns import BadRow
from grpo.data.examples import Example
from grpo.data.rows import SourceRows, kind_of
from grpo.data.sources import (
    READ_ROWS,
    Row,
    Rows,
    are_lists,
    files_of,
    load,
    load_from_hub,
    load_rows,
    no_rows,
    parse_json,
    reason_of,
)

Encoded = TypeVar("Encoded")

# What is saved of a stream's order: what its place belongs to, and the place.
BELONGS_TO = ("source", "weight", "seed", "shuffle", "rows_at_hand")
PLACE = ("epoch", "start", "position", "num_drawn", "left_out")
# Rows that were passed over since the start of the run, by the names of their metrics.
LEFT_OUT = ("data/bad_rows", "data/too_long", "data/unlabelled")


class Unlabelled(Exception):
    """No token of an example is a label."""


def read_rows(source: Source, data: DataConfig) -> Rows:
    """All rows of a source; with `data.streaming` its first `data.checked_rows`. Raises what `load_rows` raises."""
    return first_rows(source, data.checked_rows) if data.streaming else load_rows(source)


def read_held_out(source: Source, data: DataConfig, num_wanted: int) -> Rows:
    """The same of held-out data, of which no more than `num_wanted` rows are needed if they can be used.

    With `data.streaming`, `num_wanted` rows are read if that is more; what cannot be streamed is read whole.
    """
    if not data.streaming or why_not(source):
        return load_rows(source)
    return first_rows(source, max(data.checked_rows, num_wanted))


def first_rows(source: Source, count: int) -> list[Row]:
    """Up to so many rows of a stream. Raises ValueError as `RowStream` does, and for a line that is no JSON object."""
    stream, rows = RowStream(source), []
    for number, item in stream.read(count):
        try:
            rows.append(stream.parse(item))
        except BadRow as error:
            raise ValueError(f"{source.path}, row {number + 1}: {error}; write one JSON object per line") from error
    if not rows:
        raise no_rows(source)
    return rows


def why_not(source: Source) -> str:
    """Why a source cannot be streamed; empty if it can."""
    if source.kind == "toy":
        return "it is made in memory"
    if "[" in source.split or "+" in source.split:
        return f"{source.split} is not one whole split"
    found = files_of(source)
    if found and found[0] == "csv":
        return "CSV is read whole; write JSON lines or parquet"
    if found and found[0] == "json" and are_lists(path for paths in found[1].values() for path in paths):
        return "it is one JSON list; write JSON lines"
    return ""


class RowStream:
    """The rows of a source, read one after the other from any place that was reached before."""

    def __init__(self, source: Source):
        """Nothing is read yet. Raises ValueError if the source cannot be streamed or opened."""
        if reason := why_not(source):
            raise ValueError(f"{source.text} cannot be streamed: {reason}; or turn it off with --data.no-streaming")
        self.source, found = source, files_of(source)
        self._is_lines = found is not None and found[0] == "json"
        if found:
            kind, files = found
            self._rows = load(source, "text" if self._is_lines else kind, data_files=files, streaming=True)
        else:
            self._rows = load_from_hub(source, streaming=True)
        self._start = {"row": 0, "state": self._rows.state_dict()}
        self.seek(None)

    def seek(self, place: dict[str, Any] | None) -> None:
        """Go on from a `place`; None is the beginning."""
        self.place = place or self._start
        """Where the next row is: its number, and the state of the library's reader. Fit for JSON."""
        self._rows.load_state_dict(copy.deepcopy(self.place["state"]))
        self._iterator = iter(self._rows)

    def read(self, count: int) -> list[tuple[int, Any]]:
        """The next rows with their numbers, as `parse` takes them; fewer than `count` at the end.

        Blank lines are no rows. Raises ValueError if a file is damaged or out of reach.
        """
        import datasets

        first = self.place["row"]
        try:
            items = list(itertools.islice(self._not_blank(), count))
        # OSError: a file or the hub is out of reach; ValueError also for what pyarrow cannot read
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{self.source.text} could not be read after row {first}: {reason_of(error)}; correct the file or "
                "try again, with --resume if the run has a checkpoint"
            ) from error
        self.place = {"row": first + len(items), "state": self._rows.state_dict()}
        return list(enumerate(items, start=first))

    def _not_blank(self) -> Iterator[Any]:
        for row in self._iterator:
            if not self._is_lines:
                yield row
            elif row["text"].strip():
                yield row["text"]

    def parse(self, item: Any) -> Row:
        """A row out of what was read. Raises BadRow for a line that is no JSON object."""
        if not self._is_lines:
            return item
        try:
            return parse_json(item)
        except ValueError as error:
            raise BadRow(str(error)) from error


class StreamedOrder:
    """Goes through a source that is streamed epoch after epoch, and can be saved and resumed; see RowOrder.

    The order follows from (seed, epoch) alone, and so do the rows that are passed over.
    """

    def __init__(self, rows: SourceRows, seed: int, data: DataConfig):
        """rows: the first of the source, which say how all are read and what they must be like."""
        self.rows, self.stream, self.bad_rows = rows, RowStream(rows.source), data.bad_rows
        self.source, self.weight, self.seed, self.shuffle = (
            rows.source.text,
            rows.source.weight,
            seed,
            int(data.shuffle),
        )
        self.rows_at_hand = data.shuffle_buffer if data.shuffle else READ_ROWS
        self.epoch = 0
        self.start: dict[str, Any] | None = None  # the place where the rows at hand begin
        self.position = 0  # rows at hand that were drawn or passed over
        self.num_drawn = 0
        self.left_out = dict.fromkeys(LEFT_OUT, 0)
        self._at_hand: list[tuple[int, Any]] | None = None
        self._kinds = _kinds(rows.example(rows.usable[0]))

    @property
    def label(self) -> str:
        return self.rows.source.label

    def take(self, encode: Callable[[Example], Encoded]) -> tuple[int, Example, Encoded]:
        """The next row that can be used: its number, what it gives, and that encoded.

        Raises ValueError for a row that cannot be used if `data.bad_rows` is refuse, and if a whole epoch has none.
        """
        first_epoch = self.epoch
        while self.epoch <= first_epoch + 1:  # an epoch with nothing to draw lies within one call
            number, item = self._next_item()
            try:
                example = self.rows.read(self.stream.parse(item))
                if example is None:  # data.row left it out
                    continue
                self._check_kinds(example)
                encoded = encode(example)
            except TooLong:
                self.left_out["data/too_long"] += 1
            except Unlabelled:
                self.left_out["data/unlabelled"] += 1
            except (BadRow, Refused) as error:
                self.left_out["data/bad_rows"] += 1
                self._tell(number, error)
            else:
                self.num_drawn += 1
                return number, example, encoded
        raise ValueError(f"no row of epoch {first_epoch + 2} of {self.source} can be used; bring other rows")

    def _next_item(self) -> tuple[int, Any]:
        if self._at_hand is None:
            self.stream.seek(self.start)
            self._read()
        while self.position == len(self._at_hand):
            if len(self._at_hand) < self.rows_at_hand:
                if self.stream.place["row"] == 0:
                    raise no_rows(self.rows.source)
                self.epoch += 1
                self.stream.seek(None)
            self.position = 0
            self._read()
        self.position += 1
        return self._at_hand[self.position - 1]

    def _read(self) -> None:
        self.start = self.stream.place
        self._at_hand = self.stream.read(self.rows_at_hand)
        if self.shuffle:
            order = random.Random(" ".join(map(str, (self.seed, self.epoch, self.start["row"], self.label))).rstrip())
            order.shuffle(self._at_hand)

    def _check_kinds(self, example: Example) -> None:
        """As all rows of a source that is not streamed: columns by the same names with the same kinds of values."""
        if (kinds := _kinds(example)) != self._kinds:
            raise BadRow(f"its columns hold {_list(kinds)}, and in the first rows {_list(self._kinds)}")

    def _tell(self, number: int, reason: Exception) -> None:
        told = f"row {number + 1} of {self.source} cannot be used: {reason}"
        if self.bad_rows == "refuse":
            raise ValueError(
                f"{told} (counted from 1, without blank lines); correct it, or leave such rows out with "
                "--data.bad-rows skip, and go on from the last checkpoint with --resume"
            )
        if self.left_out["data/bad_rows"] == 1:
            print(f"warning: {told}; it is left out, and so are others, which data/bad_rows counts", flush=True)

    def state_dict(self) -> dict[str, Any]:
        """The place in the rows and what it belongs to; fit for JSON."""
        return copy.deepcopy({name: getattr(self, name) for name in (*BELONGS_TO, *PLACE)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError if it belongs to another data set, seed or order."""
        check_belongs(state, self, BELONGS_TO)
        for name in PLACE:
            setattr(self, name, copy.deepcopy(state[name]))
        self._at_hand = None


def check_belongs(state: dict[str, Any], order: Any, names: tuple[str, ...]) -> None:
    """Raise ValueError if a saved place belongs to an order in which one of the `names` is another."""
    for name in names:
        if state.get(name) != getattr(order, name):
            raise ValueError(
                f"the saved place in the data has {name}={state.get(name)!r}, this run has {getattr(order, name)!r}; "
                "resume with the data sets, weights, limits, seed and shuffle it was saved with, or start a new run"
            )


def _kinds(example: Example) -> dict[str, str]:
    return {name: kind_of(value) for name, value in example.columns.items()}


def _list(kinds: dict[str, str]) -> str:
    return ", ".join(f"{kind} in {name!r}" for name, kind in kinds.items()) or "nothing"
