"""Where rows come from: files, folders and the hub, and what is said about those that are broken."""

import json
import os
import pathlib
import re

import datasets
import pytest

from grpo.config import DataConfig, EvaluationConfig
from grpo.config.values import Source, parse_source
from grpo.data import sources
from grpo.data.sources import load_rows

ROOT = pathlib.Path(__file__).parents[3]


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
    for spec in ("", "[main]", "a/b[main", "a/b]", ":train", f"{ROOT}:"):
        with pytest.raises(ValueError, match="data.path='.*' is no data set; write PATH"):
            parse_source(spec, "data.path")


def test_a_file_or_folder_may_have_any_name(tmp_path):
    """And is not taken for a pattern, which rows1 would match."""
    for name in ("rows[1]@a:b", "rows1@a:b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"a": name}))
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"a": name}))
    for ending in ("", ".jsonl"):
        assert rows_of(tmp_path / f"rows[1]@a:b{ending}") == [{"a": "rows[1]@a:b"}]


def test_a_part_of_a_file_or_folder_of_any_name(tmp_path, monkeypatch):
    """A name up to its @ or [ may be a file or folder too, with other rows."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows@v2", "rows"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(f'{{"a": "{name}"}}\n' * 3)
    for name in ("more[1]:b.jsonl", "more.jsonl"):
        (tmp_path / name).write_text(f'{{"a": "{name}"}}\n' * 3)
    assert rows_of("rows@v2:train[:1]") == [{"a": "rows@v2"}]
    assert rows_of("rows:train[:1]") == [{"a": "rows"}]
    assert rows_of("rows@v2/train.jsonl:train[1:]") == [{"a": "rows@v2"}] * 2
    assert rows_of("more[1]:b.jsonl:train[:1]") == [{"a": "more[1]:b.jsonl"}]
    (tmp_path / "rows@v2" / "mine.py").write_text("def rows(split):\n    return [{'a': split}]\n")
    assert rows_of("rows@v2/mine.py:rows:test[:1]") == [{"a": "test"}]


def test_what_is_here_has_no_revision_and_a_file_no_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "mine.py").write_text("def rows(split):\n    return [{'a': split}]\n")
    for spec, what in {
        "rows@v2:train[:1]": "folder, which has no revisions",
        "rows.jsonl@v2": "file, which has no revisions",
        "rows.jsonl[main]:train": "file, which has no configurations",
        "mine.py:rows[main]": "function, which has no configurations",
    }.items():
        with pytest.raises(ValueError, match=f"a local {what}; leave"):
            parse_source(spec, "data.path")


def test_several_sources_and_sets():
    data = DataConfig(path={"x": "a/b[main]:train", "y": "y.jsonl"}, weights={"x": 3})
    assert data.all_sources == [Source("x", "a/b", "main", weight=3), Source("y", "y.jsonl")]
    sets = EvaluationConfig(path={"z": "a/b[main]", "w": "w.csv:train"}).held_out(data)
    assert sets == [Source("z", "a/b", "main", split="test"), Source("w", "w.csv")]


def test_held_out_by_default_is_the_test_split_of_the_training_data():
    data = DataConfig(path="a/b[main]@v1")
    assert EvaluationConfig().held_out(data) == [Source("", "a/b", "main", "v1", "test")]
    assert EvaluationConfig(path="c/d").held_out(data) == [Source("", "c/d", split="test")]
    with pytest.raises(ValueError, match="data.path has 1 data sets, .* set evaluation.path"):
        EvaluationConfig().held_out(DataConfig(path={"x": "x.jsonl"}))


# ---- files


def test_json_lines_skip_blank_lines_and_take_any_name(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_bytes(b'{"a": 1}\n\n  \n{"a": "\xc3\xbc"}')
    assert rows_of(path) == [{"a": 1}, {"a": "ü"}]


def test_json_keeps_values_as_they_are(tmp_path):
    """Each of them is something else after the library's own reader of JSON, or stops it."""
    rows = [{"a": "2024-01-02"}, {"a": 12345678901234567890123}, {"a": "\ud800"}]
    rows += [{"b": {"c": 1}}, {"b": {"c": ["x"], "d": None}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert rows_of(path) == rows


def test_json_may_be_one_list(tmp_path):
    for indent in (None, 2):
        (tmp_path / "train.json").write_text(json.dumps([{"a": 1}, {"a": [2]}], indent=indent))
        assert rows_of(tmp_path / "train.json") == [{"a": 1}, {"a": [2]}]
    (tmp_path / "test.json").write_text('[{"a": 3}]')
    assert rows_of(tmp_path, "test+train[:1]") == [{"a": 3}, {"a": 1}]
    with pytest.raises(ValueError, match=":more could not be loaded: Unknown split"):
        rows_of(tmp_path, "more")


def test_csv_cells_are_the_text_that_they_are(tmp_path):
    path = tmp_path / "rows.csv"
    book = "a b " * 50_000
    path.write_text(f'question,answer\n"add 1, 2",007\nb,NA\n"two\nlines",\n{book},1\n')
    assert rows_of(path) == [
        {"question": "add 1, 2", "answer": "007"},
        {"question": "b", "answer": "NA"},
        {"question": "two\nlines", "answer": None},
        {"question": book, "answer": "1"},
    ]


@pytest.mark.parametrize("name, text", [("a.jsonl", '{"a": "1"}\n'), ("a.json", '[{"a": "1"}]'), ("a.csv", "a\n1\n")])
def test_a_byte_order_mark_is_no_part_of_the_rows(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert rows_of(tmp_path / name) == [{"a": "1"}]


def test_parquet_and_parts_of_files(tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"a": {"b": i}} for i in range(10)]).to_parquet(str(path))
    assert rows_of(path) == [{"a": {"b": i}} for i in range(10)]
    assert rows_of(f"{path}:train[:20%]") == rows_of(path, "test[:2]") == [{"a": {"b": 0}}, {"a": {"b": 1}}]


def test_a_folder_has_splits_by_the_names_of_its_files(tmp_path):
    (tmp_path / "train-1.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "train-2.jsonl").write_text('{"a": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 3}\n')
    assert rows_of(tmp_path) == [{"a": 1}, {"a": 2}]
    assert rows_of(tmp_path, "test") == [{"a": 3}]
    assert rows_of(tmp_path, "test+train[:1]") == [{"a": 3}, {"a": 1}]
    with pytest.raises(ValueError, match="Unknown split .validation"):
        rows_of(tmp_path, "validation")


@pytest.mark.parametrize(
    "text",
    [
        b"---\nlicense: mit\ndataset_info:\n  features:\n  - name: answer\n    dtype: int64\n---\n# A card\n",
        b"---\nA line between rules\n---\n",
        b"Notes in Latin-1: \xfc\n",
    ],
)
def test_a_readme_that_names_no_files_changes_no_rows(text, tmp_path):
    """The library would make numbers of the cells."""
    (tmp_path / "README.md").write_bytes(text)
    (tmp_path / "train.csv").write_text("question,answer\nWhich code?,00712\n")
    assert rows_of(tmp_path) == [{"question": "Which code?", "answer": "00712"}]
    with pytest.raises(ValueError, match="a folder has configurations only if"):
        rows_of(f"{tmp_path}[main]")


def test_a_card_that_names_files_is_followed(tmp_path):
    configs = "configs:\n- config_name: main\n  data_files: b.jsonl\n- config_name: other\n  data_files: a.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{configs}---\n# A card\n")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"a": "{name}"}}\n')
    assert rows_of(f"{tmp_path}[main]") == [{"a": "b"}]
    assert rows_of(f"{tmp_path}[other]:train[:1]") == [{"a": "a"}]
    (tmp_path / "README.md").write_text("---\nconfigs: a: b\n---\n")
    with pytest.raises(ValueError, match="^.*README.md begins with front matter that is not YAML .*; correct it.*$"):
        rows_of(tmp_path)


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    """Nor does a split in the name of a backup, or of notes, decide about the data files."""
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / ".train.jsonl").write_text('{"a": 2}\n')
    assert rows_of(tmp_path) == [{"a": 1}] and "not read" not in capsys.readouterr().out
    (tmp_path / "train_notes.txt").write_text("train notes")
    (tmp_path / "train.jsonl.bak").write_text('{"a": 2}\n')
    assert rows_of(tmp_path) == [{"a": 1}]
    assert ".parquet: train.jsonl.bak, train_notes.txt\n" in capsys.readouterr().out
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_sft-00000-of-00001.jsonl").write_text('{"a": 3}\n')
    assert rows_of(tmp_path, "train_sft") == [{"a": 3}]
    assert "names have no split and others have one" in (told := capsys.readouterr().out) and "rows.jsonl" in told
    (tmp_path / "test.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes(20))
    with pytest.raises(ValueError, match="test.jsonl.gz is compressed or broken; unpack it"):
        rows_of(tmp_path, "train_sft")


def test_a_folder_of_save_to_disk_is_refused_with_what_writes_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = datasets.Dataset.from_list([{"a": 1}])
    table.save_to_disk("rows")
    datasets.DatasetDict(train=table).save_to_disk("splits")
    for name, saved in (("rows", "rows"), ("splits", "splits/train")):
        with pytest.raises(ValueError, match=f"load_from_disk\\('{saved}'\\).to_parquet"):
            rows_of(name)


def test_a_file_is_of_one_split_and_read_once(tmp_path):
    (tmp_path / "test_eval.jsonl").write_text('{"a": 1}\n')  # both words say test
    assert rows_of(tmp_path, "test") == [{"a": 1}]
    (tmp_path / "train_val.jsonl").write_text('{"a": 2}\n')
    with pytest.raises(ValueError, match="train_val.jsonl is of the splits train and validation by its name; rename"):
        rows_of(tmp_path)


def test_configurations_beside_each_other_are_not_read_as_one(tmp_path):
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(f'{{"a": "{name}"}}\n')
    with pytest.raises(ValueError, match=r"split train in several folders \(main, socratic\)"):
        rows_of(tmp_path)
    assert rows_of(tmp_path / "main") == [{"a": "main"}]


def test_a_folder_without_rows_or_with_several_kinds(tmp_path):
    with pytest.raises(ValueError, match="has no .jsonl, .json, .csv, .parquet file; give one with"):
        rows_of(tmp_path)
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"\(csv, json\).* one kind"):
        rows_of(tmp_path)


