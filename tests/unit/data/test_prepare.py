"""What is told and refused before a run about the lengths of rows, and mixtures of sources."""

import itertools
import json
import re

import pytest

from grpo.config import DataConfig, EvaluationConfig, GRPOConfig, SFTConfig, ValidationConfig
from grpo.data import encode
from grpo.data.chat import check_template
from grpo.data.prepare import (
    load_chat_sources,
    load_eval_prompts,
    load_sources,
    load_validation,
    reward_columns,
    usable_chats,
    usable_prompts,
    warn_of_repeated_rows,
)
from grpo.data.streams import ChatStream, PromptStream
from tests.unit.data.test_data import config_of, long_rows, word_tokenizer, write_rows


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def prepared(data: DataConfig, tokenizer, prompts_per_step=1):
    return usable_prompts(load_sources(data), GRPOConfig(data=data, prompts_per_step=prompts_per_step), tokenizer)


def test_next_to_nothing_left_is_refused_with_a_limit_that_helps(tokenizer, tmp_path):
    path = long_rows(tmp_path, [5, *range(10, 210)])
    with pytest.raises(ValueError, match="1 of 201 rows of .*: 200 longer than .*=9; .* 95% have at most 199; "):
        prepared(config_of(path, max_prompt_tokens=9), tokenizer)


def test_fewer_rows_left_than_a_step_needs_are_told(tokenizer, tmp_path, capsys):
    path = long_rows(tmp_path, [5, 6, 7, 20, 20, 20])
    for num_rows, is_told in ((3, False), (4, True)):
        prepared(config_of(path, max_prompt_tokens=9), tokenizer, num_rows)
        assert ("takes each of 3 several times" in capsys.readouterr().out) == is_told


def test_all_reasons_are_counted(tokenizer, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def f(row):\n    return {'prompt': row['question'], 'n': 1} if row['n'] < 8 else None\n"
    )
    rows = [{"question": "add", "n": n} for n in range(10)]
    rows[3]["question"], rows[4]["question"] = "", "add " * 50
    rows += [{"question": "add", "n": 9}] * 900  # what a function leaves out counts for no limit
    data = config_of(
        write_rows(tmp_path / "r.jsonl", rows), row=f"{tmp_path}/mine.py:f", bad_rows="skip", max_prompt_tokens=9
    )
    sources = load_sources(data)
    assert reward_columns(sources) == ["n"]
    (found,) = usable_prompts(sources, GRPOConfig(data=data, prompts_per_step=1), tokenizer)
    assert list(found.usable) == [0, 1, 2, 5, 6, 7]
    assert (
        f"left out: 902 left out by {tmp_path}/mine.py:f, 1 that cannot be used, 1 longer than data.max_prompt_tokens=9"
    ) in capsys.readouterr().out


# ---- mixtures


@pytest.fixture
def two_sources(tmp_path) -> dict:
    paths = {
        name: write_rows(
            tmp_path / f"{name}.jsonl",
            [{"question": f"add n{i}", "answer": f"{name}{i}", "completion": "yes"} for i in range(number)],
        )
        for name, number in (("a", 7), ("b", 3))
    }
    return {"path": "", "sources": paths, "weights": {"a": 0.7, "b": 0.3}}


def stream_of(data: DataConfig, tokenizer, seed=0, **fields) -> PromptStream:
    config = GRPOConfig(data=data, seed=seed, prompts_per_step=1, **fields)
    return PromptStream(usable_prompts(load_sources(data), config, tokenizer), config)


def test_sources_come_by_their_weights_each_through_epochs_of_its_own(tokenizer, two_sources, capsys):
    stream = stream_of(config_of(**two_sources, shuffle=False), tokenizer)
    prompts = stream.draw(20)
    assert "".join(p.source for p in prompts[:10]) == "abaaabaaba"
    assert [p.columns["answer"] for p in prompts if p.source == "b"] == ["b0", "b1", "b2"] * 2
    assert [p.row for p in prompts if p.source == "a"] == [*range(7)] * 2
    assert [p.index for p in prompts] == list(range(20))
    out = capsys.readouterr().out
    assert "an epoch is 10.0 steps" in out


def test_a_curriculum_draws_each_step_by_its_own_weights(tokenizer, two_sources):
    stream = stream_of(config_of(**two_sources, shuffle=False), tokenizer)
    owed = 0.0
    for step in range(50):
        share = step / 49
        stream.begin_step(step, {"a": 1 - share, "b": share})
        num_b = sum(p.source == "b" for p in stream.draw(4))
        owed += 4 * share - num_b
        assert abs(owed) < 1  # shares far below a row are owed until they make one
        assert num_b == {0: 0, 49: 4}.get(step, num_b)
    for weights in ({"c": 1}, {"a": 0, "b": 0}, {"a": -1}):
        with pytest.raises(ValueError, match="weights"):
            stream.set_weights(weights)


CURRICULUM = """
def by_rate(seen, step):
    return {0.0: 2.0, 0.5: 1.0, 1.0: 0.0}[seen.pass_rate]

def fresh_only(seen, step):
    return 0

def wrong_arguments(seen):
    return 1

def negative(seen, step):
    return -seen.pass_rate
"""


