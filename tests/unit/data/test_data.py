"""Data: reading rows, chat tokens, and streams that resume exactly."""

import json
import pathlib
import random
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo.config import DataConfig, EvaluationConfig, GRPOConfig
from grpo.data.chat import load_tokenizer
from grpo.data.prepare import load_eval_prompts, load_sources, usable_prompts
from grpo.data.streams import PromptStream
from grpo.data.turns import tokenize, write_prompt
from grpo.folder.was_read import WasRead
from grpo.run.saved import Saved, resume_data

# One token per word; the template writes "<role> content .." and, for the generation prompt, "<assistant>".
WORDS = ["<unk>", "<eos>", "<system>", "<user>", "<assistant>", "<nothink>", "Be", "brief", "add", "yes"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is false %} <nothink>{% endif %}"
    "{% if level is defined %}{% for i in range(level) %} yes{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(WORDS + [f"n{i}" for i in range(20)])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE, name_or_path="tiny"
    )


def ids_of(text: str) -> list[int]:
    words = WORDS + [f"n{i}" for i in range(20)]
    return [words.index(word) for word in text.split()]


def write_rows(path: pathlib.Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def ten_rows(tmp_path) -> str:
    rows = [{"question": f"add n{i}", "answer": str(i), "completion": f"yes n{i}", "extra": i} for i in range(10)]
    return write_rows(tmp_path / "rows.jsonl", rows)


def config_of(path: str, **changes) -> DataConfig:
    return DataConfig(**{"path": path, "system_prompt": ""} | changes)


# ---- tokens


def encode_prompt(tokenizer, data: DataConfig, prompt: str | list[dict]) -> list[int]:
    ((ids, _),) = tokenize(tokenizer, [write_prompt(tokenizer, data, prompt)])
    return ids


def test_a_prompt_is_system_user_and_opening(tokenizer):
    ids = encode_prompt(tokenizer, config_of("", system_prompt="Be brief"), "add n1")
    assert ids == ids_of("<system> Be brief <user> add n1 <assistant>")
    assert encode_prompt(tokenizer, config_of(""), "add n1") == ids_of("<user> add n1 <assistant>")


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [({"enable_thinking": False}, " <nothink>"), ({"enable_thinking": True}, ""), ({"level": 2}, " yes yes")],
)
def test_the_template_gets_its_arguments(tokenizer, kwargs, end):
    ids = encode_prompt(tokenizer, config_of("", chat_template_kwargs=kwargs), "add n1")
    assert ids == ids_of("<user> add n1 <assistant>" + end)


def test_a_tokenizer_without_template_or_eos_is_refused(tokenizer, tmp_path):
    backend = tokenizer.backend_tokenizer
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(str(tmp_path / "good")).chat_template == TEMPLATE
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="plain has no chat template"):
        load_tokenizer(str(tmp_path / "plain"))
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE).save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="tokenizer of .*endless has no EOS token"):
        load_tokenizer(str(tmp_path / "endless"))


# ---- prompt stream


def prompts_of(data: DataConfig, tokenizer, seed=0, **fields) -> PromptStream:
    config = GRPOConfig(data=data, seed=seed, **{"prompts_per_step": 1} | fields)
    return PromptStream(usable_prompts(load_sources(data), config, tokenizer), config)


def test_prompts_have_ids_columns_and_a_running_index(tokenizer, ten_rows):
    prompts = prompts_of(config_of(ten_rows, shuffle=False), tokenizer, seed=0).draw(12)
    assert [prompt.index for prompt in prompts] == list(range(12))
    assert prompts[3].ids == ids_of("<user> add n3 <assistant>")
    assert prompts[3].columns == {"question": "add n3", "answer": "3"}
    assert prompts[10].columns["answer"] == "0"  # the second epoch, in file order again
    assert [prompt.row for prompt in prompts] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_each_epoch_is_a_new_permutation_from_the_seed(tokenizer, ten_rows):
    def answers(seed):
        return [p.columns["answer"] for p in prompts_of(config_of(ten_rows), tokenizer, seed).draw(20)]

    state = random.getstate()
    first, by_hand = answers(seed=1), [str(i) for i in range(10)]
    assert random.getstate() == state
    random.Random("1 0").shuffle(by_hand)  # seed and epoch
    assert first[:10] == by_hand
    assert sorted(first[:10]) == sorted(first[10:]) == [str(i) for i in range(10)]
    assert first[:10] != first[10:]
    assert first == answers(seed=1)
    assert first != answers(seed=2)


