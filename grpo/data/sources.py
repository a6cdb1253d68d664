"""The rows of a source: a file, a folder, the hub, read by the library `datasets`, or a function of the user's.

JSON lines are read by it as lines of text and parsed one at a time. Its own reader of JSON was seen (4.7) to turn texts
that look like dates into dates, to stop at blank lines and at rows with different columns without saying where, and to
accept or refuse a mixture of types by where in the file it is.
"""

import codecs
import contextlib
import csv
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo.config.user_files import cause_and_line, load_function
from grpo.config.values import FILE_KINDS, Source
from grpo.data.rows import BadRow, Example, Row, RowReader
from grpo.text import reason_of

if TYPE_CHECKING:
    import datasets

# Rows that are read together: one by one takes five times as long.
READ_ROWS = 1000
# Rows that a function may give whose source does not say how many to take: it may be one without an end.
MOST_FUNCTION_ROWS = 1_000_000
# The column of a file that is read as lines.
LINES = "text"
# What the library says of a split and of a file without rows.
NO_ROWS = ("corresponds to no data", "Please pass `features` or at least one example")
# How gzip, bzip2, xz, zstd, zip and a file whose writing was broken off begin. The library would unpack some of them,
# and fail in as many ways.
PACKED_OR_BROKEN = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\0")
# A cell may be a whole book; the module csv takes 131,072 by default.
MOST_CELL_CHARACTERS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of a source, which stay on disk: a table of the library's, or lines of JSON as its only column."""

    table: "datasets.Dataset"
    source: Source
    is_json: bool = False
    read: RowReader | None = None
    """What makes an example of a row; None until that is known."""

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.table), READ_ROWS):
            yield from self.rows_of(self.table[start : start + READ_ROWS], start)

    def rows_of(self, batch: dict[str, list], start: int) -> list[Row]:
        """The rows in a batch of the table that begins at place `start`. Blank lines are none.

        Raises ValueError for a line that is not a JSON object.
        """
        if not self.is_json:
            return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = []
        for number, text in enumerate(batch[LINES], start=start + 1):
            try:
                text = text.removeprefix("\ufeff")  # of a file that begins with a byte order mark
                rows += [_parse_json(text, dict)] if text.strip() else []
            except ValueError as error:
                where = f"{self.source.text}, line {number}"
                raise ValueError(f"{where}: {error}; write one JSON object per line") from error
        return rows

    def examples(self) -> Iterator[Example]:
        """What the rows give, as they come; those that cannot be used give nothing."""
        for row in self:
            with contextlib.suppress(BadRow):
                if (example := self.read(row)) is not None:
                    yield example

    def narrowed(self, paths: Iterable[str]) -> "Rows":
        """A table with only the columns that these paths lead into, since others may be large; JSON stays as it is."""
        used = {name for path in paths for name in (path, path.partition(".")[0])}
        columns = [name for name in self.table.column_names if name in used]
        return self if self.is_json or not columns else replace(self, table=self.table.select_columns(columns))


def load_rows(source: Source) -> Rows:
    """All rows of a source, in its order.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: it cannot be read, a line is not a JSON object, or there are no rows; one line with the way out.
    """
    kind, files = _files_of(source)
    if source.kind == "function":
        rows = _call_function(source)
    elif kind in READERS:
        rows = _in_memory([json.dumps(row) for row in _read_whole(source, kind, files)], source)
    else:
        rows = Rows(_load(source, kind, files), source, is_json=kind == "json")
    if next(iter(rows), None) is None:
        raise _no_rows(source)
    return rows


def _in_memory(lines: list[str], source: Source) -> Rows:
    import datasets

    return Rows(datasets.Dataset.from_dict({LINES: lines}), source, is_json=True)


def _call_function(source: Source) -> Rows:
    """Take the rows that the user's function gives for the split, such as `train`, up to the end in `train[:4096]`.

    The revision of the source becomes a checksum of its rows, so that a run is not resumed with others. Raises
    ValueError that names the row if the function raises, gives no dict, or does not end.
    """
    function = load_function(source.path, "data")
    split, _, part = source.split.partition("[")
    end = re.fullmatch(r"\d*:(\d+)\]", part)
    most_rows = int(end[1]) if end else MOST_FUNCTION_ROWS
    lines: list[str] = []
    try:
        for row in itertools.islice(function(split), most_rows):
            if not isinstance(row, dict):
                raise TypeError(f"it is a {type(row).__name__}, not a dict")
            lines.append(json.dumps(row))
    except Exception as error:  # whatever a user's function may raise, or give that JSON cannot hold
        where = cause_and_line(error, source.path.rpartition(":")[0])
        raise ValueError(
            f"data {source.text}, row {len(lines) + 1}{where}; correct the function, or name another split"
        ) from error
    if not end and len(lines) == MOST_FUNCTION_ROWS:
        raise ValueError(
            f"data {source.text} gives {MOST_FUNCTION_ROWS:,} rows or more; name how many to take, as in "
            f"{source.path}:{split}[:10000]"
        )
    lines = _part_of({split: lines}, source)
    checksum = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return _in_memory(lines, replace(source, revision=checksum))


