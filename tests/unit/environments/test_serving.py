"""The exported model's chat template writes earlier turns as the model wrote them: serving reads what training read."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo.config import EnvironmentConfig, GRPOConfig
from grpo.environments.suffix import Turns
from grpo.models.export import write_form
from grpo.run.inputs import learned_form
from tests.unit import chat_templates as templates
from tests.unit.environments.test_turns_suffix import ANSWERS, SCHEMAS, TEXT, tokenizer_for, turns_for

# Name of a template -> the role that answers, arguments of the template
MENDED = [
    ("QWEN3", "user", {}),
    ("QWEN3", "user", {"enable_thinking": False}),
    ("QWEN3_WHOLE", "tool", {}),
    ("QWEN3_WHOLE", "tool", {"enable_thinking": False}),
    ("QWEN3_WHOLE", "user", {}),
    ("LLAMA", "tool", {}),
    ("GEMMA", "user", {}),
    ("DEEPSEEK", "user", {}),
    ("THINKER", "user", {}),
    ("COHERE", "user", {}),
]
TAME = [
    ("<think>\nlook at 42\n</think>\n\nsome words", ["at", "look"]),
    ("<think>look</think>at", ["42"]),
    ("look</think>some", ["words at"]),
    ("some words", ["42", "42", "at"]),
]


@pytest.fixture(params=MENDED, ids=lambda one: f"{one[0]}-{one[1]}-{len(one[2])}")
def served(request, tmp_path, capsys) -> tuple[Turns, AutoTokenizer]:
    """The turns of a run with a template, and the tokenizer of the folder that it exports."""
    name, role, arguments = request.param
    turns = turns_for(getattr(templates, name), role, arguments)
    turns.tokenizer.save_pretrained(tmp_path)
    config = GRPOConfig(data=turns.data, environment=EnvironmentConfig(name="any.py:Any"))
    write_form(tmp_path, learned_form(config, turns.tokenizer))
    assert "keeps them too" in capsys.readouterr().out
    return turns, AutoTokenizer.from_pretrained(tmp_path)


def conversation(turns: Turns, rounds: list[tuple[str, list[str]]]):
    """What the engine is given for each turn to come, as ids, and the messages up to there."""
    ids, messages = turns.opening("Where?"), [{"role": "user", "content": "Where?"}]
    for text, answers in rounds:
        ids = ids + turns.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += turns.tokenizer(turns.frames[turns.role][0])["input_ids"][:1]
        ids += turns.ids(answers, ids[-1])
        told = ["\n\n".join(answers)] if turns.role == "user" else answers
        messages = messages + [{"role": "assistant", "content": text}]
        messages += [{"role": turns.role, "content": answer} for answer in told]
        yield ids, messages


def test_the_exported_template_writes_the_ids_of_the_rollout(served):
    turns, tokenizer = served
    for ids, messages in conversation(turns, TAME * 2):
        arguments = {"tools": SCHEMAS, "add_generation_prompt": True, "return_dict": False}
        assert tokenizer.apply_chat_template(messages, **arguments, **turns.data.chat_template_kwargs) == ids
    first = turns.tokenizer.apply_chat_template(messages[:1], **arguments, **turns.data.chat_template_kwargs)
    assert first == turns.opening("Where?")


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(TEXT, ANSWERS), min_size=1, max_size=3))
def test_whatever_was_written_stays(served, rounds):
    turns, tokenizer = served
    for ids, messages in conversation(turns, rounds):
        written = tokenizer.apply_chat_template(
            messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True, **turns.data.chat_template_kwargs
        )
        assert written == tokenizer.decode(ids)


def test_thoughts_that_a_server_parted_come_back(served):
    turns, tokenizer = served
    opens = "" if turns.tokenizer.chat_template == templates.THINKER else "<think>"  # or the prompt has opened it
    answer = "\n\nat"
    parted = [{"content": f"{opens}look\n</think>{answer}"}]
    parted += [
        {"reasoning_content": "look\n", "content": text} for text in (answer, [{"type": "text", "text": answer}])
    ]
    one, other, third = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}, {"role": "assistant", **turn}, {"role": turns.role, "content": "!"}],
            tokenize=False,
        )
        for turn in parted
    )
    assert one == other == third


@pytest.mark.parametrize("name", ["QWEN2", "PHI", "PLAIN"])
def test_a_template_that_keeps_turns_is_left_alone(name, capsys):
    turns = turns_for(getattr(templates, name), "user")
    config = GRPOConfig(data=turns.data, environment=EnvironmentConfig(name="any.py:Any"))
    assert learned_form(config, turns.tokenizer).template == "" and not capsys.readouterr().out


def test_a_template_that_cannot_keep_them_is_told(capsys):
    """It writes a blank between the opening and an earlier turn."""
    config = GRPOConfig(environment=EnvironmentConfig(name="any.py:Any"))
    tokenizer = tokenizer_for(templates.QWEN2.replace("CONTENT", "").replace("{{ m.role }}\n", "{{ m.role }}\n "))
    assert learned_form(config, tokenizer).template == ""
    assert "cannot be made to keep them" in capsys.readouterr().out