def test_reading_a_file_asks_no_network(tmp_path, monkeypatch):
    """Which would count the load, and takes seconds where names are not resolved."""
    monkeypatch.setattr(datasets.load, "get_session", lambda: pytest.fail("a request to the hub"))
    (tmp_path / "rows.csv").write_text("question,answer\na,1\n")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    assert rows_of(tmp_path / "rows.csv") == [{"question": "a", "answer": "1"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_with_other_rows_and_the_same_time_is_read_again(kind, tmp_path):
    """As in two images of one container, or after `cp -p`. The library knows its table by that time."""
    path = tmp_path / f"rows.{kind}"
    for text in ("old", "new"):
        table = datasets.Dataset.from_dict({"a": [text]})
        {"jsonl": table.to_json, "parquet": table.to_parquet}[kind](path)
        os.utime(path, (1e9, 1e9))
        assert rows_of(path) == [{"a": text}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_cache_that_cannot_be_written_is_named(name, tmp_path, monkeypatch):
    """As where several users share one."""
    (tmp_path / name).write_text('{"a": 1}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/shared/datasets")
    with pytest.raises(ValueError, match="cannot be written to /proc/shared/datasets .* set HF_DATASETS_CACHE to"):
        rows_of(tmp_path / name)


def test_a_missing_file_is_named_with_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"data file {tmp_path}/absent.csv does not exist"):
        rows_of("absent.csv")


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
    """The rows of a stream are the same at each start, in its shuffled order, and others if the stream has changed."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "configs" / "DATA.md").read_text()
    _, _, block = page.partition("**A stream.**")
    (tmp_path / "my_stream.py").write_text(block.split("```python\n")[1].split("```")[0])

    def write(rows):
        (tmp_path / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(part):
        table = load_rows(parse_source(f"my_stream.py:rows:train{part}", "data.path"))
        return table.source.revision, [row["answer"] for row in table]

    all_rows = [{"question": "long" * 1000 if n % 10 == 0 else f"What is {n}?", "answer": n} for n in range(3000)]
    write(all_rows)
    revision, answers = read("[:300]")
    assert len(set(answers)) == 300 and not any(answer % 10 == 0 for answer in answers) and answers != sorted(answers)
    assert read("[:300]") == (revision, answers) and read("[100:300]")[1] == answers[100:]
    write(all_rows[1000:])
    assert read("[:300]")[0] != revision


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
    # a dry run without network asks about memory so
    assert "--data.path configs/examples/toys.py:addition" in str(caught.value)


def test_a_table_with_mixed_types_in_a_nested_column_is_refused_in_one_line(monkeypatch):
    """The library's own error, as it reads the JSON of a hub data set whose types change after 10 MB."""
    import pyarrow

    def fail(path, name, split):
        try:
            pyarrow.array([{"truth": 1}, {"truth": "one"}])
        except pyarrow.ArrowInvalid as error:
            raise datasets.exceptions.DatasetGenerationError("An error occurred") from error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError) as caught:
        rows_of("a/b")
    message = str(caught.value)
    assert message.startswith("data set a/b:train could not be loaded: ArrowInvalid: Could not convert 'one'")
    assert re.search("text .*number.* make each column one type", message)
    assert "\n" not in message
