"""Sources that are streamed: the order by hand, exact resume, rows that are checked as they come."""

import json
import pathlib

import datasets
import pytest

from grpo.config import DataConfig, GRPOConfig, SFTConfig, ValidationConfig
from grpo.config.sources import parse_source
from grpo.data import streaming, streams
from grpo.data.prepare import load_chat_sources, load_sources, load_validation, usable_chats, usable_prompts
from grpo.data.streaming import RowStream
from grpo.data.streams import ChatStream, PromptStream
from tests.unit.test_data import word_tokenizer, write_rows


@pytest.fixture(autouse=True)
def windows(monkeypatch):
    """Small ones: three rows are shuffled together."""
    monkeypatch.setattr(streams, "SHUFFLED_ROWS", 3)


@pytest.fixture
def checks_two(monkeypatch):
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 2)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def rows_of(name: str, number: int) -> list[dict]:
    return [{"question": f"add n{i}", "answer": f"{name}{i}", "completion": "yes"} for i in range(number)]


@pytest.fixture
def two_sources(tmp_path) -> dict:
    """7 rows of JSON lines and a folder of two parquet files with 2 and 3, in the order b0 to b4."""
    (tmp_path / "b").mkdir()
    for part, rows in (("0", rows_of("b", 5)[:2]), ("1", rows_of("b", 5)[2:])):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b" / f"train-{part}.parquet")
    return {"a": write_rows(tmp_path / "a.jsonl", rows_of("a", 7)), "b": str(tmp_path / "b")}


def data_of(path="", **fields) -> DataConfig:
    return DataConfig(**{"path": path, "system_prompt": "", "streaming": True} | fields)


def prompts_of(data: DataConfig, tokenizer, seed=0) -> PromptStream:
    config = GRPOConfig(data=data, seed=seed, prompts_per_step=1)
    return PromptStream(usable_prompts(load_sources(data), config, tokenizer), config)


def chats_of(data: DataConfig, tokenizer, **fields) -> ChatStream:
    config = SFTConfig(data=data, **{"max_sequence_tokens": 20, "sequences_per_step": 1} | fields)
    return ChatStream(usable_chats(load_chat_sources(config), config, tokenizer), config)


def answers(prompts) -> list[str]:
    return [prompt.columns["answer"] for prompt in prompts]


# ---- order


def test_without_shuffling_rows_come_as_in_the_source(tokenizer, two_sources):
    for name, number in (("a", 7), ("b", 5)):
        prompts = prompts_of(data_of(two_sources[name], shuffle=False), tokenizer).draw(12)
        assert answers(prompts) == [f"{name}{i % number}" for i in range(12)]
        assert [prompt.row for prompt in prompts] == [i % number for i in range(12)]
        assert [prompt.index for prompt in prompts] == list(range(12))


def test_three_rows_at_a_time_are_shuffled_anew_in_each_epoch(tokenizer, two_sources, monkeypatch):
    rows = [p.row for p in prompts_of(data_of(two_sources["a"]), tokenizer).draw(70)]
    epochs = [rows[start : start + 7] for start in range(0, 70, 7)]
    for epoch in epochs:
        assert [sorted(epoch[:3]), sorted(epoch[3:6]), epoch[6:]] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len({tuple(epoch) for epoch in epochs}) > 5
    assert rows == [p.row for p in prompts_of(data_of(two_sources["a"]), tokenizer).draw(70)]
    assert rows != [p.row for p in prompts_of(data_of(two_sources["a"]), tokenizer, seed=1).draw(70)]
    monkeypatch.setattr(streams, "SHUFFLED_ROWS", 100)
    whole = [p.row for p in prompts_of(data_of(two_sources["a"]), tokenizer).draw(7)]
    assert sorted(whole) == list(range(7)) and {*whole[:3]} != {0, 1, 2}


