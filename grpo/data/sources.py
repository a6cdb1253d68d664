"""The rows of a source: a file, a folder or a hub data set, read with the library `datasets`, or a user's function.

JSON is parsed here, line by line, and so is CSV. The library's reader of JSON (4.7) was seen to turn texts that look
like dates into dates, to stop at blank lines and at rows with different columns without saying where, and to accept or
refuse mixed types depending on their place in the file. Its reader of CSV loses cells of rows that have too many.
"""

import codecs
import contextlib
import csv
import glob
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.config.user_files import cause_and_line, load_function
from grpo.config.values import FILE_KINDS, Source
from grpo.data.rows import BadRow, Example, Row, RowReader, TableRow
from grpo.text import printable, reason_of

if TYPE_CHECKING:
    import datasets

# Paths of files by their split
Files = dict[str, list[str]]
# Rows that are read together: one by one takes five times as long.
READ_ROWS = 1000
# Rows that a function may give if its source does not say how many to take: it may be one without an end.
MAX_FUNCTION_ROWS = 1_000_000
# The column of a table of lines
LINES = "text"
# What the library says of a split and of a file without rows
NO_ROWS = ("corresponds to no data", "Please pass `features` or at least one example")
# How gzip, bzip2, xz, zstd, zip and a file that was not written to its end begin. The library would unpack some of
# them, and fail in as many ways.
PACKED_OR_BROKEN = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\0")
# What files are that other tools write: the beginning of a file, or the end of its name, and the way out
OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of git-lfs to a file that was not downloaded; run git lfs pull",
    ".tsv": "has tabs between its cells; write commas, as in CSV, or JSON lines",
    ".arrow": "is a table of Arrow; write it with to_parquet, and name that file",
    ".feather": "is a table of Arrow; write it with to_parquet, and name that file",
}
# Bytes at the beginning and at the end of a file by which its cached table is known
CHECKED_BYTES = 2**20
# Files that the warning about files without a split names
SHOWN_FILES = 5
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
    whole_table: "datasets.Dataset | None" = None
    """The table with all columns, if `table` has only some."""

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.table), READ_ROWS):
            yield from self.rows_of(self.table[start : start + READ_ROWS], start)

    def rows_of(self, batch: dict[str, list], start: int) -> list[Row]:
        """Return the rows in a batch of the table that begins at place `start`, without blank lines.

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
        names = set()
        for path in paths:
            first_name, _, _ = path.partition(".")
            names |= {path, first_name}
        columns = [name for name in self.table.column_names if name in names]
        if self.is_json or not columns:
            return self
        return replace(self, table=self.table.select_columns(columns), whole_table=self.table)


def load_rows(source: Source) -> Rows:
    """Load all rows of a source, in its order.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: it cannot be read, a line is not a JSON object, or there are no rows; one line with the way out.
    """
    _check_cache()
    if source.kind == "function":
        rows = _call_function(source)
    else:
        kind, files = _files_of(source)
        if kind in READERS:
            lines = [json.dumps(row) for row in _read_whole(source, kind, files)]
            rows = _in_memory(lines, source)
        else:
            table = _load(source, kind, files)
            rows = Rows(table, source, is_json=kind == "json")
    if next(iter(rows), None) is None:
        raise ValueError(f"data set {source.path} (split {source.split!r}) has no rows; give one that has")
    return rows


def _check_cache() -> None:
    """Raise ValueError if the folder for tables cannot be written, as one that several users share."""
    import datasets

    folder = datasets.config.HF_DATASETS_CACHE
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise ValueError(
            f"tables of rows cannot be written to {folder} ({error.strerror}); set HF_DATASETS_CACHE to a folder of "
            "your own, models in HF_HOME can stay where they are"
        ) from error


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
    split, _, part = source.split.partition("[")
    end = re.fullmatch(r"\d*:(\d+)\]", part)
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
    lines = _part_of({split: lines}, source)
    content = "\n".join(lines).encode()
    checksum = hashlib.sha256(content).hexdigest()
    return _in_memory(lines, replace(source, revision=checksum[:8]))


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _files_of(source: Source) -> tuple[str, Files]:
    """Find the files of a source: their kind (json, list, csv or parquet) and their paths by split.

    Both are empty for a hub data set, and for a folder with the card of a data set, which names its files. Raises
    FileNotFoundError for a file that does not exist, ValueError for a compressed file, a split of a single file, a
    folder without files or with files of several kinds, and a configuration of a folder without a card.
    """
    path = Path(source.path)
    if source.is_file:
        if not path.is_file():
            raise FileNotFoundError(f"data file {path.absolute()} does not exist; correct the path or create it")
        # A file has one split, which goes by the name that is asked for, so that `train[:90%]` takes a part of it.
        split = source.split.partition("[")[0]
        if split not in ("train", "test"):
            raise ValueError(
                f"{source.text}: a file has no splits; name the file alone, or a part as {path}:train[:90%]"
            )
        files = {split: [str(path)]}
    elif source.kind == "folder" and not _has_card(path):
        if source.name:
            raise ValueError(
                f"{source.text}: a folder has configurations only if its README.md names their files, under `configs` "
                f"in its front matter; leave [{source.name}] out"
            )
        _check_not_saved(path)
        files = _files_in_folder(str(path.absolute()))
    else:
        return "", {}
    kinds = {_kind_of(path) for path in itertools.chain(*files.values())}
    if len(kinds) != 1:
        content = f"no {', '.join(FILE_KINDS)} file"
        if kinds:
            content = f"files of several kinds ({', '.join(sorted(kinds))})"
        raise ValueError(f"data folder {source.path} has {content}; give one with files of one kind, or a single file")
    return kinds.pop(), files


def _check_not_saved(folder: Path) -> None:
    """Raise ValueError for a folder that the library's `save_to_disk` wrote: its files are no data files."""
    has_splits = (folder / "dataset_dict.json").is_file()
    has_rows = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    if has_splits or has_rows:
        saved = folder / "train" if has_splits else folder
        raise ValueError(
            f"data folder {folder} is one that save_to_disk wrote, which is not read; write a file with "
            f"datasets.load_from_disk({str(saved)!r}).to_parquet('train.parquet') and name that file"
        )


