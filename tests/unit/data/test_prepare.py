"""Which rows are used, for training and held out, what is said of the others, and what is refused before a run."""

import itertools
import re

import pytest

from grpo.config import EvaluationConfig, ValidationConfig
from grpo.data import encode
from grpo.data.encode import Encoder
from grpo.data.prepare import (
    encode_sources,
    first_columns,
    load_chat_sources,
    load_eval_prompts,
    load_sources,
    load_validation,
    warn_of_repeated_rows,
)
from grpo.data.streams import ChatStream
from tests.unit.data.test_data import (
    config_of,
    encoder_of,
    prepared,
    prompts_of,
    word_tokenizer,
    write_rows,
)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def long_rows(tmp_path, lengths: list[int], name: str = "long") -> str:
    """One row per length, in tokens of its whole prompt (<user> and <assistant> are two of them)."""
    rows = [{"question": " ".join(["add"] * (n - 2)), "answer": str(n)} for n in lengths]
    return write_rows(tmp_path / f"{name}.jsonl", rows)


# ---- Prompts


def test_prompts_that_are_too_long_are_never_drawn_and_counted_at_the_start(tokenizer, tmp_path, capsys):
    path = long_rows(tmp_path, [4, 9, 5, 8, 6])
    stream = prompts_of(config_of(path, max_prompt_tokens=6, shuffle=False), tokenizer)
    (line,) = capsys.readouterr().out.splitlines()
    prompts = stream.draw(8)
    assert [p.columns["answer"] for p in prompts] == ["4", "5", "6", "4", "5", "6", "4", "5"]
    assert [p.index for p in prompts] == list(range(8))
    told = "warning: data: 3 of 5 rows of .*; tokens 4 to 9, median 6, 95% have at most 9; "
    assert re.search(f"{told}left out: 2 longer than data.max_prompt_tokens=6", line)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([9, 8, 12], "0 of 3 rows of .*long.jsonl are left: 3 longer than data.max_prompt_tokens=6; .* at most 12; "),
        ([5, *range(10, 210)], "1 of 201 rows of .*: 200 longer than .*=6; .* 95% have at most 199; "),
    ],
)
def test_nothing_or_next_to_nothing_left_is_refused_with_a_limit_that_helps(tokenizer, tmp_path, lengths, message):
    data = config_of(long_rows(tmp_path, lengths), max_prompt_tokens=6)
    with pytest.raises(ValueError, match=message):
        prepared(data, tokenizer)
    with pytest.raises(ValueError, match=message):
        load_eval_prompts(EvaluationConfig(path=data.path, num_prompts=2), encoder_of(data, tokenizer))


def test_all_reasons_are_counted(tokenizer, tmp_path, capsys):
    own = tmp_path / "mine.py"
    own.write_text("def f(row):\n    return {'prompt': row['question'], 'n': 1} if row['n'] < 8 else None\n")
    rows = [{"question": "add", "n": n} for n in range(10)]
    rows[3]["question"], rows[4]["question"] = "", "add " * 50
    rows += [{"question": "add", "n": 9}] * 900  # what a function leaves out counts for no limit
    path = write_rows(tmp_path / "r.jsonl", rows)
    data = config_of(path, row=f"{own}:f", bad_rows="skip", max_prompt_tokens=9)
    assert [list(columns) for columns in first_columns(load_sources(data))] == [["n"]]
    (found,) = prepared(data, tokenizer)
    assert list(found.usable) == [0, 1, 2, 5, 6, 7]
    told = capsys.readouterr().out
    assert f"left out: 902 left out by {own}:f, 1 that cannot be used, 1 longer than data.max_prompt_tokens=9" in told
    assert "5 of them have the tokens of an earlier one" in told


def test_sources_whose_own_columns_differ_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def f(row):\n    return {'prompt': 'p', row['answer'][0]: 1}\n")
    sources = {name: write_rows(tmp_path / f"{name}.jsonl", [{"question": "p", "answer": name}]) for name in "ab"}
    data = config_of(sources, row=f"{tmp_path}/mine.py:f")
    with pytest.raises(ValueError, match=r"data.row gives .*a.jsonl': \['a'\], .*b.jsonl': \['b'\]}; give"):
        first_columns(load_sources(data))


# ---- What SFT learns


def chat_encoder(tokenizer, path: str, max_tokens=9, train_on="assistant", **options) -> Encoder:
    data = config_of(path, shuffle=False, bad_rows=options.pop("bad_rows", "refuse"))
    return Encoder(tokenizer, data, max_tokens, train_on, completion_column="completion", **options)


def chats(encoder: Encoder) -> list[tuple[str, str]]:
    """The examples of an epoch and their labels as texts."""
    tokenizer = encoder.tokenizer
    sources = encode_sources(load_chat_sources(encoder.data, "auto", "completion"), encoder)
    examples = ChatStream(sources, encoder.data, 0).draw(sum(len(rows.usable) for rows in sources))
    pairs = []
    for example in examples:
        labels = [*itertools.compress(example.ids, example.mask)]
        pairs.append((tokenizer.decode(example.ids), tokenizer.decode(labels)))
    return pairs


@pytest.fixture
def talks(tmp_path) -> str:
    """Chats of 5, 9 and 11 tokens (EOS included), and one without an assistant turn."""
    user, yes = {"role": "user", "content": "add"}, {"role": "assistant", "content": "yes"}
    answer = {"role": "assistant", "content": "n1 n2 n3"}
    talks = [[user, yes], [user, yes, user, yes], [user], [user, yes, user, answer]]
    return write_rows(tmp_path / "talks.jsonl", [{"messages": messages} for messages in talks])


