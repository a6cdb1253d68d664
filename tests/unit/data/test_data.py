"""Streams of prompts: what is drawn, in which order, by which weights, and that it resumes exactly."""

import json
import pathlib
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo.config import DataConfig, GRPOConfig
from grpo.data.encode import EncodedRows, Encoder
from grpo.data.prepare import encode_sources, load_sources
from grpo.data.streams import PromptStream
from grpo.data.turns import tokenize, write_prompt
from grpo.run.saved import Saved, begin_to_read, resume_data
from tests import write_lines

# One token per word; the template writes "<role> content .." and, for the generation prompt, "<assistant>".
WORDS = ["<unk>", "<eos>", "<system>", "<user>", "<assistant>", "<nothink>", "Be", "brief", "add", "yes"]
WORDS += [f"n{i}" for i in range(20)]
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
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE, name_or_path="tiny"
    )


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def write_rows(path: pathlib.Path, rows: list[dict]) -> str:
    return str(write_lines(path, rows))


@pytest.fixture
def ten_rows(tmp_path) -> str:
    rows = [{"question": f"add n{i}", "answer": str(i), "completion": f"yes n{i}", "extra": i} for i in range(10)]
    return write_rows(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def two_sources(tmp_path) -> dict:
    paths = {}
    for name, number in (("a", 7), ("b", 3)):
        rows = [{"question": f"add n{i}", "answer": f"{name}{i}"} for i in range(number)]
        paths[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    return {"path": paths, "weights": {"a": 0.7, "b": 0.3}}


def config_of(path: str, **changes) -> DataConfig:
    return DataConfig(**{"path": path, "system_prompt": ""} | changes)


def encoder_of(data: DataConfig, tokenizer, **options) -> Encoder:
    return Encoder(tokenizer, data, data.max_prompt_tokens, **options)


def prepared(data: DataConfig, tokenizer, **options) -> list[EncodedRows]:
    return encode_sources(load_sources(data), encoder_of(data, tokenizer, **options))


def prompts_of(data: DataConfig, tokenizer, seed=0, **options) -> PromptStream:
    return PromptStream(prepared(data, tokenizer, **options), data, seed)


def encode_prompt(tokenizer, data: DataConfig, prompt: str | list[dict]) -> list[int]:
    ((ids, _),) = tokenize(tokenizer, [write_prompt(tokenizer, data, prompt)])
    return ids


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user> add n1 <assistant>"),
        ({"system_prompt": "Be brief"}, "<system> Be brief <user> add n1 <assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user> add n1 <assistant> <nothink>"),
        ({"chat_template_kwargs": {"level": 2}}, "<user> add n1 <assistant> yes yes"),
    ],
)
def test_a_prompt_is_system_user_and_opening_and_the_template_gets_its_arguments(tokenizer, fields, text):
    assert encode_prompt(tokenizer, config_of("", **fields), "add n1") == ids_of(text)


def test_prompts_have_ids_columns_and_a_running_index(tokenizer, ten_rows):
    prompts = prompts_of(config_of(ten_rows, shuffle=False), tokenizer).draw(12)
    assert [prompt.index for prompt in prompts] == list(range(12))
    assert prompts[3].ids == ids_of("<user> add n3 <assistant>")
    assert prompts[3].columns == {"question": "add n3", "answer": "3"}
    assert rows_of(prompts) == [*range(10), 0, 1]  # the second epoch, in file order again


def rows_of(prompts) -> list[int]:
    return [prompt.row for prompt in prompts]


def test_each_epoch_is_a_new_permutation_from_the_seed(tokenizer, ten_rows):
    state = random.getstate()
    first, again, other = (rows_of(prompts_of(config_of(ten_rows), tokenizer, seed).draw(20)) for seed in (1, 1, 2))
    assert random.getstate() == state
    by_hand = list(range(10))
    random.Random("1 0").shuffle(by_hand)  # seed and epoch
    assert first[:10] == by_hand and first == again != other
    assert sorted(first[10:]) == list(range(10)) and first[:10] != first[10:]


def test_a_filter_passes_over_prompts_and_others_come_in_their_place(tokenizer, ten_rows):
    """No number of a prompt comes twice, and a filter that leaves none is told from one that leaves few."""
    stream = prompts_of(config_of(ten_rows, shuffle=False), tokenizer)
    stream.keep_prompt = lambda prompt: prompt.columns["answer"] in ("3", "8")
    assert [(prompt.row, prompt.index) for prompt in stream.draw(3)] == [(3, 3), (8, 8), (3, 13)]
    stream.keep_prompt = lambda prompt: False
    with pytest.raises(ValueError, match="keep_prompt .* none of 10 rows"):
        stream.draw(1)
    stream = prompts_of(config_of(ten_rows), tokenizer)
    stream.keep_prompt = lambda prompt: prompt.row == 3  # between two draws up to 18 other rows, nearly two epochs
    assert rows_of(stream.draw(50)) == [3] * 50
    stream.orders[""].chances = {3: 0.0}  # as a curriculum does
    with pytest.raises(ValueError, match="keep_prompt and data.curriculum leave none of 10 rows"):
        stream.draw(1)


