"""All rows of a source, looked at once: which of them can be used, and why the others cannot."""

import dataclasses
import itertools
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from grpo.config import DataConfig, SFTConfig
from grpo.config.sources import Source
from grpo.data.columns import ABSENT, BadRow, value_at
from grpo.data.examples import Example, RowReader, chat_columns, chat_reader, row_reader
from grpo.data.formats import detect_format, no_format
from grpo.data.sources import Row, Rows, TableRows
from grpo.text import printable

Item = TypeVar("Item")

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5
# Rows that are looked at to list the columns there are.
LISTED_ROWS = 100
# A look at all rows says how far it is after so many seconds, and then every so many.
FIRST_PROGRESS_SECONDS, PROGRESS_SECONDS = 2.0, 10.0


@dataclasses.dataclass(frozen=True)
class SourceRows:
    """The rows of a source, and which of them are drawn."""

    source: Source
    rows: Rows
    read: RowReader
    usable: Sequence[int]
    left_out: dict[str, int]
    """Why rows are left out -> how many."""
    num_wanted: int
    """All rows except those that `data.row` left out, which was meant so."""

    def example(self, row: int) -> Example:
        """A usable row as it was when all were looked at; ValueError if `data.row` gives something else now."""
        return self.read_again(row, self.rows[row])

    def read_again(self, number: int, row: Row) -> Example:
        """The same of a row that is in memory."""
        try:
            example = self.read(row)
        except BadRow as error:
            raise self.changed(number, error) from error
        if example is None:
            raise self.changed(number, "left out")
        return example

    def changed(self, row: int, now: object) -> ValueError:
        return ValueError(
            f"row {row + 1} of {self.source.path} could be used when the run started, and now: {now}; a function "
            "data.row must give the same each time"
        )


def check_rows(source: Source, rows: Rows, data: DataConfig) -> SourceRows:
    """Look once at every row; what is told about those that cannot be used goes to the console or into the error.

    Raises ValueError if no row has one of the columns, if there are rows that cannot be used and `data.bad_rows` is
    refuse, or if no row can be.
    """
    if isinstance(rows, TableRows) and not data.row:
        paths = [data.prompt_column, *data.reward_columns.values(), data.tools_column]
        rows = _narrow(rows, [path for path in dict.fromkeys(paths) if path], source.path)
    return _look_at(source, rows, data, row_reader(data))


def check_chat_rows(source: Source, rows: Rows, config: SFTConfig) -> SourceRows:
    """The same for SFT. The format of the rows, unless it is given, is that of the first rows for all of a source.

    Raises ValueError also if they have columns of no format.
    """
    data, columns, row_format = config.data, chat_columns(config), config.row_format
    if row_format == "auto" and not data.row:
        row_format = detect_format(itertools.islice(rows, LISTED_ROWS), columns)
        if row_format is None:
            raise ValueError(f"{source.path}: {no_format(_names(rows), columns)}")
        needed = " and ".join(columns.needed(row_format))
        print(printable(f"data: {source.path} has {needed}, so its row_format is {row_format}"), flush=True)
    if isinstance(rows, TableRows) and not data.row:
        there = rows.table.column_names
        optional = [path for path in ("input", columns.tools) if path.partition(".")[0] in there]
        rows = _narrow(rows, [*columns.needed(row_format), *optional], source.path)
    return _look_at(source, rows, data, chat_reader(config, row_format))


