"""What a row gives, a prompt and what belongs to it, and which rows cannot give that."""

import dataclasses
import itertools
import json
import math
import re
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from grpo.config import DataConfig
from grpo.config.sources import Source
from grpo.config.user_files import load_function
from grpo.data.chat import Message
from grpo.data.sources import Row, Rows, TableRows
from grpo.text import has_surrogates, one_line, printable, shorten

Item = TypeVar("Item")

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5
# Rows that are looked at to list the columns there are.
LISTED_ROWS = 100
# Of what a user's function raised.
SHOWN_CHARACTERS = 200
# A look at all rows says how far it is after so many seconds, and then every so many.
FIRST_PROGRESS_SECONDS, PROGRESS_SECONDS = 2.0, 10.0


@dataclasses.dataclass(frozen=True)
class Example:
    """What one row gives."""

    prompt: str | list[Message]
    """The user's message, or a list of messages with `role` and `content`."""
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the reward functions get, by the names they get it by."""
    completion: str = ""
    """The answer to learn (SFT)."""
    tools: list[Any] | None = None
    """Functions that the chat template may offer to the model, as JSON schemas."""

    @property
    def texts(self) -> list[str]:
        """Prompt and what belongs to it, as far as they are text."""
        messages = [self.prompt] if isinstance(self.prompt, str) else [m["content"] for m in self.prompt]
        others = [value for value in self.columns.values() if value != self.prompt] + [self.completion]
        return [text for text in (*messages, *others) if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]


class BadRow(Exception):
    """Why a row cannot be used; `absent` is the path of a column that it does not have at all."""

    def __init__(self, reason: str, absent: str = ""):
        super().__init__(reason)
        self.absent = absent


@dataclasses.dataclass(frozen=True)
class SourceRows:
    """The rows of a source, and which of them are drawn."""

    source: Source
    rows: Rows
    read: RowReader
    usable: Sequence[int]
    left_out: dict[str, int]
    """Why rows are left out -> how many."""

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


# ---------------------------------------------------------------------------------------------------------------------
# One row
# ---------------------------------------------------------------------------------------------------------------------


def row_reader(data: DataConfig, completion_column: str = "") -> RowReader:
    """The function that turns a row into an Example, or None where `data.row` leaves it out; it raises BadRow.

    completion_column: the answer to learn, for SFT. Raises ValueError, or whatever a user's file raises, if there is no
    such function `data.row`.
    """
    if data.row:
        return _own_reader(data.row, completion_column)

    def read(row: Row) -> Example:
        prompt = _prompt(value_at(row, data.prompt_column), data.prompt_column)
        completion = _text(value_at(row, completion_column), completion_column) if completion_column else ""
        columns = {}
        if not completion_column:
            paths = data.reward_columns.items()
            columns = {name: prompt if path == data.prompt_column else _value(row, path) for name, path in paths}
        tools = _tools(value_at(row, data.tools_column, None), data.tools_column) if data.tools_column else None
        return Example(prompt, columns, completion, tools)

    return read


def _own_reader(name: str, completion_column: str) -> RowReader:
    function = load_function(name, "data.row")

    def read(row: Row) -> Example | None:
        try:
            made = function(dict(row))
        except Exception as error:  # a user's function may raise anything; it is told with the row's number
            text = shorten(one_line(f"{type(error).__name__}: {error}"), SHOWN_CHARACTERS)
            raise BadRow(f"data.row raised {text}") from error
        if made is None:
            return None
        if not isinstance(made, dict) or "prompt" not in made:
            keys = f"the keys {', '.join(map(str, made))}" if isinstance(made, dict) else type(made).__name__
            raise BadRow(f"data.row gave {keys}, and not a dict with `prompt`, or None")
        prompt = _prompt(made["prompt"], "prompt")
        completion = _text(value_at(made, completion_column), completion_column) if completion_column else ""
        names = [name for name in made if name not in ("prompt", "tools")] if not completion_column else []
        tools = _tools(made.get("tools"), "tools")
        return Example(prompt, {name: _value(made, name) for name in names}, completion, tools)

    return read


_REQUIRED = object()


def value_at(row: Any, path: str, default: Any = _REQUIRED) -> Any:
    """What is at `path`: `a.b` entry b of the table in column a, `a.0` the first of a list, `a.:-1` all but its last.

    A column whose whole name is `path` comes first. Where there is none: `default`, or BadRow with `absent`.
    """
    if path in row:
        return row[path]
    value = row
    for part in path.split("."):
        try:
            if isinstance(value, dict):
                value = value[part]
            elif isinstance(value, list) and re.fullmatch(r"-?\d*:-?\d*", part):
                value = value[slice(*(int(end) if end else None for end in part.split(":")))]
            elif isinstance(value, list) and re.fullmatch(r"-?\d+", part):
                value = value[int(part)]
            else:
                raise KeyError(part)
        except LookupError:
            if default is not _REQUIRED:
                return default
            raise BadRow(f"column {path!r} is missing", absent=path) from None
    return value


def _value(row: Row, path: str) -> Any:
    """Any value but none at all."""
    value = value_at(row, path)
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables write NaN for what is missing
        raise BadRow(f"column {path!r} is missing")
    _check_surrogates(value, path)
    return value


def _text(value: Any, path: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise BadRow(f"column {path!r} is missing")
    if not isinstance(value, str):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"column {path!r} is empty")
    _check_surrogates(value, path)
    return value


def _prompt(value: Any, path: str) -> str | list[Message]:
    if not isinstance(value, list):
        return _text(value, path)
    if not value:
        raise BadRow(f"column {path!r} is empty")
    messages = [_message(message, f"column {path!r}, message {number}") for number, message in enumerate(value, 1)]
    _check_surrogates(messages, path)
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"column {path!r} ends with the assistant's answer, which is not a part of the prompt; take {path}.:-1"
        )
    return messages


def _message(message: Any, where: str) -> Message:
    """Without entries that are None, which a table adds to messages that lack what others have."""
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {type(message).__name__}, not a table with role and content")
    message = without_none(message)
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no role")
    message.setdefault("content", "" if message.get("tool_calls") else None)
    if not isinstance(message["content"], str):
        raise BadRow(f"{where} has no text as content")
    return message


def _tools(value: Any, path: str) -> list[Any] | None:
    """A list of schemas, also from JSON text; none where there is none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"column {path!r} is text, but not JSON ({error})") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not a list of functions")
    _check_surrogates(value, path)
    return without_none(value)


