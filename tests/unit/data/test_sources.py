"""Where rows come from: files, functions and the hub, and what is said about those that are broken."""

import json
import os
import pathlib

import datasets
import pytest

from grpo.config import DataConfig, EvaluationConfig
from grpo.config.values import Source, parse_source
from grpo.data import sources
from grpo.data.sources import load_rows
from tests import ROOT, write_lines


def rows_of(path: object, split: str = "train") -> list[dict]:
    return list(load_rows(parse_source(str(path), "data.path", split=split)))


# ---- how a source is written


def test_a_source_in_one_text():
    for spec, parts in {
        "a/b": ("a/b", "", "", "train"),
        "a/b[main]@v1:train[:5%]+validation": ("a/b", "main", "v1", "train[:5%]+validation"),
        "configs/examples/toys.py:addition:test": ("configs/examples/toys.py:addition", "", "", "test"),
        "rows.jsonl:train[10:]": ("rows.jsonl", "", "", "train[10:]"),
    }.items():
        source = parse_source(spec, "data.path")
        assert (source.path, source.name, source.revision, source.split) == parts
        assert parse_source(source.text, "data.path") == source
    for spec in ("", "[main]", "a/b[main", "a/b]", ":train"):
        with pytest.raises(ValueError, match="data.path='.*' is no data set; write PATH"):
            parse_source(spec, "data.path")


def test_held_out_by_default_is_the_test_split_of_the_training_data():
    data = DataConfig(path="a/b[main]@v1")
    assert EvaluationConfig().held_out(data) == [Source("", "a/b", "main", "v1", "test")]
    sets = EvaluationConfig(path={"z": "a/b[main]", "w": "w.csv:train"}).held_out(data)
    assert sets == [Source("z", "a/b", "main", split="test"), Source("w", "w.csv")]


# ---- files

A1, A2, A3 = (b'{"a": 1}\n', b'{"a": 2}\n', b'{"a": 3}\n')
# files, what is asked for within their folder, and its rows: values that the library's own readers would change
READ = {
    "blank lines": ({"x.jsonl": b'{"a": 1}\n\n  \n{"a": "\xc3\xbc"}'}, "x.jsonl", [{"a": 1}, {"a": "ü"}]),
    "one list": ({"x.json": b'[{"a": 1}, {"a": [2]}]'}, "x.json", [{"a": 1}, {"a": [2]}]),
    "one list on many lines": ({"x.json": b'[\n {"a": 1},\n {"a": [2]}\n]'}, "x.json", [{"a": 1}, {"a": [2]}]),
    "a byte order mark": ({"a.jsonl": b"\xef\xbb\xbf" + A1}, "a.jsonl", [{"a": 1}]),
    "one before a list": ({"a.json": b'\xef\xbb\xbf[{"a": 1}]'}, "a.json", [{"a": 1}]),
    "one before CSV": ({"a.csv": b"\xef\xbb\xbfa\n1\n"}, "a.csv", [{"a": "1"}]),
    "cells of CSV": (
        {"a.csv": b'q,a\n"add 1, 2",007\nb,NA\n"two\nlines",\n'},
        "a.csv",
        [{"q": "add 1, 2", "a": "007"}, {"q": "b", "a": "NA"}, {"q": "two\nlines", "a": None}],
    ),
    "a cell as large as a book": ({"a.csv": b"a\n" + b"a b " * 50_000}, "a.csv", [{"a": "a b " * 50_000}]),
    "a part of a file": ({"a.jsonl": A1 + A2 + A3}, "a.jsonl:train[1:]", [{"a": 2}, {"a": 3}]),
    # names are not taken for patterns, which rows1 would match, and may look like parts or revisions
    "any name of a file": ({"rows[1]@a:b.jsonl": A1, "rows1@a:b.jsonl": A2}, "rows[1]@a:b.jsonl", [{"a": 1}]),
    "a file in any folder": (
        {"rows@v2/train.jsonl": A1 + A3, "rows/train.jsonl": A2},
        "rows@v2/train.jsonl:train[1:]",
        [{"a": 3}],
    ),
    "a part of any file": ({"m[1]:b.jsonl": A1 * 2, "m.jsonl": A2}, "m[1]:b.jsonl:train[:1]", [{"a": 1}]),
    "all of a pattern": (
        {"x/train-2.jsonl": A2, "x/train-1.jsonl": A1, "x/test.jsonl": A3},
        "x/train*.jsonl",
        [{"a": 1}, {"a": 2}],
    ),
    "a part of all lists": ({"a.json": b'[{"a": 1}]', "b.json": b'[{"a": 3}]'}, "?.json:train[-1:]", [{"a": 3}]),
}
# the same, and words of the refusal
REFUSED = {
    "an unknown split": ({"a.jsonl": A1}, "a.jsonl:validation", "a file has no splits; name the file alone, or"),
    "a folder": ({"x/train.jsonl": A1}, "x", r"not read as a whole; name files .* such as .*/x/train\*.jsonl"),
    "a missing file": ({}, "absent.csv", "data file /.*/absent.csv does not exist"),
    "a revision of a folder": ({"rows/a.jsonl": A1}, "rows@v2:train[:1]", "folder, which has no revisions.*; leave"),
    "a revision of a file": ({"a.jsonl": A1}, "a.jsonl@v2", "file, which has no revisions.*; leave"),
    "a configuration of a file": (
        {"a.jsonl": A1},
        "a.jsonl[main]:train",
        "file, which has .*no configurations.*; leave",
    ),
    "one of a function": ({"mine.py": b"def f(split): ..."}, "mine.py:f[main]", "function, .*no configurations"),
}


