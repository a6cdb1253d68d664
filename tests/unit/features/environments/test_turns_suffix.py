"""What stands between turns, over templates of many kinds and any texts: ids only grow, and answers stay texts."""

import copy
import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from configs.examples import toys
from grpo.config import DataConfig
from grpo.data.chat import prompt_messages, render
from grpo.features.environments.suffix import Turns
from tests.unit import chat_templates as templates

WORDS = ["look", "at", "some", "words", "42", "Ünïcode ✓", "日本"]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
SCHEMAS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}]
# Name of a template -> the role that may answer, arguments of the template
CARRIED = [
    ("QWEN2", "tool", {}),
    ("QWEN3", "tool", {}),
    ("QWEN3", "user", {"enable_thinking": False}),
    ("LLAMA", "tool", {}),
    ("GEMMA", "user", {}),
    ("PHI", "user", {}),
    ("DEEPSEEK", "user", {}),
    ("THINKER", "user", {}),
    ("GLM", "tool", {}),
    ("COHERE", "user", {}),
    ("PLAIN", "user", {}),
]
OPENED_THOUGHTS = re.compile(r"<think>\n(\n</think>\n\n)?")
# Of tokens and of what a template could take for its own
PIECES = ["<|im_start|>assistant\n", "<|eot_id|>", "<|im_", "end|>", "[/INST]", "<end_of_turn>", "<eos>", "<", "|>", ""]
PIECES += [
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    '{"a": "b"}',
    "\\",
    '"',
    " ",
    "\n\n",
    "\t",
    "42",
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=6).map("".join)
ANSWERS = st.lists(TEXT, min_size=1, max_size=4)
MODEL_TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)


@functools.cache
def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    backend = toys.trained_tokenizer([" ".join(WORDS), "user assistant system Be brief"] * 20, 400).backend_tokenizer
    backend.add_special_tokens(templates.SPECIAL)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in templates.ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=templates.SPECIAL,
        chat_template=template,
    )


def turns_for(
    template: str, role: str, arguments: dict | None = None, stops: list[str] = templates.STOPS, **others
) -> Turns:
    tokenizer = tokenizer_for(template)
    data = DataConfig(system_prompt="", chat_template_kwargs=arguments or {})
    return Turns(tokenizer, data, tokenizer.convert_tokens_to_ids(stops), SCHEMAS, role, **others)


@functools.cache
def case(number: int) -> Turns:
    name, role, arguments = CARRIED[number]
    return turns_for(getattr(templates, name), role, arguments)


def rendered(turns: Turns, messages: list[dict[str, str]]) -> str:
    """The conversation by the template alone, without the thoughts that it opens for turns to come."""
    text = turns.tokenizer.apply_chat_template(
        messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True, **turns.data.chat_template_kwargs
    )
    return OPENED_THOUGHTS.sub("", text)


carried = pytest.mark.parametrize("number", range(len(CARRIED)), ids=lambda number: "-".join(CARRIED[number][:2]))
settled = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@carried
@settled
@given(TEXT, st.lists(st.tuples(MODEL_TEXT, ANSWERS), max_size=3))
def test_a_conversation_is_what_the_template_writes(number, question, rounds):
    """Whatever is answered: its ids read as the template writes it, and only the template's tokens are special."""
    turns = case(number)
    written, _ = render(turns.tokenizer, turns.data, prompt_messages(turns.data, "Where?"), True, SCHEMAS)
    assert turns.opening("Where?") == turns.tokenizer(written, add_special_tokens=False)["input_ids"]
    tokenizer, ids, messages = turns.tokenizer, turns.opening(question), [{"role": "user", "content": question}]
    plain = turns.opening("x")
    for text, answers in rounds:
        before = list(ids)
        sampled = tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled += tokenizer(turns.frames[turns.role][0])["input_ids"][:1]
        ids = ids + sampled + turns.ids(answers)
        assert ids[: len(before) + len(sampled)] == before + sampled
        plain += sampled + turns.ids(["x"] * len(answers))
        told = ["\n\n".join(answers)] if turns.role == "user" else answers
        messages += [{"role": "assistant", "content": text}, *({"role": turns.role, "content": t} for t in told)]
    assert OPENED_THOUGHTS.sub("", tokenizer.decode(ids)) == rendered(turns, messages)
    assert [token for token in ids if token in turns.special_ids] == [t for t in plain if t in turns.special_ids]