def without_none(value: Any) -> Any:
    """Tables without their entries that are None, at any depth."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def _check_surrogates(value: Any, path: str) -> None:
    """No tokenizer, file or process takes a lone one, also not inside a list or table."""
    waiting = [value]  # not recursive: JSON may be nested as deep as Python's stack
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and has_surrogates(value):
            raise BadRow(f"column {path!r} has a lone surrogate (half of a character)")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


# ---------------------------------------------------------------------------------------------------------------------
# All rows
# ---------------------------------------------------------------------------------------------------------------------


def check_rows(source: Source, rows: Rows, data: DataConfig, completion_column: str = "") -> SourceRows:
    """Look once at every row; what is told about those that cannot be used goes to the console or into the error.

    Raises ValueError if no row has one of the columns, if there are rows that cannot be used and `data.bad_rows` is
    refuse, or if no row can be.
    """
    if isinstance(rows, TableRows) and not data.row:
        rows = _narrow(rows, _paths(data, completion_column), source.path)
    read = row_reader(data, completion_column)
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
        has_tools = has_tools or bool(example.tools)
        for name, value in example.columns.items():
            kinds[name][_kind(value)].append(index)
        usable.append(index)
    for path, count in absent.items():
        if path and count == len(rows):
            raise _no_column(path, source.path, rows)
    if data.tools_column and usable and not has_tools and not data.row:
        raise _no_column(data.tools_column, source.path, rows)
    unusable |= _rare_kinds(kinds)
    usable = [index for index in usable if index not in unusable]
    tell_unusable(dict(sorted(unusable.items())), len(rows), source.path, data.bad_rows, bool(usable))
    if not usable:
        raise ValueError(f"data.row={data.row} left out all {len(rows)} rows of {source.path}; let it return a dict")
    left_out = {f"left out by {data.row}": num_dropped, "that cannot be used": len(unusable)}
    return SourceRows(source, rows, read, usable, {why: count for why, count in left_out.items() if count})


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items; says how many of `total` there were after 2 seconds, and then every 10."""
    next_line = time.monotonic() + FIRST_PROGRESS_SECONDS
    for number, item in enumerate(items):
        if time.monotonic() >= next_line:
            print(f"data: {number:,} of {total:,} {printable(what)}", flush=True)
            next_line = time.monotonic() + PROGRESS_SECONDS
        yield item


def _paths(data: DataConfig, completion_column: str) -> list[str]:
    named = [completion_column] if completion_column else data.reward_columns.values()
    return [path for path in dict.fromkeys([data.prompt_column, *named, data.tools_column]) if path]


def _narrow(rows: TableRows, paths: list[str], where: str) -> TableRows:
    """Only the columns that are used: others may be large."""
    there = rows.table.column_names
    columns = {path: path if path in there else path.partition(".")[0] for path in paths}
    for path, column in columns.items():
        if column not in there:
            raise _no_column(path, where, rows)
    return TableRows(rows.table.select_columns(list(dict.fromkeys(columns.values()))))


def _no_column(path: str, where: str, rows: Rows) -> ValueError:
    there: dict[str, None] = {}
    for row in itertools.islice(rows, LISTED_ROWS):
        for name, value in row.items():
            there |= dict.fromkeys([f"{name}.{key}" for key in value] if isinstance(value, dict) else [name])
    return ValueError(f"column {path!r} is missing in {where}; columns there: {', '.join(map(str, there)) or 'none'}")


def _kind(value: Any) -> str:
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