# ---- exact resume


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_drawn", [0, 1, 4, 9, 12, 16])
def test_a_mixture_resumes_exactly_over_the_ends_of_epochs(tokenizer, two_sources, num_drawn, shuffle):
    """Of 12 + 12 draws, 16 are from 7 rows of JSON lines and 8 from 5 rows of parquet."""
    data = data_of(sources=two_sources, weights={"a": 2.0, "b": 1.0}, shuffle=shuffle)
    stream, resumed = (prompts_of(data, tokenizer, seed=3) for _ in range(2))
    stream.draw(num_drawn)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed.draw(5)  # whatever it did before does not matter
    resumed.load_state_dict(state)
    expected = stream.draw(24)
    assert resumed.draw(24) == expected and resumed.state_dict() == stream.state_dict()
    assert sorted({prompt.source for prompt in expected}) == ["a", "b"]
    chats, others = (chats_of(data, tokenizer, seed=3) for _ in range(2))
    chats.draw(num_drawn)
    others.load_state_dict(json.loads(json.dumps(chats.state_dict())))
    assert others.draw(24) == chats.draw(24)


def test_resuming_reads_no_file_before_that_of_the_place(tmp_path):
    files = [tmp_path / f"train-{part}.jsonl" for part in range(2)]
    for file, rows in zip(files, (rows_of("b", 5)[:2], rows_of("b", 5)[2:]), strict=True):
        write_rows(file, rows)
    source = parse_source(str(tmp_path), "data.path")
    stream = RowStream(source)
    stream.read(4)
    place = json.loads(json.dumps(stream.place))
    assert place["row"] == 4
    files[0].write_bytes(b"\xff\n")
    other = RowStream(source)
    other.seek(place)
    assert [(number, other.row(number)["answer"]) for number in other.read(9)] == [(4, "b4")]
    other.seek(None)
    with pytest.raises(ValueError, match=r":train could not be read after row 0: Unicode\w+: .*; correct the file or"):
        other.read(1)


def test_a_place_in_another_order_or_without_streaming_is_refused(tokenizer, two_sources):
    state = prompts_of(data_of(two_sources["a"]), tokenizer).state_dict()
    for name, saved, ours, fields in (
        ("window", 3, 1000, {"shuffle": False}),
        ("num_rows", None, 7, {"streaming": False}),
    ):
        with pytest.raises(ValueError, match=f"has {name}={saved}, this run has {ours}; resume"):
            prompts_of(data_of(two_sources["a"], **fields), tokenizer).load_state_dict(state)


# ---- rows as they come


@pytest.fixture
def odd_rows(tmp_path) -> str:
    """Of 8 rows, the first 2 and last 2 are in order; a broken line, one too long, no text, another kind of answer."""
    rows = [json.dumps(row) for row in rows_of("a", 8)]
    rows[2] = '{"question": '
    rows[3] = json.dumps({"question": "add " * 30, "answer": "a3", "completion": "yes"})
    rows[4] = json.dumps({"question": "  ", "answer": "a4", "completion": "yes"})
    rows[5] = json.dumps({"question": "add n5", "answer": 5, "completion": "yes"})
    (tmp_path / "odd.jsonl").write_text("\n\n".join(rows) + "\n")
    return str(tmp_path / "odd.jsonl")


def test_skipped_rows_are_counted_and_the_first_is_told(tokenizer, odd_rows, capsys, checks_two):
    data = data_of(odd_rows, shuffle=False, bad_rows="skip", max_prompt_tokens=20)
    stream = prompts_of(data, tokenizer)
    out = capsys.readouterr().out
    assert f"data: 2 of 2 rows of {odd_rows}:train; others are looked at as they come; tokens 4 to 4, median 4" in out
    assert answers(stream.draw(4)) == ["a0", "a1", "a6", "a7"]
    counted = {"data/bad_rows": 3, "data/too_long": 1, "data/unlabelled": 0}
    assert stream.metrics() == counted
    assert [line for line in capsys.readouterr().out.splitlines() if "warning" in line] == [
        f"warning: row 3 of {odd_rows}:train cannot be used: not JSON (Expecting value: line 1 column 14 (char 13)); "
        "it is left out, and so are others, which data/bad_rows counts"
    ]
    resumed = prompts_of(data, tokenizer)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.metrics() == counted
    assert answers(resumed.draw(3)) == ["a0", "a1", "a6"] and resumed.metrics()["data/bad_rows"] == 6