QWEN2 = templates.QWEN2
REFUSED = {
    "roles take turns": (templates.GEMMA, "tool", "user and assistant take turns; try .* --environment.reply-as user"),
    "left out": (templates.PHI, "tool", r"answer is not written: 'MARKanswer' is expected, '<\|end\|>.n<\|assist"),
    "tools move": (templates.MISTRAL, "user", r"the prompt, .*: '<bos>\[AV.* expected, '<bos>\[INST"),
    "no opening": (templates.DEEPSEEK, "tool", r"is not opened as .*: '<\|Assistant\|>' is expected, '<\|/tool\|>' is"),
    "another second round": (
        QWEN2.replace("<tool_response>\n", "<tool_response>\n{{ 'Now ' if loop.index > 3 }}"),
        "tool",
        "in the second round .*: .*nMARKanswer.* is expected, .*nNow MARKanswer",
    ),
    "two answers at most": (
        QWEN2.replace("{% if m.role == 'tool' %}", "{% if loop.index > 4 %}{% elif m.role == 'tool' %}"),
        "tool",
        "a row of three answers .*: '.*MARKanswer.*' is expected, '.*assistant.n' is there",
    ),
    "something before a turn": (
        QWEN2.replace("{{ m.content }}<|im_end|>", "{{ 'Final: ' if m.role == 'assistant' }}{{ m.content }}<|im_end|>"),
        "tool",
        "what stands before a turn .*: '.*assistant.n' is expected, '.*assistant.nFinal: ' is",
    ),
    "a line break before the end": (
        QWEN2.replace("{{ m.content }}<|im_end|>", "{{ m.content }}{{ '\n' }}<|im_end|>"),
        "tool",
        r"begins with .* \(ids \[\d+\]\), at which the model does not stop \(generator.stop_token_ids\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_cannot_carry_turns(name):
    template, role, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as refused:
        turns_for(template, role)
    assert "\n" not in str(refused.value) and "--data.prompt-template FILE.jinja" in str(refused.value)


def test_stop_tokens_that_are_missing():
    with pytest.raises(
        ValueError, match=r"begins with .*'<\|observation\|>'.* \(ids \[\d+\]\), at which the model does not stop"
    ):
        turns_for(templates.GLM, "tool", stops=["<eos>", "<|user|>"])


def test_turns_with_and_without_calls():
    """The answer to a call is the tool's, the answer to a text the user's."""
    turns = turns_for(templates.QWEN2, "tool", has_reply=True)
    end = turns.tokenizer.convert_tokens_to_ids("<|im_end|>")
    to_call, to_text = (turns.tokenizer.decode(turns.ids(["42"], role)) for role in ("", "user"))
    assert to_call == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert to_text == "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    alone = Turns(turns.tokenizer, DataConfig(system_prompt="Be brief"), [end], [], "tool", has_reply=True)
    assert alone.ids(["42"]) == turns.ids(["42"], "user")
    assert turns.tokenizer.decode(alone.opening("Hi<|im_end|>")) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert alone.opening("Hi<|im_end|>").count(end) == 2  # that of the system prompt, and the user's own


def test_half_a_character_is_escaped():
    turns = case(0)
    assert "a\\ud800b" in turns.tokenizer.decode(turns.ids(["a\ud800b"]))


def test_blanks_that_are_tokens_of_their_own_stay_in_answers():
    tokenizer = copy.deepcopy(tokenizer_for(templates.GEMMA))
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])  # as Gemma has it, whose template writes it
    turns = Turns(
        tokenizer, DataConfig(system_prompt=""), tokenizer.convert_tokens_to_ids(templates.STOPS), SCHEMAS, "user"
    )
    assert "a\nb" in tokenizer.decode(turns.ids(["a\nb"]))
