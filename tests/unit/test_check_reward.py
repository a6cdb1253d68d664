"""`python -m grpo.check_reward`: what it shows of a function, before any run."""

import datetime
import re
import sys

import datasets
import pytest

from grpo.data.rows import Example
from grpo.rewards.builtin import math_reward
from grpo.tools.check_reward import main, some_completions
from grpo.watch.failures import BadInput
from grpo.workers.lockdown import missing_measures
from tests import write_lines
from tests.torchrun import words_of

REWARDS = """
import os
from grpo.rewards.builtin import group_level

def trl(prompts, completions, answer, **columns):
    return [float(a in text) for a, text in zip(answer, completions)]

@group_level
def lengths(completions, **columns):
    return [len(text) for text in completions]

def strict(completions, answer):
    return [0.0]

def loops(completions, **columns):
    while True:
        pass

def needs_a_key(completions, **columns):
    return [float(len(os.environ["JUDGE_KEY"]))]

def counts(environments, **columns):
    return [e.count for e in environments]
"""


@pytest.fixture
def show(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [{"q": f"{i} + 1?", "truth": {"value": str(i + 1)}, "level": i} for i in range(5)]
    write_lines(tmp_path / "rows.jsonl", rows)
    data = "--data.path rows.jsonl --data.prompt-column q --data.answer-column truth.value --data.columns level level"

    def run(name: str, *flags: str) -> tuple[int, str]:
        code = main(words_of([name, data, *flags]))
        return code, capsys.readouterr().out

    return run


def test_it_shows_columns_and_values(show):
    code, out = show("mine.py:trl")
    assert code == 0
    assert "\nrow: 0 + 1?, columns: q (str), answer (str), level (int)\n" in out and out.count("\nrow: ") == 3
    reference, wrong, empty, seconds = [line.split() for line in out.partition("\nrow: ")[2].splitlines()[1:5]]
    assert reference == ["reference", "<answer>1</answer>", "1.0"]
    assert wrong == ["wrong", "<answer>2</answer>", "0.0"] and empty == ["empty", "0.0"]
    assert seconds[1:] == ["s", "for", "3", "completions,", "a", "call", "for", "each", "completion"]


def test_a_call_has_the_limits_and_variables_of_a_run(show, monkeypatch):
    code, out = show("mine.py:loops", "--reward.timeout-seconds 0.1")
    assert code == 1 and out.count("FAILS: took longer than 0.1 s") == 9
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    code, out = show("mine.py:needs_a_key")
    assert code == 1 and out.count("reward functions get few environment variables") == 9
    assert show("mine.py:needs_a_key", "--reward.environment JUDGE_KEY")[0] == 0


@pytest.mark.skipif(bool(missing_measures()), reason=f"this kernel has no {missing_measures()}")
def test_a_built_in_function_is_confined_and_names_the_folder_that_is_closed_to_it(show, tmp_path, monkeypatch):
    """math-verify is found in the working folder alone, which the driver may read."""
    assert show("math_reward", "--reward.answer-format boxed")[0] == 0  # the driver has read the real one
    (tmp_path / "math_verify.py").write_text("raise KeyError('it was read')")
    others = [path for path in sys.path if not path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    with pytest.raises(
        BadInput, match=f"cannot be loaded: .*files right in .*{tmp_path}.* on Python's path"
    ) as refused:
        show("math_reward", "--reward.answer-format boxed")
    assert "it was read" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("mine.py:strict", (), "mine.py:strict cannot be called with completions and the columns"),
        ("mine.py:counts", (), "mine.py:counts reads environments, which only an episode of a run has"),
        ("nothing", (), "unknown reward function 'nothing'"),
        ("math_reward", ["--data.path no.jsonl"], "no.jsonl does not exist"),
        ("math_reward", ["--data.answer-column gold"], "column 'gold' is missing in rows.jsonl"),
    ],
)
def test_what_cannot_be_called_is_one_line(show, name, flags, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        show(name, *flags)


def test_a_column_that_json_cannot_hold_is_refused_before_a_process_starts(show, tmp_path):
    row = {"q": "?", "truth": {"value": "1"}, "level": datetime.date(2020, 1, 1)}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "days.parquet")
    with pytest.raises(BadInput, match="a column for rewards holds what JSON cannot .*date is not JSON serializable"):
        show("mine.py:trl", "--data.path days.parquet")


def test_a_list_of_answers_is_refused_by_math_reward_and_its_first_is_shown_to_your_own(show, tmp_path):
    row = {"q": "3 + 3?", "truth": {"value": ["6", "six"]}, "level": 1}
    write_lines(tmp_path / "rows.jsonl", [row])
    code, out = show("math_reward")
    assert code == 1 and out.count("FAILS: ") == 3 and "--data.answer-column answer.0" in out
    _, out = show("mine.py:lengths", "--reward.answer-format hashes")
    assert "reference  #### 6 " in out and "wrong      #### 7 " in out and "a call for each group" in out


def test_without_an_answer_the_columns_are_tried_as_completions(show, tmp_path):
    """A reward in TRL's form: messages, and the solution in a column of the function's own choice."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}]
    write_lines(tmp_path / "rows.jsonl", [{"q": messages, "level": 6}])
    (tmp_path / "trl.py").write_text(
        "def equal(completions, level, **_):\n"
        "    return [float(messages[0]['content'] == str(n)) for messages, n in zip(completions, level)]\n"
    )
    code, out = show("trl.py:equal", "--data.answer-column", "")
    assert code == 0
    row, solution, empty = out.splitlines()[-4:-1]
    assert row.startswith("row: 3 + 3?") and solution.split() == ["level", "6", "1.0"] and empty.endswith("  0.0")


@pytest.mark.parametrize(("answer", "wrong"), [("0.5", "3/2"), ("50%", "51"), ("x = 7", "8"), (2.5, "7/2")])
def test_the_wrong_answer_is_one_more_written_exactly(answer, wrong):
    completions = some_completions(Example("?", {"answer": answer}), "answer_tag")
    assert completions["wrong"] == f"<answer>{wrong}</answer>"
    assert math_reward([completions["reference"], completions["wrong"]], [answer] * 2) == [1.0, 0.0]
