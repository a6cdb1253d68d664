"""The command that looks at an environment before a run."""

import pathlib

from grpo.check_environment import main

EXAMPLES = pathlib.Path(__file__).parents[2] / "configs" / "examples"


def test_episodes_are_played_and_repeat(capsys):
    assert main([f"{EXAMPLES}/guess.py:Guess"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("reward ") == 3 and "the same texts" in shown and "Guess the number." in shown
    assert main([f"{EXAMPLES}/calculator.py:multiply"]) == 0


def test_a_hidden_state_and_a_lost_episode_are_told(tmp_path, capsys):
    (tmp_path / "odd.py").write_text(
        "import os\n"
        "class Odd:\n"
        "    def reset(self, **row): return str(os.getpid())\n"
        "    def reply(self, text): return None\n"
        "class Down:\n"
        "    def reset(self): raise ConnectionError('no server')\n"
        "    def reply(self, text): return None\n"
    )
    assert main([f"{tmp_path}/odd.py:Odd"]) == 1
    assert "OTHER TEXTS" in capsys.readouterr().out
    assert main([f"{tmp_path}/odd.py:Down"]) == 1
    assert "no server" in capsys.readouterr().out


def test_somebody_may_be_the_model(monkeypatch, capsys):
    turns = iter([f"<tool>guess {number}</tool>" for number in range(1, 17)])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    words = ["--play", "--environment.max-turns", "16", "--environment.calls", "tag"]
    assert main([f"{EXAMPLES}/guess.py:Guess", *words]) == 0
    assert "reward 1.0" in capsys.readouterr().out


def test_what_cannot_be_used_is_one_line(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("class Bad:\n    pass\n")
    assert main([f"{tmp_path}/bad.py:Bad"]) == 1
    assert "has no method reset" in capsys.readouterr().out