@pytest.fixture
def curriculum(tmp_path) -> str:
    (tmp_path / "rules.py").write_text(CURRICULUM)
    return f"{tmp_path}/rules.py"


def test_pass_rates_weigh_the_rows_and_the_sources_keep_their_shares(tokenizer, two_sources, curriculum):
    """Weights of the 7 rows of a: two of 2, two of 1, two of 0, and one that was not seen, which has 1."""
    stream = stream_of(config_of(**two_sources, curriculum=f"{curriculum}:by_rate"), tokenizer)
    for prompt in stream.draw(10):
        if prompt.source == "a" and prompt.row < 6:
            stream.remember(prompt, prompt.row // 2 / 2, step=1)
    stream.begin_step(2)
    prompts = stream.draw(10_000)
    assert sum(prompt.source == "a" for prompt in prompts) == 7_000
    counts = [sum(p.row == row and p.source == "a" for p in prompts) for row in range(7)]
    for row, weight in enumerate((2, 2, 1, 1, 0, 0, 1)):
        assert counts[row] == pytest.approx(1000 * weight, abs=60)  # 7000 * weight / 7, within 3 deviations
    assert len({prompt.index for prompt in prompts}) == 10_000


def test_rows_that_were_not_seen_come_first_and_then_all_alike(tokenizer, two_sources, curriculum, capsys):
    data = config_of(path=two_sources["sources"]["a"], curriculum=f"{curriculum}:fresh_only")
    stream = stream_of(data, tokenizer)
    for step in range(1, 8):
        stream.begin_step(step)
        (prompt,) = stream.draw(1)
        stream.remember(prompt, 0.5, step)
    (order,) = stream.orders.values()
    assert sorted(order.seen) == [*range(7)] and {seen.times for seen in order.seen.values()} == {1}
    assert "weight 0" not in capsys.readouterr().out
    stream.begin_step(8)
    assert "warning: step 8: data.curriculum gives every row" in capsys.readouterr().out
    assert {prompt.row for prompt in stream.draw(7)} == {*range(7)}


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_mixture_with_a_curriculum_resumes_exactly(tokenizer, two_sources, curriculum, num_steps):
    data = config_of(**two_sources, curriculum=f"{curriculum}:by_rate")
    stream, resumed = (stream_of(data, tokenizer, seed=3) for _ in range(2))
    resumed.draw(6)  # whatever it did before does not matter
    for step in range(1, num_steps + 1):
        stream.begin_step(step)
        for prompt in stream.draw(4):
            stream.remember(prompt, prompt.row % 3 / 2, step)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for one in (stream, resumed):
        one.begin_step(6)
    assert resumed.draw(50) == stream.draw(50)


def test_a_curriculum_that_cannot_be_used_is_refused(tokenizer, two_sources, curriculum):
    for name, told in (
        ("wrong_arguments", r"called as curriculum\(seen, step\)"),
        ("negative", r"returned -0.5 for Seen\(.*number of 0 or more"),
        ("missing", "no function 'missing'"),
    ):
        with pytest.raises(ValueError, match=told):
            stream_of(config_of(**two_sources, curriculum=f"{curriculum}:{name}"), tokenizer)


def test_sources_whose_own_columns_differ_are_refused(two_sources, tmp_path):
    (tmp_path / "mine.py").write_text("def f(row):\n    return {'prompt': 'p', row['answer'][0]: 1}\n")
    data = config_of(**two_sources, row=f"{tmp_path}/mine.py:f")
    with pytest.raises(ValueError, match="data.row gives the columns a for .*a.jsonl; b for .*b.jsonl; give the same"):
        reward_columns(load_sources(data))


# ---- what SFT learns


def sft_of(path: str, **fields) -> SFTConfig:
    return SFTConfig(data=config_of(path, shuffle=False), sequences_per_step=1, **{"max_sequence_tokens": 9} | fields)


def chats(config: SFTConfig, tokenizer) -> list[tuple[str, str]]:
    """The examples of an epoch and their labels as texts."""
    sources = usable_chats(load_chat_sources(config), config, tokenizer)
    examples = ChatStream(sources, config).draw(sum(len(rows.usable) for rows in sources))
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
    assert chats(sft_of(talks), tokenizer) == [
        ("<user> add <assistant> yes <eos>", "yes <eos>"),
        ("<user> add <assistant> yes <user> add <assistant> yes <eos>", "yes yes <eos>"),
    ]
    out = capsys.readouterr().out
    assert "data: 2 of 4 rows of" in out and "tokens 5 to 11, median 9" in out
    assert "left out: 1 without a token to learn, 1 longer than max_sequence_tokens=9" in out
    assert len(chats(sft_of(talks, train_on="all"), tokenizer)) == 3  # there, every token is one


def test_too_long_examples_are_cut_off_and_counted(tokenizer, talks, capsys):
    found = chats(sft_of(talks, too_long="truncate"), tokenizer)
    assert found[2] == ("<user> add <assistant> yes <user> add <assistant> n1 n2", "yes n1 n2")
    assert "left out: 1 without a token to learn; cut off: 1 longer than max_" in capsys.readouterr().out
    # of 7 tokens, the last answer's are all cut off
    found = chats(sft_of(talks, too_long="truncate", max_sequence_tokens=7, train_on="last"), tokenizer)
    assert found == [("<user> add <assistant> yes <eos>", "yes <eos>")]
    assert "left out: 3 without a token to learn" in capsys.readouterr().out


# ---- held-out examples


def test_held_out_examples_are_the_first_that_have_labels_and_fit(tokenizer, talks, ten_answers, capsys):
    sets = {"talks": talks, "answers": f"{ten_answers}:train[5:]"}
    config = sft_of(ten_answers, validation=ValidationConfig(interval=1, num_examples=3, path=sets))
    found = load_validation(config, tokenizer)
    texts = {name: [tokenizer.decode(example.ids) for example in examples] for name, examples in found.items()}
    assert texts["talks"] == [
        "<user> add <assistant> yes <eos>",
        "<user> add <assistant> yes <user> add <assistant> yes <eos>",
    ]
    assert texts["answers"] == [f"<user> add <assistant> n{i} <eos>" for i in (5, 6, 7)]
    out = capsys.readouterr().out
    assert "held out: 2 of 4 rows of talks (" in out and "held out: 3 of 5 rows of answers (" in out
    assert "left out: 1 without a token to learn, 1 longer than max_sequence_tokens=9" in out


def test_held_out_rows_that_cannot_be_read_are_named_by_their_field(tokenizer, ten_answers, tmp_path):
    """They may be the recipe's, whose path the user never saw."""
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"^validation\.path: .*missing\.jsonl"):
        load_validation(sft_of(ten_answers, validation=ValidationConfig(interval=1, path=missing)), tokenizer)
    with pytest.raises(ValueError, match=r"^evaluation\.path: .*missing\.jsonl"):
        load_eval_prompts(config_of(ten_answers), EvaluationConfig(interval=1, path=missing), tokenizer)


