"""The rows of a source: files, a hub data set, read with the library `datasets`, or a user's function.

JSON is parsed here, line by line, and so is CSV. The library's reader of JSON (4.7) was seen to turn texts that look
like dates into dates, to stop at blank lines and at rows with different columns without saying where, and to accept or
refuse mixed types depending on where they stand in the file. Its reader of CSV loses cells of rows that have too many.
"""

import contextlib
import csv
import glob
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.config.user_files import cause_and_line, load_function
from grpo.config.values import FILE_KINDS, Source
from grpo.data.rows import BadRow, Example, Row, RowReader, TableRow
from grpo.text import reason_of

if TYPE_CHECKING:
    import datasets

# Rows that are read together: one by one takes five times as long.
READ_ROWS = 1000
# Rows that a function may give if its source does not say how many to take: it may be one without an end.
MAX_FUNCTION_ROWS = 1_000_000
# The column of a table of lines
LINES = "text"
# What the library says of a split and of a file without rows
NO_ROWS = ("corresponds to no data", "Please pass `features` or at least one example")
# A cell may be a whole book; the module csv takes 131,072 by default.
MAX_CELL_CHARACTERS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of a source, as a table on disk or in memory. JSON is a table of lines, one row in each."""

    table: "datasets.Dataset"
    source: Source
    is_json: bool = False
    read: RowReader | None = None
    """The function that makes an example of a row; None until it is known."""

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.table), READ_ROWS):
            yield from self.rows_of(self.table[start : start + READ_ROWS], start)

    def rows_of(self, batch: dict[str, list], start: int) -> list[Row]:
        """Return the rows in a batch of the table that begins with row `start`, without blank lines.

        Raises ValueError for a line that is not a JSON object.
        """
        rows = []
        if not self.is_json:
            for values in zip(*batch.values(), strict=True):
                rows.append(TableRow(zip(batch, values, strict=True)))
            return rows
        for number, text in enumerate(batch[LINES], start=start + 1):
            text = text.removeprefix("\ufeff")  # of a file that begins with a byte order mark
            try:
                if text.strip():
                    rows.append(_parse_json(text, dict))
            except ValueError as error:
                message = f"{self.source.text}, line {number}: {error}; write one JSON object per line"
                raise ValueError(message) from error
        return rows

    def examples(self) -> Iterator[Example]:
        """Yield the example of each row that can be used."""
        for row in self:
            with contextlib.suppress(BadRow):
                example = self.read(row)
                if example is not None:
                    yield example

    def narrowed(self, paths: Iterable[str]) -> "Rows":
        """Keep only the columns of the table that these paths lead into, since others may be large."""
        names = {name for path in paths for name in (path, path.partition(".")[0])}
        columns = [name for name in self.table.column_names if name in names]
        if self.is_json or not columns:
            return self
        return replace(self, table=self.table.select_columns(columns))


def load_rows(source: Source) -> Rows:
    """Load all rows of a source, in its order.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: it cannot be read, a line is not a JSON object, or there are no rows; one line with the way out.
    """
    if source.kind == "folder":
        raise ValueError(
            f"data folder {source.path} is not read as a whole; name files of one split in it, such as "
            f"{source.path}/train*.jsonl (.json, .csv, .parquet); for tables of Arrow call to_parquet first"
        )
    if source.kind == "function":
        rows = _call_function(source)
    elif source.kind == "file":
        rows = _read_files(source)
    else:
        options = {"revision": source.revision} if source.revision else {}
        rows = Rows(_load(source, source.path, name=source.name or None, **options), source)
    if next(iter(rows), None) is None:
        raise ValueError(f"data set {source.path} (split {source.split!r}) has no rows; give one that has")
    return rows


def _in_memory(lines: list[str], source: Source) -> Rows:
    """Make a table of JSON lines that are in memory."""
    import datasets

    table = datasets.Dataset.from_dict({LINES: lines})
    return Rows(table, source, is_json=True)


def _call_function(source: Source) -> Rows:
    """Take the rows that the user's function gives for the split, such as `train`, up to the end in `train[:4096]`.

    The revision of the source becomes a checksum of its rows, so that a run is not resumed with others. Raises
    ValueError that names the row if the function raises, gives no dict, or does not end.
    """
    function = load_function(source.path, "data")
    split, _, bounds = source.split.partition("[")
    end = re.fullmatch(r"\d*:(\d+)\]", bounds)
    max_rows = int(end[1]) if end else MAX_FUNCTION_ROWS
    lines = []
    try:
        for row in itertools.islice(function(split), max_rows):
            if not isinstance(row, dict):
                raise TypeError(f"it is a {type(row).__name__}, not a dict")
            lines.append(json.dumps(row))
    except Exception as error:  # whatever a user's function may raise, or give that JSON cannot hold
        where = cause_and_line(error, source.path.rpartition(":")[0])
        raise ValueError(
            f"data {source.text}, row {len(lines) + 1}{where}; correct the function, or name another split"
        ) from error
    if not end and len(lines) == MAX_FUNCTION_ROWS:
        raise ValueError(
            f"data {source.text} gives {MAX_FUNCTION_ROWS:,} rows or more; name how many to take, as in "
            f"{source.path}:{split}[:10000]"
        )
    lines = _rows_named(lines, split, source)
    content = "\n".join(lines).encode()
    checksum = hashlib.sha256(content).hexdigest()
    return _in_memory(lines, replace(source, revision=checksum[:8]))


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _read_files(source: Source) -> Rows:
    """Read a file, or those that a pattern such as `rows/train-*.parquet` names, in the order of their names.

    Raises FileNotFoundError if there is none, and ValueError for a split of a single file.
    """
    paths = [source.path] if os.path.isfile(source.path) else sorted(glob.glob(source.path))
    if not paths:
        raise FileNotFoundError(
            f"data file {os.path.abspath(source.path)} does not exist; correct the path or create it"
        )
    # Files have one split, which goes by the name that is asked for, so that `train[:90%]` takes some of it.
    split = source.split.partition("[")[0]
    if split not in ("train", "test"):
        raise ValueError(
            f"{source.text}: a file has no splits; name the file alone, or some rows as {source.path}:train[:90%]"
        )
    kind = _kind_of(paths[0])
    if kind in READERS:
        lines = []
        for path in paths:
            lines += map(json.dumps, READERS[kind](path))
        return _in_memory(_rows_named(lines, split, source), source)
    # the time of a change, which nobody can set: the library knows files by another time, which other content may have
    changed = [os.stat(path).st_ctime_ns for path in paths]
    table = _load(
        source,
        "text" if kind == "json" else kind,
        name=hashlib.sha256(repr(changed).encode()).hexdigest()[:16],
        # escaped, because the library takes paths for patterns: rows[1].jsonl would be rows1.jsonl
        data_files={split: [*map(glob.escape, paths)]},
    )
    return Rows(table, source, is_json=kind == "json")


def _kind_of(path: str) -> str:
    """Return the kind that the file's name says, or `list` for a .json file with one list of all rows.

    Raises ValueError for another ending.
    """
    suffix = Path(path).suffix
    if suffix not in FILE_KINDS:
        raise ValueError(f"data file {path} ends in none of {', '.join(FILE_KINDS)}; unpack it, or write it as one")
    if suffix == ".json":
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            first_line = next(filter(str.strip, file), "")
        if first_line.lstrip().startswith("["):
            return "list"
    return FILE_KINDS[suffix]


def _rows_named(rows: list, split: str, source: Source) -> list:
    """Take what the source's expression names, such as `train[:90%]+train[95%:]`, from the rows of a split."""
    import datasets

    try:
        slices = datasets.ReadInstruction.from_spec(source.split).to_absolute({split: len(rows)})
    except (ValueError, AssertionError) as error:  # the split is unknown, or no expression of splits
        raise ValueError(f"data set {source.text} could not be loaded: {error}") from error
    return [*itertools.chain(*(rows[each.from_ : each.to] for each in slices))]


