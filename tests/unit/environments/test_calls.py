"""Calls in what a model wrote: read, or told why not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.environments.calls import (
    STYLES,
    TAGS,
    UNKNOWN_STYLE,
    ToolCall,
    other_style,
    parse,
    style_of,
    written_call,
)
from tests.unit import chat_templates as templates

LOOK = ToolCall("look", {"place": "attic"})
CALL = '{"name": "look", "arguments": {"place": "attic"}}'


def call_of(place: str) -> str:
    """A call with an argument that JSON, or a number that is none, writes so."""
    return f'<tool_call>{{"name": "look", "arguments": {{"place": {place}}}}}</tool_call>'


@pytest.mark.parametrize(
    "style, text, calls",
    [
        ("hermes", "The answer is 4.", []),
        ("hermes", f"I look. <tool_call>\n{CALL}\n</tool_call>", [LOOK]),
        ("hermes", f"<tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>", [LOOK, LOOK]),
        ("hermes", f"<think>\n<tool_call>{CALL}</tool_call>?\n</think>No.", []),
        ("hermes", f"<think>\n<tool_call>x</think><tool_call>{CALL}</tool_call>", [LOOK]),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"attic\\"}"}</tool_call>', [LOOK]),
        ("hermes", '<tool_call>{"name": "look"}</tool_call>', [ToolCall("look", {})]),
        ("hermes", '<tool_call>{"name": "look", "arguments": null}</tool_call>', [ToolCall("look", {})]),
        ("hermes", f"{CALL}", []),
        ("llama3_json", '{"name": "look", "parameters": {"place": "attic"}}', [LOOK]),
        ("llama3_json", f" <|python_tag|>{CALL}; {CALL}\n", [LOOK, LOOK]),
        ("llama3_json", f"I look: {CALL}", []),
        ("llama3_json", '{"answer": 4}', []),
        ("llama3_json", "{4}", []),
        ("tag", "<tool>look attic</tool>", [ToolCall("look", "attic")]),
        ("tag", "12*7: <tool> calculator  12 * 7 </tool>", [ToolCall("calculator", "12 * 7")]),
        ("tag", '<tool>look {"place": "attic"}</tool><tool>look</tool>', [LOOK, ToolCall("look", "")]),
        ("tag", "<tool>guess 8</tool>", [ToolCall("guess", "8")]),
        ("tag", "8 < 9", []),
        ("fence", f"I look.\n```json\n{CALL}\n```\nThen I know.", [LOOK]),
        ("fence", f"```json\n{CALL}\n```\n```json\n{CALL}\n```", [LOOK, LOOK]),
        ("fence", '```json\n{"answer": 4}\n```', []),
        ("hermes", f"<tool_call>{CALL}</tool_call><think>Again?</think><tool_call>{CALL}</tool_call>", [LOOK, LOOK]),
        ("llama3_json", f"<think>{CALL}</think>\n{CALL}", [LOOK]),
        ("llama3_json", f"{CALL}</think>{CALL}", [LOOK]),
        ("fence", "```python\nname = look()\n```", []),
        ("fence", '```json\n{"name": "look"}\n```', [ToolCall("look", {})]),
        ("fence", '```json\n{"name": "Ada", "age": 36}\n```', []),
        ("fence", '```json\n[{"name": "Ada"}, {"name": "Bob"}]\n```', []),
        ("llama3_json", '{"name": "look"}', [ToolCall("look", {})]),
        ("llama3_json", '{"name": "Ada", "age": 36}', []),
        ("llama3_json", '{"name": "Ada", "age": 36', []),
    ],
)
def test_calls(style, text, calls):
    """In JSON without tags of its own, a name alone makes no call, unless it is a tool's."""
    assert parse(text, style, ["look"]) == calls