def test_a_state_of_another_version_is_refused_by_name(tokenizer, ten_rows):
    for change in ({"owed": {}, "more": 7}, {"sources": {}}):
        with pytest.raises(ValueError, match="lacking|unknown.*another version"):
            prompts_of(config_of(ten_rows), tokenizer).load_state_dict(change)


def test_other_rows_are_refused_or_begin_again(tokenizer, ten_rows, capsys):
    """Fewer rows, another order, an edited one: under the same path, so that no field of the config differs."""
    rows = pathlib.Path(ten_rows).read_text().splitlines(keepends=True)

    def started(state: dict, **changes: bool) -> tuple[list[int], dict]:
        config = GRPOConfig(data=config_of(ten_rows), **changes)
        read = begin_to_read(config, state)
        stream = prompts_of(config.data, tokenizer)
        resume_data(Saved(None, state, read), stream)
        drawn = rows_of(stream.draw(3))
        return drawn, {"step": 1, "data": stream.state_dict(), "read": read.facts}

    first, saved = started({})
    assert not {*first} & {*started(saved)[0]}
    for content in (rows[:4], rows[::-1], [rows[0].replace("0", "7"), *rows[1:]]):
        pathlib.Path(ten_rows).write_text("".join(content))
        found = f"the rows: 10 of .*, checksum .* -> {len(content)} of .*, checksum .*--allow-changes"
        with pytest.raises(ValueError, match=found):
            started(saved)
        assert started(saved, allow_changes=True)[0] == started({})[0]
    assert "the data begin again\n" in capsys.readouterr().out


# ---- Mixtures and curricula


def test_sources_come_by_their_weights_each_through_epochs_of_its_own(tokenizer, two_sources):
    prompts = prompts_of(config_of(**two_sources, shuffle=False), tokenizer).draw(20)
    assert "".join(p.source for p in prompts[:10]) == "abaaabaaba"
    assert [p.columns["answer"] for p in prompts if p.source == "b"] == ["b0", "b1", "b2"] * 2
    assert [p.row for p in prompts if p.source == "a"] == [*range(7)] * 2
    assert [p.index for p in prompts] == list(range(20))


def test_each_step_draws_by_weights_of_its_own(tokenizer, two_sources):
    stream = prompts_of(config_of(**two_sources, shuffle=False), tokenizer)
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
            stream.set_shares(weights)


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
    stream = prompts_of(config_of(**two_sources, curriculum=f"{curriculum}:by_rate"), tokenizer)
    for prompt in stream.draw(10):
        if prompt.source == "a" and prompt.row < 6:
            stream.remember(prompt, prompt.row // 2 / 2, step=1)
    stream.begin_step(2)
    prompts = stream.draw(4_000)
    assert sum(prompt.source == "a" for prompt in prompts) == 2_800
    counts = [sum(p.row == row and p.source == "a" for p in prompts) for row in range(7)]
    for row, weight in enumerate((2, 2, 1, 1, 0, 0, 1)):
        assert counts[row] == pytest.approx(400 * weight, abs=60)  # 2800 * weight / 7, within 3 deviations
    assert len({prompt.index for prompt in prompts}) == 4_000


def test_rows_that_were_not_seen_come_first_and_then_all_alike(tokenizer, two_sources, curriculum, capsys):
    stream = prompts_of(config_of(two_sources["path"]["a"], curriculum=f"{curriculum}:fresh_only"), tokenizer)
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
@pytest.mark.parametrize("rule", ["", "by_rate"])
def test_a_mixture_resumes_exactly(tokenizer, two_sources, curriculum, rule, num_steps):
    """With a curriculum or without, across the ends of epochs."""
    data = config_of(**two_sources, curriculum=rule and f"{curriculum}:{rule}")
    stream, resumed = (prompts_of(data, tokenizer, seed=3) for _ in range(2))
    resumed.draw(6)  # whatever it did before does not matter
    for step in range(1, num_steps + 1):
        stream.begin_step(step)
        for prompt in stream.draw(4):
            stream.remember(prompt, prompt.row % 3 / 2, step)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for one in (stream, resumed):
        one.begin_step(6)
    expected = stream.draw(50)
    assert resumed.draw(50) == expected and resumed.state_dict() == stream.state_dict()
    assert rule or expected[0].index == 4 * num_steps


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("wrong_arguments", r"called as curriculum\(seen, step\)"),
        ("negative", r"returned -0.5 for Seen\(.*number of 0 or more"),
        ("missing", "no function 'missing'"),
    ],
)
def test_a_curriculum_that_cannot_be_used_is_refused(tokenizer, two_sources, curriculum, name, word):
    with pytest.raises(ValueError, match=word):
        prompts_of(config_of(**two_sources, curriculum=f"{curriculum}:{name}"), tokenizer)