def test_an_example_without_a_label_is_counted(tokenizer, talks, capsys):
    assert chats(chat_encoder(tokenizer, talks)) == [
        ("<user> add <assistant> yes <eos>", "yes <eos>"),
        ("<user> add <assistant> yes <user> add <assistant> yes <eos>", "yes yes <eos>"),
    ]
    out = capsys.readouterr().out
    assert "data: 2 of 4 rows of" in out and "tokens 5 to 11, median 9" in out
    assert "left out: 1 without a token to learn, 1 longer than max_sequence_tokens=9" in out
    assert len(chats(chat_encoder(tokenizer, talks, train_on="all"))) == 3  # there, every token is one


def test_too_long_examples_are_cut_off_and_counted(tokenizer, talks, capsys):
    found = chats(chat_encoder(tokenizer, talks, truncates=True))
    assert found[2] == ("<user> add <assistant> yes <user> add <assistant> n1 n2", "yes n1 n2")
    assert "left out: 1 without a token to learn; cut off: 1 longer than max_" in capsys.readouterr().out
    # of 7 tokens, the last answer's are all cut off
    found = chats(chat_encoder(tokenizer, talks, 7, "last", truncates=True))
    assert found == [("<user> add <assistant> yes <eos>", "yes <eos>")]
    assert "left out: 3 without a token to learn" in capsys.readouterr().out


# ---- What is held out


def test_held_out_rows_are_the_first_that_can_be_used(tokenizer, talks, tmp_path, capsys):
    answers = write_rows(tmp_path / "a.jsonl", [{"question": "add", "completion": f"n{i}"} for i in range(10)])
    sets = {"talks": talks, "answers": f"{answers}:train[5:]"}
    validation = ValidationConfig(interval=1, num_examples=3, path=sets)
    found = load_validation(validation, chat_encoder(tokenizer, answers))
    texts = {name: [tokenizer.decode(example.ids) for example in examples] for name, examples in found.items()}
    assert texts["talks"] == [
        "<user> add <assistant> yes <eos>",
        "<user> add <assistant> yes <user> add <assistant> yes <eos>",
    ]
    assert texts["answers"] == [f"<user> add <assistant> n{i} <eos>" for i in (5, 6, 7)]
    out = capsys.readouterr().out
    assert "held out: 2 of 4 rows of talks (" in out and "held out: 3 of 5 rows of answers (" in out

    data = config_of(answers, max_prompt_tokens=6)
    evaluation = EvaluationConfig(path=long_rows(tmp_path, [4, 9, 5, 6]), num_prompts=2)
    prompts = load_eval_prompts(evaluation, encoder_of(data, tokenizer))
    assert [(p.index, p.row, p.columns["answer"]) for p in prompts] == [(0, 0, "4"), (1, 2, "5")]


def test_held_out_rows_that_cannot_be_read_are_named_by_their_field(tokenizer, talks, tmp_path):
    """They may be the recipe's, whose path the user never saw."""
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"^validation\.path: .*missing\.jsonl"):
        load_validation(ValidationConfig(interval=1, path=missing), chat_encoder(tokenizer, talks))
    with pytest.raises(ValueError, match=r"^evaluation\.path: .*missing\.jsonl"):
        load_eval_prompts(EvaluationConfig(interval=1, path=missing), encoder_of(config_of(talks), tokenizer))


def test_held_out_rows_that_are_trained_on_under_another_name_are_counted(tokenizer, tmp_path, capsys):
    """n1 and n3 are in both files, and n3 is held out twice."""
    train, test = (
        write_rows(tmp_path / f"{name}.jsonl", [{"question": f"add n{i}", "answer": name} for i in numbers])
        for name, numbers in {"a": (1, 2, 3, 4), "b": (9, 3, 3, 8, 1)}.items()
    )
    data = config_of(train)
    rows = prepared(data, tokenizer)
    prompts = load_eval_prompts(EvaluationConfig(interval=1, path=test), encoder_of(data, tokenizer))
    capsys.readouterr()
    warn_of_repeated_rows("evaluation", [prompt.ids for prompt in prompts], rows)
    assert "warning: 3 of 5 held-out rows of evaluation are trained on too" in capsys.readouterr().out


# ---- Many rows


def test_processes_and_a_second_start_give_the_same_rows(tokenizer, tmp_path, monkeypatch):
    rows = [{"question": f"add n{i % 20}" if i % 9 else "", "answer": str(i)} for i in range(700)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = config_of(path, bad_rows="skip")
    monkeypatch.setattr(encode, "ROWS_PER_PROCESS", 300)
    monkeypatch.setattr(encode.os, "sched_getaffinity", lambda _: {0, 1})
    (by_two,) = prepared(data, tokenizer)
    assert len(by_two.table.cache_files) == 2
    monkeypatch.setattr(encode.Encoder, "encode", lambda *_: pytest.fail("encoded again"))
    (again,) = prepared(data, tokenizer)  # from the cache
    monkeypatch.undo()
    copy = write_rows(tmp_path / "copy.jsonl", rows)
    (alone,) = prepared(config_of(copy, bad_rows="skip"), tokenizer)
    assert by_two.table[:] == again.table[:] == alone.table[:]
    assert by_two.usable == alone.usable == [i for i in range(700) if i % 9]