def _look_at(source: Source, rows: Rows, data: DataConfig, read: RowReader) -> SourceRows:
    usable, unusable, absent = [], {}, Counter()
    num_dropped, has_tools = 0, False
    first: Example | None = None
    kinds: dict[str, dict[str, array]] = defaultdict(lambda: defaultdict(lambda: array("q")))
    for index, row in enumerate(progress(rows, len(rows), f"rows of {source.path} read")):
        try:
            example = read(row)
        except BadRow as error:
            unusable[index] = str(error)
            absent[error.absent] += 1
            continue
        if example is None:
            num_dropped += 1
            continue
        first = first or example
        if example.columns.keys() != first.columns.keys():
            names = ", ".join(example.columns) or "none"
            unusable[index] = f"data.row gave the columns {names}, and before {', '.join(first.columns) or 'none'}"
            continue
        has_tools = has_tools or bool(example.chat.tools if example.chat else example.tools)
        for name, value in example.columns.items():
            kinds[name][kind_of(value)].append(index)
        usable.append(index)
    for path, count in absent.items():
        if path and count == len(rows):
            raise _no_column(path, source.path, rows)
    if data.tools_column and not data.row and not has_tools:
        some = itertools.islice(rows, LISTED_ROWS)
        if usable and all(value_at(row, data.tools_column, ABSENT) is ABSENT for row in some):
            raise _no_column(data.tools_column, source.path, rows)
    unusable |= _rare_kinds(kinds)
    usable = [index for index in usable if index not in unusable]
    tell_unusable(dict(sorted(unusable.items())), len(rows), source.path, data.bad_rows, bool(usable))
    if not usable:
        raise ValueError(f"data.row={data.row} left out all {len(rows)} rows of {source.path}; let it return a dict")
    left_out = {f"left out by {data.row}": num_dropped, "that cannot be used": len(unusable)}
    left_out = {why: count for why, count in left_out.items() if count}
    return SourceRows(source, rows, read, usable, left_out, len(rows) - num_dropped)


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items; says how many of `total` there were after 2 seconds, and then every 10."""
    next_line = time.monotonic() + FIRST_PROGRESS_SECONDS
    for number, item in enumerate(items):
        if time.monotonic() >= next_line:
            print(f"data: {number:,} of {total:,} {printable(what)}", flush=True)
            next_line = time.monotonic() + PROGRESS_SECONDS
        yield item


def _narrow(rows: TableRows, paths: list[str], where: str) -> TableRows:
    """Only the columns that are used: others may be large."""
    there = rows.table.column_names
    columns = {path: path if path in there else path.partition(".")[0] for path in paths}
    for path, column in columns.items():
        if column not in there:
            raise _no_column(path, where, rows)
    return TableRows(rows.table.select_columns(list(dict.fromkeys(columns.values()))))


def _no_column(path: str, where: str, rows: Rows) -> ValueError:
    return ValueError(f"column {path!r} is missing in {where}; columns there: {', '.join(_names(rows)) or 'none'}")


def _names(rows: Rows) -> list[str]:
    """The columns of the first rows, entries of tables as paths."""
    there: dict[str, None] = {}
    for row in itertools.islice(rows, LISTED_ROWS):
        for name, value in row.items():
            there |= dict.fromkeys([f"{name}.{key}" for key in value] if isinstance(value, dict) else [str(name)])
    return list(there)


def kind_of(value: Any) -> str:
    """In words: text, a truth value, a number, a list, a table, or another type's name."""
    for kind, types in (("text", str), ("a truth value", bool), ("a number", int | float), ("a list", list)):
        if isinstance(value, types):
            return kind
    return "a table" if isinstance(value, dict) else type(value).__name__


def _rare_kinds(kinds: dict[str, dict[str, array]]) -> dict[int, str]:
    """Rows whose column holds another kind of value than most rows: a reward would meet it in the middle of a run."""
    rare = {}
    for name, rows_of in kinds.items():
        usual = max(rows_of, key=lambda kind: len(rows_of[kind]))
        for kind, rows in rows_of.items():
            if kind != usual:
                rare |= dict.fromkeys(rows, f"column {name!r} holds {kind}, and in most rows {usual}")
    return rare


def tell_unusable(unusable: dict[int, str], num_rows: int, where: str, bad_rows: str, some_left: bool) -> None:
    """Warn of rows that cannot be used (index -> why), or raise ValueError if `bad_rows` is refuse or none is left."""
    if not unusable:
        return
    shown = "; ".join(f"row {row + 1}: {why}" for row, why in itertools.islice(unusable.items(), SHOWN_ROWS))
    more = f"; and {len(unusable) - SHOWN_ROWS} more" if len(unusable) > SHOWN_ROWS else ""
    told = f"{len(unusable)} of {num_rows} rows of {where} cannot be used: {shown}{more} (counted from 1, without blank"
    if not some_left:
        raise ValueError(f"{told} lines); no row is left; name other columns or correct the rows")
    if bad_rows == "refuse":
        raise ValueError(f"{told} lines); correct these rows, or leave them out with --data.bad-rows skip")
    print(printable(f"warning: {told} lines); they are left out"), flush=True)