def test_refused_rows_end_the_run_with_their_number(tokenizer, odd_rows, checks_two, monkeypatch):
    stream = prompts_of(data_of(odd_rows, shuffle=False, max_prompt_tokens=20), tokenizer)
    stream.draw(2)
    with pytest.raises(
        ValueError, match="row 3 of .*odd.jsonl:train cannot be used: not JSON .*skip, and go on with --resume"
    ):
        stream.draw(1)
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 3)
    with pytest.raises(ValueError, match=r"odd.jsonl, row 3: not JSON \(.*\); write one JSON object per line"):
        prompts_of(data_of(odd_rows), tokenizer)


def test_rows_of_another_kind_than_the_first_are_refused(tokenizer, tmp_path, checks_two):
    rows = rows_of("a", 2) + [{"question": "add n1", "answer": 7}]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), shuffle=False)
    expected = "row 3 of .* cannot be used: its columns are answer .number., .*, and in the first rows answer .str., q"
    with pytest.raises(ValueError, match=expected):
        prompts_of(data, tokenizer).draw(3)


def test_sft_passes_over_what_has_no_label_and_cuts_off_what_is_too_long(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 1)
    user, yes = {"role": "user", "content": "add"}, {"role": "assistant", "content": "yes"}
    talks = [[user, yes], [user], [user, yes] * 4, [user, yes]]  # 5, 3 and 17 tokens
    path = write_rows(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    data = data_of(path, shuffle=False)
    stream = chats_of(data, tokenizer, max_sequence_tokens=9)
    assert [len(example.ids) for example in stream.draw(3)] == [5, 5, 5]
    assert stream.metrics() == {"data/bad_rows": 0, "data/too_long": 1, "data/unlabelled": 1}
    cut = chats_of(data, tokenizer, max_sequence_tokens=9, too_long="truncate").draw(3)
    assert [(len(example.ids), example.truncated) for example in cut] == [(5, False), (9, True), (5, False)]


def test_an_epoch_with_nothing_to_draw_is_an_error(tokenizer, tmp_path):
    """The first rows were in order; then the file changes."""
    path = write_rows(tmp_path / "a.jsonl", rows_of("a", 4))
    stream = prompts_of(data_of(path, bad_rows="skip"), tokenizer)
    stream.draw(4)
    write_rows(tmp_path / "a.jsonl", [{"other": 1}] * 4)
    with pytest.raises(ValueError, match="no row of epoch 2 of .* can be used; bring other rows"):
        stream.draw(1)


# ---- held-out rows, and what cannot be streamed


def test_held_out_rows_are_the_first_and_parts_of_a_split_are_read_whole(tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(streaming, "CHECKED_ROWS", 4)
    path = write_rows(tmp_path / "a.jsonl", rows_of("a", 9))
    for split, seen, used in (("test", 4, 3), ("test[2:]", 7, 3)):
        validation = ValidationConfig(interval=1, path=f"{path}:{split}", num_examples=3)
        config = SFTConfig(data=data_of(path), validation=validation, max_sequence_tokens=20)
        assert len(load_validation(config, tokenizer)[""]) == used
        assert f"held out: {used} of {seen} rows of {path}:{split}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("toy:addition", "it is made in memory"),
        ("a.jsonl:train[:90%]", r"train\[:90%\] is not one whole split"),
        ("table.csv", "a file of kind csv is read whole; write JSON lines or parquet"),
        ("list.json", "a file of kind list is read whole; write JSON lines or parquet"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tokenizer, tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", rows_of("a", 2))
    pathlib.Path("table.csv").write_text("question,answer\nadd,1\n")
    pathlib.Path("list.json").write_text(json.dumps(rows_of("a", 2)))
    with pytest.raises(ValueError, match=f"cannot be streamed: {why}; or turn it off with --data.no-streaming"):
        prompts_of(data_of(path), tokenizer)


def test_an_empty_stream_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="has no rows; give one that has"):
        prompts_of(data_of(str(tmp_path / "a.jsonl")), tokenizer)
