"""A column chooses among several environments: each row sees the tools of its own, and plays with its own class."""

import json
import textwrap

import pytest

from grpo.config import DataConfig, EnvironmentConfig, EvaluationConfig
from grpo.data.prepare import load_eval_prompts
from grpo.features.environments.tools import load_toolboxes
from tests.unit import chat_templates as templates
from tests.unit.data.test_data import encoder_of, prepared
from tests.unit.features.environments.test_turns_suffix import tokenizer_for

CLASSES = """
    class Sea:
        def reset(self, **row):
            self.depth = 0

        def dive(self) -> str:
            "Dive."
            self.depth += 1
            return f"At {self.depth} m."

        def get_reward(self):
            return self.depth

    class Sky:
        def reset(self, question):
            return f"Up: {question}"

        def reply(self, text):
            return "Blue."
"""
CONFIG = EnvironmentConfig(name={"wet": "places.py:Sea", "dry": "places.py:Sky"})


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Rows of both kinds in their turn, and the file of the classes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "places.py").write_text(textwrap.dedent(CLASSES))
    write(tmp_path, ["wet", "dry"] * 4)
    return DataConfig(path="rows.jsonl", answer_column="", system_prompt="", columns={"environment": "kind"})


def write(folder, kinds):
    rows = [{"question": f"Where is number {n}?", "kind": kind} for n, kind in enumerate(kinds)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def prompts(data, tools):
    tokenizer = tokenizer_for(templates.QWEN2)
    rows = prepared(data, tokenizer, tools=tools)[0]
    return [tokenizer.decode(rows.get(row).ids) for row in rows.usable]


def test_a_row_sees_the_tools_of_its_environment(data):
    tools = {name: toolbox.schemas for name, toolbox in load_toolboxes(CONFIG).items()}
    texts = prompts(data, tools)
    assert [("dive" in text, "<tools>" in text) for text in texts] == [(True, True), (False, False)] * 4
    tools["wet"][0]["function"]["description"] = "Swim downwards."  # nothing of an earlier start is taken for it
    assert ["Swim downwards" in text for text in prompts(data, tools)] == [True, False] * 4


def test_an_unknown_environment_is_told_with_its_row(data, tmp_path):
    tools = {name: toolbox.schemas for name, toolbox in load_toolboxes(CONFIG).items()}
    for value, shown in (("wte", "'wte'"), (1, "1"), (["wet"], r"\['wet'\]")):
        write(tmp_path, ["wet", "dry", value])
        words = (
            f"1 of 3 rows of rows.jsonl cannot be used: row 3: column 'environment' is {shown}, .*name has wet, dry "
        )
        with pytest.raises(ValueError, match=words) as refused:
            prompts(data, tools)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="row 3: column 'environment' is"):
        encoder = encoder_of(data, tokenizer_for(templates.QWEN2), tools=tools)
        load_eval_prompts(EvaluationConfig(), encoder)
