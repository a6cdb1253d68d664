"""Calls in what a model wrote: read, or told why not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.features.environments.calls import (
    STYLES,
    TAGS,
    ToolCall,
    other_style,
    parse,
    style_of,
    written_call,
)
from tests.unit import chat_templates as templates

LOOK = ToolCall("look", {"place": "attic"})
CALL = '{"name": "look", "arguments": {"place": "attic"}}'
HERMES = f"<tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize(
    "style, text, calls",
    [
        ("hermes", f"I look. {HERMES} and {HERMES}<think>Again?</think>{HERMES}", [LOOK] * 3),
        ("hermes", f"<think>\n<tool_call>x</think>{HERMES}", [LOOK]),
        ("hermes", HERMES.replace('{"place": "attic"}', '"{\\"place\\": \\"attic\\"}"'), [LOOK]),
        ("hermes", HERMES.replace('{"place": "attic"}', "null"), [ToolCall("look", {})]),
        ("hermes", f"The answer is 4. {CALL}", []),
        ("llama3_json", f" <|python_tag|>{CALL}; {CALL}\n", [LOOK, LOOK]),
        ("llama3_json", f"{CALL}</think>{CALL.replace('arguments', 'parameters')}", [LOOK]),
        ("llama3_json", f"I look: {CALL}", []),
        ("llama3_json", '{"name": "look"}', [ToolCall("look", {})]),
        ("llama3_json", '{"name": "Ada", "age": 36}', []),
        ("llama3_json", '{"name": "Ada", "age": 36', []),
        ("llama3_json", "{4}", []),
        ("fence", f"I look.\n```json\n{CALL}\n```\nThen:\n```json\n{CALL}\n```", [LOOK, LOOK]),
        ("fence", '```json\n{"name": "look"}\n```', [ToolCall("look", {})]),
        ("fence", '```json\n[{"name": "Ada"}]\n``` ```json\n{"answer": 4}\n``` ```python\nname = look()\n```', []),
    ],
)
def test_calls(style, text, calls):
    """In JSON without tags of its own, a name alone makes no call, unless it is a tool's."""
    assert parse(text, style, ["look"]) == calls


def with_place(place: str) -> str:
    """A call with an argument that is written so."""
    return HERMES.replace('"attic"', place)


@pytest.mark.parametrize(
    "style, text, words",
    [
        ("hermes", f"<tool_call>{CALL}", "it has no </tool_call>"),
        ("hermes", HERMES.replace("</", "}</"), "it has no </tool_call> right behind its object"),
        ("hermes", '<tool_call>["look"]</tool_call>', "it names no tool"),
        ("hermes", HERMES.replace('{"place": "attic"}', '["attic"]'), "its arguments are no object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "it is no JSON"),
        ("hermes", with_place('"</think>'), "it is no JSON, "),
        ("hermes", with_place("NaN"), "NaN is no finite number"),
        ("hermes", with_place("[-1e999]"), "-1e999 is no finite number"),
        ("hermes", HERMES.replace('{"place": "attic"}', '"{\\"place\\": Infinity}"'), "Infinity is no finite number"),
        ("hermes", with_place("[" * 50 + "]" * 50), "its arguments are nested in more than 50 levels"),
        ("llama3_json", CALL[:-1], "it is no JSON, Expecting ',' delimiter"),
        ("fence", f"```json\n{CALL}", "it has no ```"),
    ],
)
def test_calls_that_cannot_be_read(style, text, words):
    """The model is told what is wrong, and what to write."""
    (said,) = parse(text, style)
    assert said.startswith(f"This call cannot be read: {words}") and said.endswith(f"Write {STYLES[style]}.")


def test_one_bad_call_leaves_the_others():
    found = parse(f"<tool_call>{{</tool_call>{HERMES}", "hermes")
    assert isinstance(found[0], str) and found[1:] == [LOOK]


MARKS = ["<think>", "</think>", *(tag for tags in TAGS.values() for tag in tags), CALL, '"name"', '"', "\\", "{", "}"]
TEXT = st.lists(st.sampled_from(MARKS) | st.text(max_size=6), max_size=5).map("".join)


@given(st.sampled_from([*STYLES]), st.dictionaries(TEXT, st.none() | st.integers() | TEXT), TEXT)
def test_any_call_comes_back_except_in_thoughts_and_any_text_is_read_or_told(style, arguments, text):
    """Also a call whose texts have the tags of calls and of thoughts."""
    call = written_call("write", arguments, style)
    assert parse(call, style) == parse(f"<think>Hm.</think>{call}", style) == [ToolCall("write", arguments)]
    if "</think>" not in call:  # which would close a thought
        assert parse(f"<think>{call}", style) == []
        assert parse(f"<think>{call}</think>No.", style) == parse(f"{call}</think>No.", style) == []
        assert parse(f"<think>{call}</think>{call}", style) == [ToolCall("write", arguments)]
    assert all(isinstance(found, ToolCall | str) for found in parse(text, style))


@pytest.mark.parametrize("style", STYLES)
def test_a_call_in_another_style_is_noticed(style):
    """Not one of a tool that there is not, nor an answer that looks like a call."""
    turn = written_call("look", {"place": "attic"}, style)
    for read in STYLES:
        assert other_style(turn, read, ["look"]) == (style if read != style else "")
        assert other_style(turn, read, ["fly"]) == ""


def test_styles_of_templates():
    assert style_of(templates.QWEN2) == style_of(templates.QWEN3) == "hermes"
    assert style_of(templates.LLAMA) == "llama3_json"
    for template, what in (
        (templates.PLAIN, "shows the model no tools"),
        (templates.QWEN2 + "<function=", "asks for tool calls in an unknown form"),
    ):
        with pytest.raises(ValueError, match=f"{what}.*--environment.calls.*hermes <tool_call>"):
            style_of(template)