def test_a_filter_passes_over_prompts_and_others_come_in_their_place(tokenizer, ten_rows):
    """No number of a prompt comes twice, and a filter that leaves none is told from one that leaves few."""
    stream = prompts_of(config_of(ten_rows, shuffle=False), tokenizer, seed=0)
    stream.keep_prompt = lambda prompt: prompt.columns["answer"] in ("3", "8")
    prompts = stream.draw(3)
    assert [(prompt.row, prompt.index) for prompt in prompts] == [(3, 3), (8, 8), (3, 13)]
    stream.keep_prompt = lambda prompt: False
    with pytest.raises(ValueError, match="keep_prompt refuses 10 of 10 rows;"):
        stream.draw(1)


@pytest.mark.parametrize("seed", range(2))
def test_a_filter_may_leave_one_row(tokenizer, ten_rows, seed):
    """Between two draws of it lie up to 18 other rows, nearly two epochs."""
    stream = prompts_of(config_of(ten_rows), tokenizer, seed)
    stream.keep_prompt = lambda prompt: prompt.row == 3
    assert rows_of(stream.draw(20)) == [3] * 20
    stream.orders[""].chances = {3: 0.0}  # as a curriculum does
    with pytest.raises(ValueError, match="keep_prompt refuses 9 of 10 rows, and data.curriculum gives the other 1 "):
        stream.draw(1)


@pytest.mark.parametrize("num_drawn", [0, 7])
def test_a_resumed_stream_continues_the_same_way(tokenizer, ten_rows, num_drawn):
    stream = prompts_of(config_of(ten_rows), tokenizer, seed=3)
    stream.draw(num_drawn)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.draw(9)  # from 7: across the end of the first epoch
    resumed = prompts_of(config_of(ten_rows), tokenizer, seed=3)
    resumed.draw(2)  # whatever it did before does not matter
    resumed.load_state_dict(state)
    assert resumed.draw(9) == expected
    assert resumed.state_dict() == stream.state_dict()
    assert expected[0].index == num_drawn


def test_a_state_of_another_version_is_refused_by_name(tokenizer, ten_rows):
    for change in ({"owed": {}, "more": 7}, {"sources": {}}):
        with pytest.raises(ValueError, match="lacking|unknown.*another version"):
            prompts_of(config_of(ten_rows), tokenizer).load_state_dict(change)


def test_other_rows_are_refused_or_begin_again(tokenizer, ten_rows, capsys):
    """Fewer rows, another order, an edited one: under the same path, so that no field of the config differs."""
    rows = pathlib.Path(ten_rows).read_text().splitlines(keepends=True)

    def started(state: dict, **changes: bool) -> tuple[list[int], dict]:
        config = GRPOConfig(data=config_of(ten_rows), **changes)
        read = WasRead(config, state)
        stream = prompts_of(config.data, tokenizer, seed=0)
        resume_data(Saved(None, state, read), stream)
        drawn = [prompt.row for prompt in stream.draw(3)]
        return drawn, {"step": 1, "data": stream.state_dict(), "read": read.parts}

    first, saved = started({})
    second, _ = started(saved)
    assert not {*first} & {*second}
    for content in (rows[:4], rows[::-1], [rows[0].replace("0", "7"), *rows[1:]]):
        pathlib.Path(ten_rows).write_text("".join(content))
        found = f"the rows: 10 of .*, checksum .* -> {len(content)} of .*, checksum .*--allow-changes"
        with pytest.raises(ValueError, match=found):
            started(saved)
        capsys.readouterr()
        assert started(saved, allow_changes=True)[0] == started({})[0]
        assert "the data begin again\n" in capsys.readouterr().out


