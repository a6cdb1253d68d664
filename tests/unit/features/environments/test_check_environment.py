"""The command that plays an environment before a run."""

import json
import re
from unittest import mock

import pytest

from grpo.features.environments.calls import STYLES
from grpo.tools.check_environment import NUM_EPISODES, main
from grpo.watch.failures import BadInput
from tests import ROOT

EXAMPLES = ROOT / "configs" / "examples"

MINE = """
class Talk:
    def reset(self, place=''): return f'Hi \\ud800 {place}.'
    def reply(self, text): return None

class Bad:
    pass

class Down(Talk):
    def reset(self): raise ConnectionError('no server')
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def test_episodes_are_played_by_random_calls(mine, capsys):
    """Also a function alone, a class without tools, and text that no tokenizer takes."""
    assert main([f"{EXAMPLES}/guess.py:Guess"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\nreward ") == NUM_EPISODES and "Guess the number." in shown and '"name": "guess"' in shown
    assert main([f"{EXAMPLES}/calculator.py:multiply"]) == 0
    capsys.readouterr()
    assert main([f"{mine}:Talk"]) == 0
    shown = capsys.readouterr().out
    assert "tools none" in shown and "Hi" in shown
    assert re.search(r"^reward None; ended by done after 1 turns, each answered in [\d.]+ s$", shown, re.MULTILINE)


def test_rows_are_those_of_the_recipe(mine, tmp_path, capsys):
    rows = [{"question": "Where?", "place": f"room {number}"} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ["--data.path", f"{tmp_path}/rows.jsonl", "--data.answer-column", "", "--data.columns", "place", "place"]
    assert main([f"{mine}:Talk", "configs/toy_arithmetic.py", *data]) == 0
    shown = capsys.readouterr().out
    assert "room 0." in shown and "room 1." in shown


@pytest.mark.parametrize("style", STYLES)
def test_somebody_may_be_the_model(style, monkeypatch, capsys):
    """And is told how a call is written: its own numbers in that call find the number."""
    printed = []

    def type_next(_):
        printed.append(capsys.readouterr().out)
        (example,) = re.findall("A turn may be: (.*)", printed[0])
        return re.sub(r"\d+", str(len(printed)), example)

    monkeypatch.setattr("builtins.input", type_next)
    limits = ["--environment.max-turns", "16", "--generator.max-completion-tokens", "2000"]
    assert main([f"{EXAMPLES}/guess.py:Guess", "--play", "--environment.calls", style, *limits]) == 0
    assert "reward 1.0" in capsys.readouterr().out


def test_somebody_may_leave(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=EOFError))
    with pytest.raises(SystemExit) as left:
        main([f"{EXAMPLES}/guess.py:Guess", "--play"])
    assert left.value.code == 0 and "left before the end" in capsys.readouterr().out


def test_what_cannot_be_used_is_refused_and_what_is_lost_is_told(mine, capsys):
    with pytest.raises(BadInput, match="has no method reset"):
        main([f"{mine}:Bad"])
    with pytest.raises(BadInput, match="names no function in a file; write path/file.py:function"):
        main(["configs/toy_guess.py"])
    assert main([f"{mine}:Down"]) == 1
    assert "lost: " in (shown := capsys.readouterr().out) and "no server" in shown