def asked_for(files: dict[str, bytes], what: str, folder: pathlib.Path) -> list[dict]:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return rows_of(folder / what)


@pytest.mark.parametrize("name", READ)
def test_files_are_read(name, tmp_path):
    files, what, rows = READ[name]
    assert asked_for(files, what, tmp_path) == rows


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name, tmp_path):
    files, what, word = REFUSED[name]
    with pytest.raises((ValueError, FileNotFoundError), match=word):
        asked_for(files, what, tmp_path)


def test_json_keeps_values_as_they_are(tmp_path):
    """Each of them is something else after the library's own reader of JSON, or stops it."""
    rows = [{"a": "2024-01-02"}, {"a": 12345678901234567890123}, {"a": "\ud800"}]
    rows += [{"b": {"c": 1}}, {"b": {"c": ["x"], "d": None}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert rows_of(path) == rows


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"a": {"b": i}} for i in range(10)]
    datasets.Dataset.from_list(rows).to_parquet("rows.parquet")
    assert rows_of("rows.parquet") == rows_of("r*.parquet") == rows
    assert rows_of("rows.parquet:train[:20%]") == rows_of("rows.parquet", "test[:2]") == rows[:2]


def test_reading_a_file_asks_no_network(tmp_path, monkeypatch):
    """Which would count the load, and takes seconds where names are not resolved."""
    requests = []
    monkeypatch.setattr(datasets.load, "get_session", lambda: requests.append("one, whose errors the library hides"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    assert asked_for({"rows.jsonl": A1}, "rows.jsonl", tmp_path) == [{"a": 1}]
    assert requests == []


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_file_with_other_rows_and_the_same_time_is_read_again(kind, tmp_path):
    """As in two images of one container, or after `cp -p`. The library knows its table by that time."""
    path = tmp_path / f"rows.{kind}"
    for text in ("old", "new"):
        getattr(datasets.Dataset.from_dict({"a": [text]}), f"to_{kind}")(path)
        os.utime(path, (1e9, 1e9))
        assert rows_of(path) == [{"a": text}]


# ---- a function


FUNCTIONS = """
import itertools

def endless(split):
    for number in itertools.count():
        yield {"question": f"{split} {number}"}

def finite(split):
    return [{"question": split}] * 3

def empty(split):
    return []

def breaks(split):
    yield {"question": "fine"}
    raise KeyError(split)

def odd(split):
    return [{"question": "fine"}, {"question": "fine"}, ["no dict"]]

def no_json(split):
    return [{"question": {1, 2}}]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return f"{tmp_path}/mine.py"


def test_a_function_gives_rows(mine):
    assert rows_of(f"{mine}:finite", "test") == [{"question": "test"}] * 3
    assert rows_of(f"{mine}:finite:train[:67%]") == [{"question": "train"}] * 2
    assert rows_of(f"{mine}:endless:train[1:3]") == [{"question": "train 1"}, {"question": "train 2"}]


def test_the_stream_of_the_page_is_read_as_far_as_needed_and_again_the_same(tmp_path, monkeypatch):
    """The rows of a stream are the same at each start, in its shuffled order."""
    monkeypatch.chdir(tmp_path)
    _, _, block = (ROOT / "docs/rows-from-functions.md").read_text().partition("## A stream")
    (tmp_path / "my_stream.py").write_text(block.split("```python\n")[1].split("```")[0])
    rows = [{"question": "long" * 1000 if n % 10 == 0 else f"What is {n}?", "answer": n} for n in range(3000)]
    write_lines(tmp_path / "large.jsonl", rows)
    answers = [row["answer"] for row in rows_of("my_stream.py:rows:train[:300]")]
    assert len(set(answers)) == 300 and not any(answer % 10 == 0 for answer in answers) and answers != sorted(answers)
    assert [row["answer"] for row in rows_of("my_stream.py:rows:train[100:300]")] == answers[100:]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("endless", r"gives 1,000 rows or more; name how many to take, as in .*mine.py:endless:train\[:10000\]"),
        ("empty", "has no rows"),
        ("breaks", "mine.py:breaks:train, row 2, line 16: KeyError: 'train'; correct the function"),
        ("odd", "mine.py:odd:train, row 3: .* is a list, not a dict"),
        ("no_json", "mine.py:no_json:train, row 1: .* not JSON serializable"),
        ("absent", "no function 'absent'; functions there: endless, finite"),
    ],
)
def test_a_function_without_usable_rows_is_refused(mine, name, reason, monkeypatch):
    monkeypatch.setattr(sources, "MAX_FUNCTION_ROWS", 1000)
    with pytest.raises(ValueError, match=reason):
        rows_of(f"{mine}:{name}")


def test_a_file_without_its_function_is_refused(mine):
    with pytest.raises(ValueError, match="write path/file.py:function"):
        rows_of(mine)


def test_the_source_names_a_checksum_of_the_rows(mine):
    first = load_rows(parse_source(f"{mine}:finite", "data.path")).source
    again = load_rows(parse_source(f"{mine}:finite", "data.path")).source
    other = load_rows(parse_source(f"{mine}:endless:train[:3]", "data.path")).source
    assert first == again and first.text.startswith(f"{mine}:finite@") and first.text.endswith(":train")
    assert first.revision != other.revision


# ---- the hub


@pytest.mark.parametrize(
    "error", [ConnectionError("Couldn't reach 'a/b' on the Hub"), ValueError("BuilderConfig 'x' not found")]
)
def test_a_hub_data_set_that_does_not_load_gives_one_error_with_the_way_out(monkeypatch, error):
    def fail(path, name, split, revision):
        assert (path, name, split, revision) == ("a/b", "x", "train", "v1")
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError) as caught:
        rows_of("a/b[x]@v1")
    assert str(caught.value).startswith(
        f"data set a/b[x]@v1:train could not be loaded: {type(error).__name__}: {error}; "
    )
    assert ".jsonl" in str(caught.value) and "\n" not in str(caught.value)
