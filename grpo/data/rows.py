"""Where rows come from: a JSON-lines file, the hub or a toy task. Left out: streaming data sets, mixing several."""

import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

    Rows = list[dict[str, Any]] | datasets.Dataset

# Row numbers an error lists before it says "and N more".
SHOWN_ROWS = 5


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
            except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
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


def check_columns(rows: "Rows", needed: Iterable[str], path: str) -> None:
    """Raise ValueError unless every row has every needed column; the message says what is missing and what is there."""
    # A datasets.Dataset has one set of columns; rows of a file may each have their own.
    rows_of_columns = [rows.column_names] if hasattr(rows, "column_names") else rows
    there = list(dict.fromkeys(column for columns in rows_of_columns for column in columns))
    for column in dict.fromkeys(needed):
        if column not in there:
            raise ValueError(f"column {column!r} is missing in {path}; columns there: {', '.join(there) or 'none'}")
        without = [number for number, columns in enumerate(rows_of_columns, start=1) if column not in columns]
        if without:
            shown = ", ".join(map(str, without[:SHOWN_ROWS]))
            more = f" and {len(without) - SHOWN_ROWS} more" if len(without) > SHOWN_ROWS else ""
            raise ValueError(
                f"column {column!r} is missing in {len(without)} of {len(rows_of_columns)} rows of {path}: "
                f"row {shown}{more} (counted from 1, blank lines left out); add it there or drop these rows"
            )


def text_in(row: dict[str, Any], column: str, number: int, path: str) -> str:
    """The text in a column; `number` is the row's, from 1. Raises ValueError if it is no text."""
    if not isinstance(row[column], str):
        raise ValueError(
            f"row {number} of {path}: column {column!r} holds {type(row[column]).__name__}, not text; correct that row"
        )
    return row[column]
