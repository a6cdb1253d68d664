"""From the config to reward functions: their options, the columns that they get, and how they are called."""

import functools
import subprocess
import sys

import pytest

from grpo.config import RewardConfig
from grpo.rewards.builtin import BUILT_INS
from grpo.rewards.loading import call_arguments, load_functions
from tests import ROOT

LOADED = """
import sys
from grpo.config import RewardConfig
from grpo.rewards.loading import load_caller, load_functions
tags = RewardConfig(functions={"math_reward": 1.0})
boxed = RewardConfig(functions={"math_reward": 1.0}, answer_format="boxed")
for load, *arguments in ((load_caller, tags, False, 9), (load_functions, boxed), (load_caller, boxed, False, 9)):
    load(*arguments)
    print({"torch", "numpy", "sympy", "math_verify"} & {*sys.modules} or "none")
"""


def test_the_library_that_compares_latex_is_loaded_by_reward_processes_at_the_start_and_torch_never():
    command = [sys.executable, "-c", LOADED]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    *without, compares = result.stdout.splitlines()
    assert without == ["none", "none"] and "math_verify" in compares and "torch" not in compares, result.stderr


def test_load_functions_gives_every_built_in_its_options():
    """All of them, called as the pool calls them: one completion, the data's columns and two more."""
    config = RewardConfig(
        functions=dict.fromkeys(BUILT_INS, 1.0),
        answer_format="hashes",
        options={
            "math_reward": {"partial_credit": 0.3, "tolerance": 0.1},
            "regex_match": {"pattern": "[0-9]{3}"},
            "overlong_penalty": {"tokens": 50},
        },
    )
    functions = load_functions(config, columns=["answer"], max_completion_tokens=200)
    text = "x = 7\n#### 105"
    columns = {"answer": ["100.5"], "num_tokens": [180], "truncated": [False]}
    assert {name: function([text], **columns) for name, function in functions.items()} == {
        "math_reward": [1.0],
        "regex_match": [1.0],
        "format_reward": [0.0],
        "thinking_reward": [0.0],
        "overlong_penalty": [-0.6],
    }
    assert functions["math_reward"](["#### 120"], **columns) == [0.3]


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("math_reward", "solution", r"math_reward cannot .* 'answer'; .* columns it needs in data.columns"),
        (
            "thinking_reward",
            "truncated",
            r"data.columns has truncated, .* another name, such as --data.columns my_truncated truncated",
        ),
        ("regex_match", "pattern", r"column pattern is named like an option of regex_match; rename"),
    ],
)
def test_load_functions_refuses_columns(name, column, message):
    with pytest.raises(ValueError, match=message):
        load_functions(RewardConfig(functions={name: 1.0}), [column])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex_match", {}, r"regex_match needs pattern; give it with .* regex_match '{\"pattern\": \.\.\.}'$"),
        ("regex_match", {"pattern": "(["}, r"pattern '\(\[' is no regular expression: .*; escape"),
        ("overlong_penalty", {"tokens": 201}, r"tokens is 201; set at most .* = 200"),
        ("math_reward", {"answer_format": "xml"}, r"of math_reward: answer_format='xml' is unknown; use"),
        (
            "overlong_penalty",
            {"token": 1},
            r"no option 'token' \(did you mean tokens\?\); its options .* are: tokens, ",
        ),
        ("overlong_penalty", {"tokens": True}, r"tokens is True \(bool\), not int"),
        ("math_reward", [1], r"reward.options of math_reward is \[1\]; write a table such as"),
    ],
)
def test_load_functions_refuses_options(name, options, message):
    config = RewardConfig(functions={name: 1.0}, options={name: options})
    with pytest.raises(ValueError, match=message):
        load_functions(config, max_completion_tokens=200)


OWN_OPTIONS = """
def scaled(completions, answer, *, scale: float = 1.0, answer_format, max_completion_tokens=7, **columns):
    return [f"{answer_format} {max_completion_tokens}", scale * int(answer[0])]
def level_or_zero(completions, *, level, **columns):
    raise ValueError("is not called at the start")
"""