def _read_list(path: str) -> list[Row]:
    """Read a file that is one JSON list of all rows, perhaps over many lines."""
    try:
        rows = _parse_json(Path(path).read_text(encoding="utf-8-sig"), list)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"entry {number} is a {type(row).__name__}, not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; write one list of JSON objects, or JSON lines") from error
    return rows


def _read_csv(path: str) -> list[Row]:
    """Read all cells as text, so that 007 stays 007 and NA is a word. An empty cell is missing.

    Raises ValueError for a row with more or fewer cells than the header has names, for a name that is there twice, and
    for a quote that does not end where its cell ends.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    rows = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)  # else a quote without an end makes one cell of the rest of the file
        try:
            for row in reader:
                num_names = len(reader.fieldnames)
                # what the library makes of a cell too many, of one too few, and of two columns of one name
                if None in row or None in row.values() or len(row) < num_names:
                    raise ValueError(f"its cells are not one for each of {num_names} different names in the header")
                rows.append({name: cell or None for name, cell in row.items()})
        except (csv.Error, ValueError) as error:
            raise ValueError(
                f"{path}, up to line {reader.reader.line_num}: {error}; put cells with commas or line breaks in "
                '"quotes", and write "" for a quote within them, all in UTF-8'
            ) from error
    return rows


READERS = {"list": _read_list, "csv": _read_csv}


def _parse_json(text: str, kind: type) -> Any:
    """Parse a value of this kind. Raises ValueError that says what is wrong."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or a number or nesting without bounds
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__}, not a JSON object")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# The library
# ---------------------------------------------------------------------------------------------------------------------


def _load(source: Source, path: str, **options: Any) -> "datasets.Dataset":
    """Load a source with `datasets.load_dataset`. Raises ValueError with one line and the way out."""
    import datasets  # takes a second to load
    import pyarrow

    # Else each load is reported to the hub, also one of a local file, which takes seconds where there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error alone says what fails
    try:
        return datasets.load_dataset(path, split=source.split, **options)
    # OSError covers a data set that does not exist (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError), ValueError a wrong configuration or split, DatasetsError refused files.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if any(text in str(cause) for text in NO_ROWS):
            return datasets.Dataset.from_dict({})
        way_out = (
            "check the spelling; for a local file, give a path ending in .jsonl, .json, .csv or .parquet; without "
            "network, load the data set where there is one and bring its cache (HF_HOME); to ask about memory alone, "
            "--data.path configs/examples/toys.py:addition"
        )
        if isinstance(error, (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowException)):
            way_out = (
                "its rows are no table: a file is damaged or a pointer of git-lfs (git lfs pull), or a column has text "
                "in one row and a number in another; make each column one type, or write the rows as JSON lines"
            )
        raise ValueError(f"data set {source.text} could not be loaded: {reason_of(cause)}; {way_out}") from error