def _no_rows(source: Source) -> ValueError:
    return ValueError(f"data set {source.path} (split {source.split!r}) has no rows; give one that has")


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _files_of(source: Source) -> tuple[str, dict[str, list[str]]]:
    """What the files of a source hold (json, list, csv, parquet) and their paths by split, of a file or a folder.

    Empty for all other sources, and for a folder with the card of a data set, which says what its files are. Raises
    FileNotFoundError for a file that does not exist, ValueError for a compressed one, and for a folder of several kinds
    of files or of none.
    """
    path = pathlib.Path(source.path)
    if source.is_file:
        if not path.is_file():
            raise FileNotFoundError(f"data file {path.absolute()} does not exist; correct the path or create it")
        # A file has one split, which goes by the name that is asked for, so that `train[:90%]` takes a part of it.
        if (split := source.split.partition("[")[0]) not in ("train", "test"):
            raise ValueError(
                f"{source.text}: a file has no splits; name the file alone, or a part as {path}:train[:90%]"
            )
        files = {split: [str(path)]}
    elif source.kind == "folder" and not (path / "README.md").is_file():
        from datasets.data_files import DataFilesDict, get_data_patterns

        # names say which split a file is of; all are train if none does
        folder, files = str(path.absolute()), {}
        with contextlib.suppress(FileNotFoundError):
            found = DataFilesDict.from_patterns(get_data_patterns(folder), folder, allowed_extensions=list(FILE_KINDS))
            files = {split: [str(file) for file in names] for split, names in found.items()}
    else:
        return "", {}
    kinds = {_kind_of(path) for path in itertools.chain(*files.values())}
    if len(kinds) != 1:
        there = f"files of several kinds ({', '.join(sorted(kinds))})" if kinds else f"no {', '.join(FILE_KINDS)} file"
        raise ValueError(f"data folder {source.path} has {there}; give one with files of one kind, or a single file")
    return kinds.pop(), files


def _kind_of(path: str) -> str:
    """What a file holds: that of its name, or `list` for a .json file with one list of all rows."""
    kind = FILE_KINDS.get(pathlib.Path(path).suffix, "json")
    with open(path, "rb") as file:
        if (beginning := file.read(max(map(len, PACKED_OR_BROKEN)))).startswith(PACKED_OR_BROKEN):
            raise ValueError(f"data file {path} is compressed or broken: it begins with {beginning}; unpack it")
        file.seek(0)
        lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
        first = next(filter(None, lines), b"") if path.endswith(".json") else b""
    return "list" if first.startswith(b"[") else kind


def _read_whole(source: Source, kind: str, files: dict[str, list[str]]) -> list[Row]:
    """The rows of files of a kind that has no table and no lines."""
    for path in itertools.chain(*files.values()):
        _check_text(path)
    rows = {split: [row for path in paths for row in READERS[kind](path)] for split, paths in files.items()}
    return _part_of(rows, source)


def _part_of(rows: dict[str, list], source: Source) -> list:
    """Take what the source's expression of splits names, such as `train[:90%]+test`, from the rows of each split."""
    import datasets

    sizes = {name: len(rows[name]) for name in rows}
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:  # of a split that is not there, or that cannot be read
        raise ValueError(f"data set {source.text} could not be loaded: {error}") from error
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def _read_list(path: str) -> list[Row]:
    """A file that is one JSON list of all rows, perhaps over many lines."""
    try:
        rows = _parse_json(pathlib.Path(path).read_text(encoding="utf-8-sig"), list)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"entry {number} is a {type(row).__name__}, not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; write one list of JSON objects, or JSON lines") from error
    return rows


def _read_csv(path: str) -> list[Row]:
    """All cells as the text that they are, so that 007 stays 007 and NA is a word; an empty one is missing.

    Raises ValueError for a row with more or fewer cells than the header.
    """
    csv.field_size_limit(MOST_CELL_CHARACTERS)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        names, rows = next(reader, []), []
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{path}, line 1: the header is {names}; name each column, and no two alike")
        for cells in filter(None, reader):  # without blank lines
            if len(cells) != len(names):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, the header has {len(names)}; put cells with "
                    'commas or line breaks in "quotes"'
                )
            rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
    return rows


READERS = {"list": _read_list, "csv": _read_csv}


def _parse_json(text: str, kind: type) -> Any:
    """The value, which must be of this kind; else ValueError, which says what it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or a number or nesting beyond all bounds
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__}, not a JSON object")
    return value


def _check_text(path: str) -> None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if "\0" in line.decode("utf-8"):
                    raise ValueError("NUL bytes")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not text ({error}); write UTF-8") from error


# ---------------------------------------------------------------------------------------------------------------------
# The library
# ---------------------------------------------------------------------------------------------------------------------


def _load(source: Source, kind: str, files: dict[str, list[str]]) -> "datasets.Dataset":
    """`datasets.load_dataset` of a source: of these files, or of the hub if there are none.

    Raises ValueError with one line and the way out.
    """
    import datasets  # takes a second to load

    if files:
        arguments, options = ("text" if kind == "json" else kind,), {"data_files": files}
    else:
        arguments, options = (source.path, source.name or None), {}
        options |= {"revision": source.revision} if source.revision else {}
    # Else each load is reported to the hub, also one of a local file, which takes seconds where there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is said once, by the error
    try:
        return datasets.load_dataset(*arguments, split=source.split, **options)
    # OSError covers a data set that is not there (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError), ValueError a wrong configuration or split, DatasetsError what its files are refused for.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if any(said in str(cause) for said in NO_ROWS):
            raise _no_rows(source) from error
        if isinstance(cause, UnicodeDecodeError):
            for path in itertools.chain(*files.values()):
                _check_text(path)
        way_out = (
            "check the spelling; for a local file, give a path ending in .jsonl, .json, .csv or .parquet; without "
            "network, load the data set where there is one and bring its cache (HF_HOME); to ask about memory alone, "
            "--data.path configs/examples/toys.py:addition"
        )
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            way_out = (
                "its rows are no table: a file is damaged, or a column has text in one row and a number in another; "
                "make each column one type, or write the rows as JSON lines"
            )
        raise ValueError(f"data set {source.text} could not be loaded: {reason_of(cause)}; {way_out}") from error