def _has_card(folder: Path) -> bool:
    """Say whether the folder's README.md names the files of its configurations, as the card of a data set may.

    Other cards, and notes, say nothing that is needed to find the files. Raises ValueError for front matter that cannot
    be read, since it may name files.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    path = folder / "README.md"
    if not path.is_file():
        return False
    front_matter = REGEX_YAML_BLOCK.match(path.read_text(encoding="utf-8", errors="replace"))
    if front_matter is None:
        return False
    try:
        entries = yaml.safe_load(front_matter[2])
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path} begins with front matter that is not YAML ({reason_of(error)}); correct it, or begin the file "
            "with another line than ---"
        ) from error
    return isinstance(entries, dict) and bool(entries.get("configs"))


def _files_in_folder(folder: str) -> Files:
    """Find the files of each split by their names; all are of the split train if no name has a split.

    Prints which files are not read: those of other kinds, and in a warning those whose names have no split beside
    others that have one. Raises ValueError for a name with several splits and for compressed data.
    """
    from datasets.data_files import _get_data_files_patterns  # the public one looks at backups and notes too

    others = [path for path in _matching("**", folder) if Path(path).suffix not in FILE_KINDS]
    for path in others:
        if FILE_KINDS.keys() & set(Path(path).suffixes):  # rows.jsonl.gz is data, rows.jsonl.bak a backup
            _check_packed(path)
    if others:
        names = ", ".join(os.path.relpath(path, folder) for path in others[:SHOWN_FILES])
        if len(others) > SHOWN_FILES:
            names += ", .."
        print(
            printable(
                f"data: data folder {folder}: files whose names do not end in {', '.join(FILE_KINDS)} are not read: "
                f"{names}"
            )
        )

    def find(pattern: str) -> list[str]:
        """Find the data files whose names fit the pattern."""
        return [path for path in _matching(pattern, folder) if Path(path).suffix in FILE_KINDS]

    try:
        patterns = _get_data_files_patterns(find)
    except FileNotFoundError:
        return {}
    all_files = find("**")
    files = {}
    for split, patterns_of_split in patterns.items():
        # a file that has the words of a split twice in its name is found twice
        paths = itertools.chain(*map(find, patterns_of_split))
        files[str(split)] = dict.fromkeys(paths)
    unread = []
    for path in all_files:
        splits = [split for split, paths in files.items() if path in paths]
        if len(splits) > 1:
            raise ValueError(
                f"data file {path} is of the splits {' and '.join(splits)} by its name; rename it, or give single files"
            )
        if not splits:
            unread.append(os.path.relpath(path, folder))
    if unread:
        print(
            printable(
                f"warning: data folder {folder}: {len(unread)} of {len(all_files)} files are not read, because their "
                f"names have no split and others have one: {', '.join(unread[:SHOWN_FILES])}; begin their names with "
                f"{' or '.join(files)}, or move them away"
            )
        )
    for split, paths in files.items():
        folders = sorted({os.path.relpath(os.path.dirname(path), folder) for path in paths})
        if len(folders) > 1:
            raise ValueError(
                f"data folder {folder} has rows of the split {split} in several folders ({', '.join(folders)}), which "
                "may be configurations; name one of them, or each as a data set of its own (--data.sources)"
            )
    return {split: [*paths] for split, paths in files.items()}


def _matching(pattern: str, folder: str) -> list[str]:
    """Find the files in the folder whose paths fit the library's pattern. Hidden files and README.md are left out."""
    from datasets.data_files import resolve_pattern

    try:
        return resolve_pattern(pattern, glob.escape(folder))
    except FileNotFoundError:
        return []


