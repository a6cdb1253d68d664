"""Rows that are read as they come (`data.streaming`): sources larger than memory or disk, from any place.

The first CHECKED_ROWS of a source are looked at before the start like those of any other; each later row when it is
drawn. Resuming reads the window of rows once more that was being drawn, and what comes before it in the same file (a
shard of a hub data set). Left out: shuffling shards, reading ahead, parts of a split.
"""

import copy
import itertools
from typing import Any

from grpo.config import DataConfig
from grpo.config.sources import Source
from grpo.data.columns import BadRow, Row
from grpo.data.sources import LINES, READERS, Rows, files_of, load, load_rows, no_rows, parse_json
from grpo.text import reason_of

# First rows of each source that are looked at before the start.
CHECKED_ROWS = 1000
# Rows that are read together and drawn in random order before others are.
SHUFFLED_ROWS = 10_000


def read_rows(source: Source, data: DataConfig, held_out: int = 0) -> Rows | list[Row]:
    """All rows of a source; with `data.streaming` a list of its first ones. Raises what `load_rows` and `RowStream` do.

    held_out: so many rows are needed at least, and what cannot be streamed is read whole; 0 for training data.
    """
    if not data.streaming or (held_out and why_not(source)):
        return load_rows(source)
    stream, rows = RowStream(source), []
    for number in stream.read(max(CHECKED_ROWS, held_out)):
        try:
            rows.append(stream.row(number))
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
    kind = (files_of(source) or ("hub",))[0]
    return f"a file of kind {kind} is read whole; write JSON lines or parquet" if kind in READERS else ""


class RowStream:
    """The rows of a source, a window of them at a time."""

    def __init__(self, source: Source):
        """Nothing is read yet. Raises ValueError if the source cannot be streamed or opened."""
        if reason := why_not(source):
            raise ValueError(f"{source.text} cannot be streamed: {reason}; or turn it off with --data.no-streaming")
        self.source, found = source, files_of(source)
        self._is_lines = found is not None and found[0] == "json"
        self._rows = load(source, found, streaming=True)
        self._start = {"row": 0, "state": self._rows.state_dict()}
        self.seek(None)

    def seek(self, place: dict[str, Any] | None) -> None:
        """Go on from a `place`; None is the beginning."""
        self.place = place or self._start
        """Where the next window begins: the number of its first row, and the state of the library's reader, as JSON."""
        self._rows.load_state_dict(copy.deepcopy(self.place["state"]))
        self._iterator = iter(self._rows)
        self._first, self._window = self.place["row"], []

    def read(self, count: int) -> range:
        """Read the next window: the numbers of its rows, fewer than `count` at the end. Blank lines are no rows.

        Raises ValueError if a file is damaged or out of reach.
        """
        import datasets

        first = self.place["row"]
        try:
            rows = (row for row in self._iterator if not self._is_lines or row[LINES].strip())
            window = list(itertools.islice(rows, count))
        # OSError: a file or the hub is out of reach; ValueError also for what pyarrow cannot read
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"{self.source.text} could not be read after row {first}: {reason_of(error)}; correct the file or "
                "try again, with --resume if the run has a checkpoint"
            ) from error
        self._first, self._window = first, window
        self.place = {"row": first + len(window), "state": self._rows.state_dict()}
        return range(first, first + len(window))

    def row(self, number: int) -> Row:
        """A row of the window. Raises BadRow for a line that is no JSON object."""
        item = self._window[number - self._first]
        return parse_json(item[LINES]) if self._is_lines else item