@pytest.mark.parametrize(
    "style, text, words",
    [
        ("hermes", '<tool_call>{"name": "look", </tool_call>', "it is no JSON, Expecting property name"),
        ("hermes", f"<tool_call>{CALL}", "it has no </tool_call>"),
        ("hermes", '<tool_call>["look"]</tool_call>', "it names no tool"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "it names no tool"),
        ("hermes", '<tool_call>{"name": "look", "arguments": ["attic"]}</tool_call>', "its arguments are no object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "it is no JSON"),
        ("llama3_json", '{"name": "look", "parameters": {"place": "attic"}', "it is no JSON, Expecting ',' delimiter"),
        ("tag", "<tool> </tool>", "it names no tool"),
        ("tag", "<tool>look attic", "it has no </tool>"),
        ("hermes", f"<tool_call>{CALL}}}</tool_call>", "it has no </tool_call> right behind its object"),
        ("hermes", '<tool_call>{"text": "a </think> b"</tool_call>', "it is no JSON, Expecting ',' delimiter"),
        ("fence", f"```json\n{CALL}", "it has no ```"),
        ("fence", '```json\n{"name": "look", "arguments": {\n```', "it is no JSON"),
        ("hermes", call_of("NaN"), "NaN is no finite number"),
        ("hermes", call_of("[-1e999]"), "-1e999 is no finite number"),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"place\\": Infinity}"}</tool_call>', "Infinity is no"),
        ("hermes", call_of("[" * 50 + "]" * 50), "its arguments are nested in more than 50 levels"),
    ],
)
def test_calls_that_cannot_be_read(style, text, words):
    """The model is told what is wrong, and what to write."""
    (said,) = parse(text, style)
    assert said.startswith(f"This call cannot be read: {words}") and said.endswith(f"Write {STYLES[style]}.")


def test_one_bad_call_leaves_the_others():
    found = parse(f"<tool_call>{{</tool_call><tool_call>{CALL}</tool_call>", "hermes")
    assert isinstance(found[0], str) and found[1:] == [LOOK]


MARKS = ["<think>", "</think>", "```", "```json", *(tag for tags in TAGS.values() for tag in tags), '"', "\\", "}"]
TEXT = st.lists(st.sampled_from(MARKS) | st.text(max_size=6), max_size=5).map("".join)


@given(st.sampled_from([*STYLES]), st.dictionaries(TEXT, st.none() | st.integers() | TEXT))
def test_any_call_comes_back_except_in_thoughts(style, arguments):
    """Also one whose texts have the tags of calls and of thoughts."""
    call = written_call("write", arguments, style)
    assert parse(call, style) == parse(f"<think>Hm.</think>{call}", style) == [ToolCall("write", arguments)]
    if "</think>" not in call:  # which would close a thought
        assert parse(f"<think>{call}", style) == []
        assert parse(f"<think>{call}</think>No.", style) == parse(f"{call}</think>No.", style) == []
        assert parse(f"<think>{call}</think>{call}", style) == [ToolCall("write", arguments)]


@pytest.mark.parametrize("style", STYLES)
def test_a_call_in_another_style_is_noticed(style):
    """Not one of a tool that there is not, nor an answer that looks like a call."""
    turn = written_call("look", {"place": "attic"}, style)
    assert parse(turn, style) == [LOOK]
    for read in STYLES:
        assert other_style(turn, read, ["look"]) == (style if read != style else "")
        assert other_style(turn, read, ["fly"]) == ""


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("<tool_call>\n<function=look>\n<parameter=place>\nattic\n</parameter>\n</function>\n</tool_call>", "tag"),
        ('[look(place="attic"), look(place="box")]', "llama3_json"),
        ('<think>Hm.</think>\nlook(place="attic")', "hermes"),
        ('```tool_code\nlook(place="attic")\n```', "hermes"),
        ('[TOOL_CALLS]look{"place": "attic"}', "hermes"),
        ('<|tool_call>call:look{place:<|"|>attic<|"|>}<tool_call|>', "hermes"),
    ],
)
def test_a_call_as_other_models_write_it_is_noticed(text, style):
    assert parse(text, style, ["look"]) == [] and other_style(text, style, ["look"]) == UNKNOWN_STYLE
    assert "[TOOL_CALLS]" in text or other_style(text, style, ["fly"]) == ""
    for answer in ("I used look(place) and found 4.", "The call: look.", "Look (again)."):
        assert other_style(answer, style, ["look"]) == ""


@given(
    st.lists(
        st.sampled_from(
            ["<tool>", "</tool>", "<tool_call>", "</tool_call>", "```json", "```", "{", "}", CALL, '"name"', " "]
        )
    )
)
def test_any_text_is_read_or_told(parts):
    for style in STYLES:
        assert all(isinstance(found, ToolCall | str) for found in parse("".join(parts), style))


def test_styles_of_templates():
    assert style_of(templates.QWEN2) == style_of(templates.QWEN3) == "hermes"
    assert style_of(templates.LLAMA) == "llama3_json"
    for template in (templates.GEMMA, templates.PLAIN, templates.QWEN2 + "<function=", templates.QWEN2 + "<arg_key>"):
        shows_tools = "tools" in template
        what = "asks for tool calls in an unknown form" if shows_tools else "shows the model no tools"
        with pytest.raises(ValueError, match=f"{what}.*--environment.calls.*hermes <tool_call>"):
            style_of(template)