def _check_packed(path: str) -> None:
    """Raise ValueError for a file that begins as compressed or broken ones do, and for one of OTHER_FILES."""
    with open(path, "rb") as file:
        beginning = file.read(40)
    for known, what in OTHER_FILES.items():
        if path.endswith(known) if isinstance(known, str) else beginning.startswith(known):
            raise ValueError(f"data file {path} {what}")
    if beginning.startswith(PACKED_OR_BROKEN):
        raise ValueError(f"data file {path} is compressed or broken: it begins with {beginning}; unpack it")


def _kind_of(path: str) -> str:
    """Return the kind that the file's name says, or `list` for a .json file with one list of all rows."""
    _check_packed(path)
    if path.endswith(".json"):
        with open(path, "rb") as file:
            lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
            first_line = next(filter(None, lines), b"")
        if first_line.startswith(b"["):
            return "list"
    return FILE_KINDS.get(Path(path).suffix, "json")


def _read_whole(source: Source, kind: str, files: Files) -> list[Row]:
    """Read files of a kind in READERS, and return the rows of the source's split."""
    for path in itertools.chain(*files.values()):
        _check_text(path)
    rows = {}
    for split, paths in files.items():
        rows_of_files = map(READERS[kind], paths)
        rows[split] = list(itertools.chain(*rows_of_files))
    return _part_of(rows, source)


def _part_of(rows: dict[str, list], source: Source) -> list:
    """Take what the source's expression of splits names, such as `train[:90%]+test`, from the rows of each split."""
    import datasets

    sizes = {split: len(rows_of_split) for split, rows_of_split in rows.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:  # the split is unknown, or no expression of splits
        raise ValueError(f"data set {source.text} could not be loaded: {error}") from error
    chosen = []
    for part in parts:
        chosen += rows[part.splitname][part.from_ : part.to]
    return chosen


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

    Raises ValueError for a header with two columns of one name, for a row with more or fewer cells than the header, and
    for a quote that does not end where its cell ends.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    rows = []
    line_before = 0  # the last one of the row before
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)  # else a quote without an end makes one cell of the rest of the file
        try:
            names = next(reader, [])
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{path}, line 1: the header is {names}; name each column, and no two alike")
            if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
                raise ValueError(
                    f"{path}, line 1: the header is {names[0]!r}, without a comma; write commas between cells"
                )
            line_before = reader.line_num
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, the header has {len(names)}; put cells "
                        'with commas or line breaks in "quotes"'
                    )
                if cells:  # no blank line
                    values = [cell or None for cell in cells]
                    rows.append(dict(zip(names, values, strict=True)))
                line_before = reader.line_num
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {line_before + 1}: a quote in this row does not end where its cell ends ({error}); put "
                'the whole cell in "quotes", and write "" for a quote within it'
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


def _check_text(path: str) -> None:
    """Raise ValueError, with the line, for a file that is not text in UTF-8."""
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


def _checksum(paths: Iterable[str]) -> str:
    """Return a checksum of each file's size, beginning and end, which takes no time however large files are."""
    checksum = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            beginning = file.read(CHECKED_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - CHECKED_BYTES))
            checksum.update(repr((size, beginning, file.read())).encode())
    return checksum.hexdigest()[:16]


def _load(source: Source, kind: str, files: Files) -> "datasets.Dataset":
    """Load these files, or the hub's data set if there are none, with `datasets.load_dataset`.

    Raises ValueError with one line and the way out.
    """
    import datasets  # takes a second to load

    if files:
        # escaped, because the library takes paths for patterns: rows[1].jsonl would be rows1.jsonl
        data_files = {split: [*map(glob.escape, paths)] for split, paths in files.items()}
        arguments = {"path": "text" if kind == "json" else kind, "data_files": data_files}
        # a name of the cache's: the library knows a file by its path and time, which another content may have too
        arguments["name"] = _checksum(itertools.chain(*files.values()))
    else:
        arguments = {"path": source.path, "name": source.name or None}
        if source.revision:
            arguments["revision"] = source.revision
    # Else each load is reported to the hub, also one of a local file, which takes seconds where there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error alone says what fails
    try:
        return datasets.load_dataset(split=source.split, **arguments)
    # OSError covers a data set that does not exist (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError), ValueError a wrong configuration or split, DatasetsError files that are refused.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if any(text in str(cause) for text in NO_ROWS):
            return datasets.Dataset.from_dict({})
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
