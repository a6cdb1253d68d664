"""The rows of a source: a file, a folder, the hub or a toy task, read by the library `datasets`.

Rows of JSON are read by it as lines of text and parsed one at a time. Its own reader of JSON was seen (4.7) to turn
texts that look like dates into dates, to stop at blank lines and at rows with different columns without saying where,
and to accept or refuse a mixture of types by where in the file it is. Rows that are read as they come: streaming.py.
"""

import csv
import json
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo.config.sources import KINDS, Source
from grpo.data.columns import Row
from grpo.text import one_line, shorten

if TYPE_CHECKING:
    import datasets


# Rows that are read together: one by one takes five times as long.
READ_ROWS = 1000
# The column of a file that is read as lines.
LINES = "text"
# What the library says of a split without rows.
NO_ROWS = "corresponds to no data"
# Of a library's message.
SHOWN_CHARACTERS = 400
# How files begin that are no text and no Parquet; the library would unpack some of them, and fail in as many ways.
OTHER_BEGINNINGS = {
    b"\x1f\x8b": "is compressed (gzip); unpack it",
    b"BZh": "is compressed (bzip2); unpack it",
    b"\xfd7zXZ": "is compressed (xz); unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd); unpack it",
    b"PK\x03\x04": "is an archive (zip); unpack it",
    b"\0": "begins with NUL bytes, as a file whose writing was broken off; write it again",
}
# A cell may be a whole book; the module csv takes 131,072 by default.
MOST_CELL_CHARACTERS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of a source, which stay on disk: a table of the library's, or lines of JSON as its only column."""

    table: "datasets.Dataset"
    where: str
    """The source, as messages name it."""
    is_json: bool = False

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.table), READ_ROWS):
            yield from self.rows_of(self.table[start : start + READ_ROWS], start)

    def rows_of(self, batch: dict[str, list], start: int) -> list[Row]:
        """The rows in a batch of the table that begins at place `start`. Blank lines are none.

        Raises ValueError for a line that is not a JSON object.
        """
        if not self.is_json:
            return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        lines = enumerate(batch[LINES], start=start + 1)
        return [_parse(text, f"{self.where}, line {number}") for number, text in lines if text.strip()]

    def narrowed(self, columns: Iterable[str]) -> "Rows":
        """Only these columns of a table: others may be large."""
        return replace(self, table=self.table.select_columns(list(dict.fromkeys(columns))))


def load_rows(source: Source) -> Rows:
    """All rows of a source, in its order.

    Raises:
        FileNotFoundError: the file does not exist; the message has its absolute path.
        ValueError: it cannot be read, a line is not a JSON object, or there are no rows; one line with the way out.
    """
    if source.kind == "toy":
        from grpo.data.toy import task_rows  # only toy runs need it

        rows = in_memory(task_rows(source.path.removeprefix("toy:"), source.split), source.path)
    elif found := files_of(source):
        rows = _read_files(source, *found)
    else:
        rows = Rows(load_from_hub(source), source.path)
    if len(rows.table) == 0:
        raise no_rows(source)
    return rows


def in_memory(rows: list[Row], where: str) -> Rows:
    """Rows that are a list of JSON objects."""
    import datasets

    return Rows(datasets.Dataset.from_dict({LINES: [json.dumps(row) for row in rows]}), where, is_json=True)


def no_rows(source: Source) -> ValueError:
    return ValueError(f"data set {source.path} (split {source.split!r}) has no rows; give one that has")


def files_of(source: Source) -> tuple[str, dict[str, list[str]]] | None:
    """What the files of a source hold (json, csv, parquet) and their paths by split, of a file or a folder.

    None for a data set of the hub, and a folder with the card of one, which says what its files are. Raises
    FileNotFoundError for a file that does not exist, ValueError for a folder of several kinds of files or of none, and
    for a file that begins as none of them does.
    """
    if source.is_file:
        path = pathlib.Path(source.path)
        if not path.is_file():
            raise FileNotFoundError(f"data file {path.absolute()} does not exist; correct the path or create it")
        _check_beginning(str(path))
        # A file has one split, which goes by the name that is asked for, so that `train[:90%]` takes a part of it.
        return source.kind, {source.split.partition("[")[0]: [str(path)]}
    if source.kind == "folder" and not (pathlib.Path(source.path) / "README.md").is_file():
        return _files_of_folder(source)
    return None


