"""The command that looks at an environment before a run."""

import json
import pathlib
import re

import pytest

from grpo.check_environment import main
from grpo.data.toy import build_model
from grpo.environments.calls import STYLES
from grpo.watch.failures import BadInput
from tests.unit import chat_templates as templates

EXAMPLES = pathlib.Path(__file__).parents[2] / "configs" / "examples"


def test_episodes_are_played_and_repeat(capsys):
    assert main([f"{EXAMPLES}/guess.py:Guess", "--model.path", "owner/name"]) == 0
    shown = capsys.readouterr().out
    assert "that of owner/name" in shown and "system_prompt" not in shown  # whose template nobody has read
    assert shown.count("reward ") == 3 and "the same texts" in shown and "Guess the number." in shown
    assert main([f"{EXAMPLES}/calculator.py:multiply"]) == 0


def test_a_class_without_tools_is_said_so_in_plain_words(tmp_path, capsys):
    (tmp_path / "talk.py").write_text(
        "class Talk:\n    def reset(self): return 'Hi.'\n    def reply(self, text): return None\n"
    )
    assert main([f"{tmp_path}/talk.py:Talk"]) == 0
    shown = capsys.readouterr().out
    assert "tools none" in shown and "[]" not in shown
    assert re.search(r"^reward None; ended by done after 1 turns, each answered in [\d.]+ s$", shown, re.MULTILINE)


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


def test_what_an_episode_leaves_to_the_next_one_is_told(tmp_path, capsys):
    (tmp_path / "leak.py").write_text(
        "class Leak:\n"
        "    said = []\n"
        "    def reset(self): return f'{len(self.said)} were said before.'\n"
        "    def reply(self, text): self.said.append(text)\n"
    )
    assert main([f"{tmp_path}/leak.py:Leak"]) == 1
    shown = capsys.readouterr().out
    assert "in the same process: OTHER TEXTS" in shown and "3 were said before." in shown
    assert "in a fresh process: the same texts" in shown


def test_each_class_gets_a_row_of_its_own_whichever_source_has_it(tmp_path, capsys):
    (tmp_path / "two.py").write_text(
        "class A:\n"
        "    def reset(self, **row): return 'A has ' + row['place']\n"
        "    def reply(self, text): return None\n"
        "class B(A):\n"
        "    def reset(self, **row): return 'B has ' + row['place']\n"
    )
    for name in ("A", "B"):
        row = {"question": "Where?", "kind": name, "place": f"room {name}"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    (tmp_path / "recipe.py").write_text(
        "from grpo import config as c\n"
        "data = c.DataConfig(\n"
        f"    sources={{'a': '{tmp_path}/A.jsonl', 'b': '{tmp_path}/B.jsonl'}},\n"
        "    answer_column='', environment_column='kind', columns={'place': 'place'},\n"
        ")\n"
        f"classes = {{'A': '{tmp_path}/two.py:A', 'B': '{tmp_path}/two.py:B'}}\n"
        "config = c.GRPOConfig(\n"
        "    model=c.ModelConfig(path='owner/name'), data=data, environment=c.EnvironmentConfig(classes=classes)\n"
        ")\n"
    )
    assert main([f"{tmp_path}/recipe.py", "--reward.functions"]) == 0
    shown = capsys.readouterr().out
    assert "A has room A" in shown and "B has room B" in shown


def test_what_no_tokenizer_takes_is_played(tmp_path, capsys):
    (tmp_path / "half.py").write_text(
        "class Half:\n    def reset(self): return 'Begin \\ud800.'\n    def reply(self, text): return 'No \\ud800.'\n"
    )
    assert main([f"{tmp_path}/half.py:Half", "--environment.max-turns", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Begin ?." in shown and shown.count("No ?.") == 6  # the third answer is not written


@pytest.mark.parametrize("template", [None, templates.QWEN2.replace("assistant\n{%", "assistant\n<think>\n{%")])
@pytest.mark.parametrize("style", STYLES)
def test_somebody_may_be_the_model(style, template, monkeypatch, capsys):
    """And is told how a call is written: its own numbers in that call find the number."""
    printed = []

    def type_next(_):
        printed.append(capsys.readouterr().out)
        (example,) = re.findall("A call is written (.*)", printed[0])
        return re.sub(r"\d+", str(len(printed)), example)

    monkeypatch.setattr("builtins.input", type_next)
    words = ["--play", "--environment.max-turns", "16", "--generator.max-completion-tokens", "2000"]
    words += ["--environment.calls", style]
    words += ["--data.chat-template-kwargs", "chat_template", json.dumps(template)] if template else []
    assert main([f"{EXAMPLES}/guess.py:Guess", *words]) == 0
    assert "ends the episode" in printed[0] and "reward 1.0" in capsys.readouterr().out


def test_a_first_text_that_is_too_long_is_told_with_its_field(tmp_path, capsys):
    folder = build_model(f"{EXAMPLES}/toys.py:guess_model", tmp_path, [], seed=0)
    words = [f"{EXAMPLES}/guess.py:Guess", "--model.path", folder, "--environment.calls", "hermes"]
    words += ["--environment.reply-as", "user", "--data.system-prompt", "", "--data.max-prompt-tokens"]
    assert main([*words, "4"]) == 1
    shown = capsys.readouterr().out
    ((number, field),) = set(re.findall(r"lost: the prompt with reset's text has (\d+) tokens; raise (\S+)", shown))
    assert field == "data.max_prompt_tokens=4"
    assert main([*words, number]) == 0


def test_what_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "bad.py").write_text("class Bad:\n    pass\n")
    with pytest.raises(BadInput, match="has no method reset"):
        main([f"{tmp_path}/bad.py:Bad"])