def test_a_function_of_the_users_has_options_and_facts_of_the_run_like_a_built_in_one(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_OPTIONS)
    name, level = f"{tmp_path}/mine.py:scaled", f"{tmp_path}/mine.py:level_or_zero"

    def load(columns=("answer",), **options):
        config = RewardConfig(functions={name: 1.0}, options={name: options}, answer_format="boxed")
        return load_functions(config, columns, 100)[name]

    assert load()(["a"], answer=["3"], question=["?"]) == ["boxed 100", 3.0]
    assert load(scale=0.5, answer_format="hashes", max_completion_tokens=5)(["a"], answer=["3"]) == ["hashes 5", 1.5]
    with pytest.raises(ValueError, match=r"mine.py:scaled: scale is '2' \(str\), not float"):
        load(scale="2")
    with pytest.raises(ValueError, match=r"column scale is named like an option of /.*mine.py:scaled; rename it"):
        load(columns=("answer", "scale"), scale=2)
    load(columns=("answer", "scale"))
    # what has no default may be an option or a column
    config = RewardConfig(functions={level: 1.0})
    with pytest.raises(ValueError, match=r"mine.py:level_or_zero needs level; give it with .* in data.columns"):
        load_functions(config, ["answer"])
    load_functions(config, ["answer", "level"])
    load_functions(config)
    config = RewardConfig(functions={level: 1.0}, options={level: {"level": 3}})
    load_functions(config, ["answer"])
    with pytest.raises(ValueError, match=r"column level is named like an option"):
        load_functions(config, ["answer", "level"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "maths",
            r"'maths'.* math_reward, .*, overlong_penalty, .* path/file.py:function",
        ),
        ("mine.py", "unknown reward function 'mine.py'"),
        (
            "mine.py:strict",
            r"mine.py:strict .* question, answer, num_tokens, truncated, prompts, step.*'question'.*\*\*col",
        ),
        ("mine.py:words", r"missing a required argument: 'solution'.*list the columns it needs in data.columns"),
    ],
)
def test_load_functions_refuses(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def words(completions, solution, **columns): return []\ndef strict(completions, answer): return []\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_functions(RewardConfig(functions={name: 1.0}), columns=["question", "answer"])


# ---- how a function is called


def trl(prompts, completions, answer, **columns):
    return [float(a in text) for a, text in zip(answer, completions, strict=True)]


def first_by_any_name(texts, **columns):
    return [float(len(text)) for text in texts]


@pytest.mark.parametrize(
    ("function", "values"),
    [(trl, [1.0, 0.0]), (functools.partial(trl), [1.0, 0.0]), (first_by_any_name, [1.0, 2.0])],
)
def test_completions_go_by_their_name_or_first(function, values):
    columns = {"prompts": ["1+2", "2+2"], "answer": ["3", "4"], "step": [1, 1]}
    arguments, named = call_arguments(function, ["3", "55"], columns)
    assert function(*arguments, **named) == values


def test_each_completion_has_the_form_of_its_own_prompt():
    """One source has texts and another chats, and an async function gets both in one call, in any order."""
    chat = [{"role": "user", "content": "2+2"}]
    answer = [{"role": "assistant", "content": "4"}]
    for prompts, texts, expected in (
        (["1+2", chat], ["3", "4"], ["3", answer]),
        ([chat, "1"], ["4", "3"], [answer, "3"]),
    ):
        _, named = call_arguments(trl, texts, {"prompts": prompts})
        assert named["completions"] == expected


def test_a_class_is_no_reward(tmp_path):
    (tmp_path / "judges.py").write_text("class Judge: pass")
    with pytest.raises(ValueError, match="judges.py:Judge is a class; write a function .*configs/examples/similar.py"):
        load_functions(RewardConfig(functions={f"{tmp_path}/judges.py:Judge": 1.0}))
