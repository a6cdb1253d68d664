"""Where rows come from, a JSON-lines file, the hub or a toy task, and which of them can be used.

Left out: streaming data sets, mixing several.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from grpo.text import has_surrogates, printable

if TYPE_CHECKING:
    import datasets

    Rows = list[dict[str, Any]] | datasets.Dataset

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5
# Rows of a hub data set that are read together.
READ_ROWS = 1000


def load_rows(path: str, name: str, split: str) -> "Rows":
    """All rows of a data set: `toy:NAME`, a local JSON-lines file, or a hub data set (its configuration `name`).

    A path that ends in .jsonl or .json, or that is a file, is read as JSON lines; `name` and `split` do not apply then.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: a line is not a JSON object, there are no rows, or a toy task or hub data set cannot be loaded.
    """
    if path.startswith("toy:"):
        from grpo.data.toy import task_rows  # only toy runs need it

        rows = task_rows(path.removeprefix("toy:"), split)
    elif is_json_lines(path):
        rows = _read_json_lines(pathlib.Path(path))
    else:
        rows = _load_hub_rows(path, name, split)
    if len(rows) == 0:
        raise ValueError(f"data set {path} (split {split!r}) has no rows; give one that has")
    return rows


def is_json_lines(path: str) -> bool:
    return path.endswith((".jsonl", ".json")) or pathlib.Path(path).is_file()


def _read_json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"data file {path.absolute()} does not exist; correct the path or create it")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number or nesting beyond all bounds
                raise ValueError(f"{where}: not JSON ({error}); write one JSON object per line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a {type(row).__name__}, not a JSON object; write one JSON object per line")
            rows.append(row)
    return rows


def _load_hub_rows(path: str, name: str, split: str) -> "datasets.Dataset":
    import datasets  # takes a second to load, and files and toy tasks do without

    try:
        return datasets.load_dataset(path, name or None, split=split)
    # OSError covers a data set that is not there (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError); ValueError a wrong configuration or split.
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data set {path} (name {name!r}, split {split!r}) could not be loaded: {type(error).__name__}: {error}\n"
            "Check the spelling; for a local file, give a path ending in .jsonl. Without network, load the data set "
            "where there is one and bring its cache (HF_HOME), or save it as .jsonl"
        ) from error


def usable_rows(
    rows: "Rows", texts: Iterable[str], others: Iterable[str], path: str, bad_rows: Literal["refuse", "skip"]
) -> list[int]:
    """Indices of the rows that can be used; what is told about the others goes to the console or into the error.

    `texts`, `others` and `path` as in `check_rows`. Raises ValueError if there are rows that cannot be used and
    `bad_rows` is refuse, or if no row can be.
    """
    unusable = check_rows(rows, texts, others, path)
    if not unusable:
        return list(range(len(rows)))
    shown = "; ".join(f"row {row + 1}: {why}" for row, why in itertools.islice(unusable.items(), SHOWN_ROWS))
    more = f"; and {len(unusable) - SHOWN_ROWS} more" if len(unusable) > SHOWN_ROWS else ""
    told = f"{len(unusable)} of {len(rows)} rows of {path} cannot be used: {shown}{more} (counted from 1, without blank"
    if len(unusable) == len(rows):
        raise ValueError(f"{told} lines); no row is left; name other columns or correct the rows")
    if bad_rows == "refuse":
        raise ValueError(f"{told} lines); correct these rows, or leave them out with --data.bad-rows skip")
    print(printable(f"warning: {told} lines); they are left out"), flush=True)
    return [row for row in range(len(rows)) if row not in unusable]


def check_rows(rows: "Rows", texts: Iterable[str], others: Iterable[str], path: str) -> dict[int, str]:
    """Look once at every row: index of each that cannot be used -> why, in the order of the rows.

    Columns in `texts` must hold text that is not blank, those in `others` a value; neither may have a lone surrogate,
    which no tokenizer, file or process takes. `path` is the data set's, for messages.
    Raises ValueError if no row has one of the columns.
    """
    texts, others = list(dict.fromkeys(texts)), list(dict.fromkeys(others))
    columns = list(dict.fromkeys([*texts, *others]))
    # A datasets.Dataset has one set of columns; rows of a file may each have their own.
    there = (
        rows.column_names if hasattr(rows, "column_names") else list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    )
    for column in columns:
        if column not in there:
            raise ValueError(f"column {column!r} is missing in {path}; columns there: {', '.join(there) or 'none'}")
    unusable = {}
    for index, values in enumerate(_values(rows, columns)):
        faults = ((column, _fault(value, column in texts)) for column, value in zip(columns, values, strict=True))
        if first := next(((column, fault) for column, fault in faults if fault), None):
            unusable[index] = "column {!r} {}".format(*first)
    return unusable


def _values(rows: "Rows", columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """The columns' values of every row, None where a row has no such column."""
    if not hasattr(rows, "column_names"):
        yield from (tuple(map(row.get, columns)) for row in rows)
        return
    for batch in rows.select_columns(columns).iter(batch_size=READ_ROWS):  # one by one takes five times as long
        yield from zip(*(batch[column] for column in columns), strict=True)


def _fault(value: Any, must_be_text: bool) -> str:
    """Why a column may not hold the value, or nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables write NaN for what is missing
        return "is missing"
    if must_be_text and not isinstance(value, str):
        return f"holds {type(value).__name__}, not text"
    if must_be_text and not value.strip():
        return "is empty"
    return "has a lone surrogate (half of a character)" if _has_surrogates(value) else ""


def _has_surrogates(value: Any) -> bool:
    """Whether a text has one, or any text inside a list or table."""
    waiting = [value]  # not recursive: JSON may be nested as deep as Python's stack
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and has_surrogates(value):
            return True
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return False