def test_held_out_rows_that_are_trained_on_under_another_name_are_counted(tokenizer, tmp_path, capsys):
    """n1 and n3 are in both files, and n3 is held out twice."""
    train = write_rows(tmp_path / "a.jsonl", [{"question": f"add n{i}", "answer": "1"} for i in (1, 2, 3, 4)])
    test = write_rows(tmp_path / "b.jsonl", [{"question": f"add n{i}", "answer": "2"} for i in (9, 3, 3, 8, 1)])
    data = config_of(train)
    rows = prepared(data, tokenizer)
    prompts = load_eval_prompts(data, EvaluationConfig(interval=1, path=test), tokenizer)
    capsys.readouterr()
    warn_of_repeated_rows("evaluation", [prompt.ids for prompt in prompts], rows)
    assert "warning: 3 of 5 held-out rows of evaluation are trained on too" in capsys.readouterr().out


STRICT = (
    "{% if messages[0].content == 'n1' %}{{ raise_exception('not this') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_the_template_refuses_of_held_out_rows_is_refused_or_left_out_as_in_training(tmp_path, capsys):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = STRICT
    rows = [{"question": f"n{i}", "answer": "1", "completion": "yes"} for i in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    held_out = {"interval": 1, "path": path}
    evaluation = EvaluationConfig(**held_out, num_prompts=2)
    validation = ValidationConfig(**held_out, num_examples=2)

    def load(bad_rows: str) -> list:
        data = config_of(path, bad_rows=bad_rows)
        examples = load_validation(SFTConfig(data=data, validation=validation), tokenizer)[""]
        assert [tokenizer.decode(example.ids) for example in examples] == [
            f"<user> n{i} <assistant> yes <eos>" for i in (0, 2)
        ]
        return [prompt.row for prompt in load_eval_prompts(data, evaluation, tokenizer)]

    told = "1 of 4 rows of .*rows.jsonl cannot be used: row 2: .* refuses .*TemplateError: not this"
    with pytest.raises(ValueError, match=f"{told}.*or leave them out with --data.bad-rows skip"):
        load("refuse")
    assert load("skip") == [0, 2]
    assert len(re.findall(f"warning: {told}", capsys.readouterr().out)) == 2


@pytest.fixture
def ten_answers(tmp_path) -> str:
    rows = [{"question": "add", "completion": f"n{i}"} for i in range(10)]
    return write_rows(tmp_path / "answers.jsonl", rows)


# ---- many rows


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


def test_a_template_that_takes_all_memory_for_one_row_is_refused_with_its_number(tmp_path):
    own = word_tokenizer()
    own.chat_template = "{{ messages[0].content }}{% if 'n1' in messages[0].content %}{{ 'a' * 2000000000 }}{% endif %}"
    check_template(own, config_of(""))
    rows = [{"question": f"add n{i}", "answer": "1"} for i in (0, 1, 2)]
    with pytest.raises(ValueError, match="row 2: the chat template of .* refuses it: MemoryError"):
        prepared(config_of(write_rows(tmp_path / "rows.jsonl", rows)), own)