def long_rows(tmp_path, lengths: list[int]) -> str:
    """One row per length, in tokens of its whole prompt (<user> and <assistant> are two of them)."""
    rows = [{"question": " ".join(["add"] * (n - 2)), "answer": str(n)} for n in lengths]
    return write_rows(tmp_path / "long.jsonl", rows)


def test_prompts_that_are_too_long_are_never_drawn_and_counted_at_the_start(tokenizer, tmp_path, capsys):
    path = long_rows(tmp_path, [4, 9, 5, 8, 6])
    stream = prompts_of(config_of(path, max_prompt_tokens=6, shuffle=False), tokenizer, prompts_per_step=2)
    lines = capsys.readouterr().out.splitlines()
    prompts = stream.draw(8)
    assert [p.columns["answer"] for p in prompts] == ["4", "5", "6", "4", "5", "6", "4", "5"]
    assert [p.index for p in prompts] == list(range(8))
    told = (
        "warning: data: 3 of 5 rows of .*; an epoch is 1.5 steps; tokens 4 to 9, median 6, 95% have at most 9; left out"
    )
    assert re.search(f"{told}: 2 longer than data.max_prompt_tokens=6", lines[0])
    assert len(lines) == 1 and capsys.readouterr().out == ""


def test_rows_with_the_same_tokens_are_counted(tokenizer, tmp_path, capsys):
    rows = [{"question": f"add n{i % 4}", "answer": "1"} for i in range(10)]
    prompts_of(config_of(write_rows(tmp_path / "rows.jsonl", rows)), tokenizer)
    assert (
        "10 of 10 rows" in (told := capsys.readouterr().out) and "6 of them have the tokens of an earlier one" in told
    )


def test_no_row_that_fits_is_an_error_with_the_numbers(tokenizer, tmp_path):
    config = config_of(long_rows(tmp_path, [9, 8, 12]), max_prompt_tokens=6)
    message = "0 of 3 rows of .*long.jsonl are left: 3 longer than data.max_prompt_tokens=6; .* 95% have at most 12; "
    with pytest.raises(ValueError, match=message):
        prompts_of(config, tokenizer, seed=0)
    with pytest.raises(ValueError, match=message):
        load_eval_prompts(config, EvaluationConfig(num_prompts=2), tokenizer)


def test_rows_that_cannot_be_used_are_never_drawn_and_keep_their_numbers(tokenizer, tmp_path):
    rows = [{"question": f"add n{i}", "answer": None if i in (1, 4) else str(i)} for i in range(6)]
    data = config_of(write_rows(tmp_path / "rows.jsonl", rows), bad_rows="skip")
    stream = prompts_of(data, tokenizer)
    prompts = stream.draw(8)
    assert sorted(rows_of(prompts[:4])) == sorted(rows_of(prompts[4:])) == [0, 2, 3, 5]
    assert all(prompt.columns["answer"] == str(prompt.row) for prompt in prompts)
    assert stream.orders[""].num_rows == 4
    held_out = load_eval_prompts(data, EvaluationConfig(path=data.path, num_prompts=3), tokenizer)
    assert rows_of(held_out) == [0, 2, 3]


def rows_of(prompts) -> list[int]:
    return [prompt.row for prompt in prompts]


# ---- evaluation


def test_held_out_prompts_are_the_first_that_fit(tokenizer, ten_rows, tmp_path, capsys):
    held_out = long_rows(tmp_path, [4, 9, 5, 6])
    data = config_of(ten_rows, max_prompt_tokens=6)
    prompts = load_eval_prompts(data, EvaluationConfig(path=held_out, num_prompts=2), tokenizer)
    assert [(p.index, p.row, p.columns["answer"]) for p in prompts] == [(0, 0, "4"), (1, 2, "5")]
    assert "held out: 2 of 4 rows of" in capsys.readouterr().out
    assert len(load_eval_prompts(data, EvaluationConfig(path=held_out, num_prompts=99), tokenizer)) == 3