def _files_of_folder(source: Source) -> tuple[str, dict[str, list[str]]]:
    """The files of a folder, whose names say which split they are of (all train if none does)."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    folder = pathlib.Path(source.path).absolute()
    try:
        patterns = get_data_patterns(str(folder))
        found = DataFilesDict.from_patterns(patterns, base_path=str(folder), allowed_extensions=list(KINDS))
    except FileNotFoundError:
        found = {}
    files = {split: [str(file) for file in names] for split, names in found.items() if names}
    kinds = {KINDS[pathlib.Path(file).suffix] for names in files.values() for file in names}
    if len(kinds) != 1:
        there = f"files of several kinds ({', '.join(sorted(kinds))})" if kinds else f"no {', '.join(KINDS)} file"
        raise ValueError(f"data folder {folder} has {there}; give one with files of one kind, or a single file")
    for names in files.values():
        for file in names:
            _check_beginning(file)
    return kinds.pop(), files


def _check_beginning(path: str) -> None:
    with open(path, "rb") as file:
        beginning = file.read(max(map(len, OTHER_BEGINNINGS)))
    for other, what in OTHER_BEGINNINGS.items():
        if beginning.startswith(other):
            raise ValueError(f"data file {path} {what}")


def _read_files(source: Source, kind: str, files: dict[str, list[str]]) -> Rows:
    if kind == "json":
        return _read_json(source, files)
    options = [_csv_options(path) for paths in files.values() for path in paths][0] if kind == "csv" else {}
    return Rows(load(source, kind, data_files=files, **options), source.path)


def _read_json(source: Source, files: dict[str, list[str]]) -> Rows:
    paths = [path for names in files.values() for path in names]
    if not any(_beginning(path) for path in paths):
        raise no_rows(source)
    if are_lists(paths):
        return in_memory(_read_lists(source, files), source.path)
    try:
        lines = load(source, "text", data_files=files)
    except UnicodeDecodeError:
        for path in paths:
            _find_undecodable(path)
        raise
    where = source.path if len(paths) == 1 else f"{source.path} ({len(paths)} files, one after the other)"
    return Rows(lines, where if "[" not in source.split else f"{where}:{source.split}", is_json=True)


def are_lists(paths: Iterable[str]) -> bool:
    """Whether each file is one JSON list of all its rows, and not JSON lines."""
    return all(path.endswith(".json") and _beginning(path) == b"[" for path in paths)


def _beginning(path: str) -> bytes:
    """The first byte that is not blank; none of an empty file."""
    with open(path, "rb") as file:
        return next((line.strip()[:1] for line in file if line.strip()), b"")


def _read_lists(source: Source, files: dict[str, list[str]]) -> list[Row]:
    """Files that are one list of all rows each."""
    import datasets

    rows_of = {split: [row for path in paths for row in _read_list(path)] for split, paths in files.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute({s: len(r) for s, r in rows_of.items()})
    except (ValueError, AssertionError) as error:  # of a split that is not there, or that cannot be read
        raise ValueError(f"data set {source.path} (split {source.split!r}) could not be loaded: {error}") from error
    return [row for part in parts for row in rows_of[part.splitname][part.from_ : part.to]]


def _read_list(path: str) -> list[Row]:
    """A file that is one list of all rows, perhaps over many lines."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _find_undecodable(path)
        raise
    rows = _parse(text, path, list)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {number}: a {type(row).__name__}, not a JSON object; write objects only")
    return rows


def _parse(text: str, where: str, kind: type = dict) -> Any:
    try:
        return parse_json(text, kind)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; write one JSON object per line") from error


def parse_json(text: str, kind: type = dict) -> Any:
    """The value, of this kind; else ValueError, which says what it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or a number or nesting beyond all bounds
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__}, not a JSON object")
    return value


def _find_undecodable(path: str) -> None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); write UTF-8") from error


def _csv_options(path: str) -> dict[str, Any]:
    """All cells as the text that they are, so that 007 stays 007 and NA is a word; an empty one is missing.

    Raises ValueError for a row with more or fewer cells than the header, which pandas would shift or fill.
    """
    import datasets

    with open(path, encoding="utf-8-sig", newline="") as file:
        reader, limit = csv.reader(file), csv.field_size_limit(MOST_CELL_CHARACTERS)
        try:
            names = next(reader, [])
            for cells in reader:
                if any("\0" in cell for cell in cells):
                    raise ValueError(f"{path}, line {reader.line_num}: not CSV (NUL bytes); write UTF-8 and commas")
                if cells and len(cells) != len(names):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, the header has {len(names)}; put cells "
                        'with commas or line breaks in "quotes"'
                    )
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}, line {reader.line_num + 1}: not CSV ({error}); write UTF-8 and commas"
            ) from error
        finally:
            csv.field_size_limit(limit)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{path}, line 1: the header is {names}; name each column, and no two alike")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def reason_of(error: BaseException) -> str:
    """What a library raised, on one line."""
    return shorten(one_line(f"{type(error).__name__}: {error}"), SHOWN_CHARACTERS)


def load_from_hub(source: Source, **options: Any) -> "datasets.Dataset":
    """`load` of what is no file and no folder of files."""
    revision = {"revision": source.revision} if source.revision else {}
    return load(source, source.path, source.name or None, **revision, **options)


def load(source: Source, *arguments: Any, **options: Any) -> "datasets.Dataset":
    """`datasets.load_dataset`; raises ValueError with one line and the way out, UnicodeDecodeError for other bytes."""
    import datasets  # takes a second to load, and toy tasks do without

    said = {"name": source.name, "revision": source.revision, "split": source.split}
    what = f"data set {source.path} ({', '.join(f'{part} {value!r}' for part, value in said.items() if value)})"
    # Else each load is reported to the hub, also one of a local file, which takes seconds where there is no network
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is said once, by the error
    try:
        return datasets.load_dataset(*arguments, split=source.split, **options)
    # OSError covers a data set that is not there (FileNotFoundError) and a hub that cannot be reached
    # (ConnectionError), ValueError a wrong configuration or split, DatasetsError what its files are refused for.
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise cause from error
        if NO_ROWS in str(cause):
            raise no_rows(source) from error
        reason = reason_of(cause)
        way_out = (
            "check the spelling; for a local file, give a path ending in .jsonl, .json, .csv or .parquet; without "
            "network, load the data set where there is one and bring its cache (HF_HOME)"
        )
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            way_out = (
                "its rows are no table: a file is damaged, or a column has text in one row and a number in another; "
                "make each column one type, or write the rows as JSON lines"
            )
        raise ValueError(f"{what} could not be loaded: {reason}; {way_out}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
