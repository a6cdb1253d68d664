"""Find the tool calls in what the model wrote, in one of three styles, and say to the model what is wrong with a call.

    hermes        <tool_call>{"name": "look", "arguments": {"place": "attic"}}</tool_call>, any number of them
    llama3_json   {"name": "look", "parameters": {"place": "attic"}} as the whole turn; several are separated by ;
    fence         the object of hermes in a Markdown block that begins with ```json; Qwen2.5-Coder writes calls this way

Left out: styles that write each argument in its own tag, as GLM and Qwen3-Coder do.
"""

import json
import math
import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# Style -> how a call is written, for messages
STYLES = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama3_json": '{"name": ..., "parameters": {...}}',
    "fence": '```json {"name": ..., "arguments": {...}} ```',
}
# Style -> the tags around a call
TAGS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "fence": ("```json", "```"),
}
THOUGHT = "<think>"
END_OF_THOUGHT = "</think>"
# Style -> what a call begins with. In llama3_json it begins with the turn or right after the thoughts.
OPENINGS = {style: f"(?P<call>{opening})" for style, (opening, _) in TAGS.items()}
OPENINGS["llama3_json"] = rf"(?:\A|{END_OF_THOUGHT})\s*(?P<call>(?:<\|python_tag\|>\s*)?)(?={{)"
MARKS = {style: re.compile(f"{opening}|{THOUGHT}|{END_OF_THOUGHT}") for style, opening in OPENINGS.items()}
ANY_TAG = {style: re.compile(f"{opening}|{closing}") for style, (opening, closing) in TAGS.items()}
BLANKS = re.compile(r"\s*")
BETWEEN_OBJECTS = re.compile(r"[;,\s]*")
# Values of arguments, to try out an environment or an agent
WORDS = ["attic", "box", "cellar", "door", "east", "find", "go", "7", "42"]
NUMBERS = range(1, 17)
VALUES = {"integer": NUMBERS, "number": NUMBERS, "boolean": [True, False], "array": [[]]}  # by JSON's types


def _finite(number: str) -> float:
    """Read a number of JSON. Raises ValueError for NaN, Infinity and 1e999, with which a reward would be no number."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


# Nesting of a call's arguments. Python reads and writes about 900 levels, fewer where more functions are at work.
MAX_LEVELS = 50
DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
# The arguments of a call, by name
Arguments = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: Arguments


def parse(text: str, style: str, tools: Collection[str] = ()) -> list[ToolCall | str]:
    """Read the calls of a turn in order. A text in place of a call says what is wrong with the call.

    tools: names of tools. In the styles without a tag of their own, JSON with a name may be an answer. It is a call if
    it has arguments or the name of a tool.

    Calls inside thoughts do not count, because a model may try things out there. A <think> without an end lasts until
    the end of the turn, and a </think> without a beginning ends a thought that began with the turn. Inside JSON texts
    neither these tags nor those of calls have a meaning.

    >>> parse('I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "hermes")
    [ToolCall(name='add', arguments={'a': 1, 'b': 2})]
    """
    calls = []
    position = 0
    in_thought = False
    while mark := MARKS[style].search(text, position):
        position = mark.end()
        if mark[0].startswith(END_OF_THOUGHT):
            if not in_thought:
                calls.clear()
            in_thought = False
        elif mark[0] == THOUGHT:
            in_thought = True
        if mark["call"] is None or in_thought:
            continue
        if style == "llama3_json":
            new_calls, position = _read_objects(text, position, tools)
        else:
            new_calls, position = _read_tagged(text, position, style, tools)
        calls += new_calls
    return calls


def written_call(name: str, arguments: Arguments, style: str) -> str:
    """Write a call as a model does, to try out an environment.

    >>> print(written_call("add", {"a": 1}, "hermes"))
    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>
    """
    if style == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments})
    opening, closing = TAGS[style]
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{opening}\n{call}\n{closing}"


def random_turn(tools: list[dict[str, Any]], style: str, draw: random.Random) -> str:
    """Write a call of one of the tools, with arguments of the right types; a word if there are no tools."""
    if not tools:
        return draw.choice(WORDS)
    function = draw.choice(tools)["function"]
    arguments = {}
    for name, parameter in function.get("parameters", {}).get("properties", {}).items():
        arguments[name] = draw.choice(parameter.get("enum") or VALUES.get(parameter.get("type"), WORDS))
    return written_call(function["name"], arguments, style)


def other_style(text: str, style: str, tools: Collection[str]) -> str:
    """Return a style other than `style` in which the turn calls one of `tools`; empty if it does not."""
    for other in STYLES:
        if other == style:
            continue
        for call in parse(text, other, tools):
            if isinstance(call, ToolCall) and call.name in tools:
                return other
    return ""


def style_of(template: str) -> str:
    """Return the style that a chat template asks the model for. Raises ValueError if it is not one of these."""
    if "<tool_call>" in template and not re.search("<function=|<arg_key>", template):
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama3_json"
    styles = "; ".join(f"{style} {form}" for style, form in STYLES.items())
    what = "asks for tool calls in an unknown form" if "tools" in template else "shows the model no tools"
    raise ValueError(
        f"the chat template {what}; choose a form of calls with --environment.calls, and describe it and the tools in "
        f"data.system_prompt. The forms are {styles}"
    )


def _is_call(text: str, tools: Collection[str]) -> bool:
    """Decide whether JSON, which may be broken, is a call and not an answer."""
    marks = ['"arguments"', '"parameters"', *map(json.dumps, tools)]
    return '"name"' in text and any(mark in text for mark in marks)


def _read_objects(
    text: str,
    position: int,
    tools: Collection[str],
) -> tuple[list[ToolCall | str], int]:
    """Read the JSON objects from `position` on. Returns their calls, and the position after them."""
    calls = []
    while text.startswith("{", position):
        start = position
        try:
            value, position = DECODER.raw_decode(text, start)
            call = _from_json(value)
        except (ValueError, RecursionError) as error:
            call = _complaint(error, "llama3_json")
            if position == start:
                position = len(text)
        if _is_call(text[start:position], tools):
            calls.append(call)
        position = BETWEEN_OBJECTS.match(text, position).end()
    return calls, position


def _read_tagged(
    text: str,
    start: int,
    style: str,
    tools: Collection[str],
) -> tuple[list[ToolCall | str], int]:
    """Read the call after an opening tag. Returns it, or nothing for a block that is not a call, and where it ends."""
    closing = TAGS[style][1]
    end = start
    problem = None
    try:
        after_blanks = BLANKS.match(text, start).end()
        value, end = DECODER.raw_decode(text, after_blanks)
        call = _from_json(value)
    except (ValueError, RecursionError) as error:
        problem = error
    tag = ANY_TAG[style].search(text, end)
    if style == "fence" and not _is_call(text[start : tag and tag.start()], tools):
        return [], end
    if tag is None or tag[0] != closing:
        return [_complaint(ValueError(f"it has no {closing}"), style)], end
    if not problem and text[end : tag.start()].strip():
        problem = ValueError(f"it has no {closing} right behind its object")
    if problem:
        call = _complaint(problem, style)
    return [call], tag.end()


def _complaint(error: Exception, style: str) -> str:
    """Tell the model why its call cannot be read, and how a call is written."""
    reason = str(error)
    if isinstance(error, json.JSONDecodeError | RecursionError):
        reason = f"it is no JSON, {reason}"
    return f"This call cannot be read: {reason}. Write {STYLES[style]}."


def _from_json(call: Any) -> ToolCall:
    """Make a call of a JSON value. Raises ValueError if the value is not a call."""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        raise ValueError("it names no tool")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = DECODER.decode(arguments)
    arguments = arguments or {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    if not _is_shallow(arguments, MAX_LEVELS):
        raise ValueError(f"its arguments are nested in more than {MAX_LEVELS} levels")
    return ToolCall(name, arguments)


def _is_shallow(value: Any, levels: int) -> bool:
    """Decide whether objects and lists are nested in at most `levels` levels."""
    if not isinstance(value, dict | list):
        return True
    entries = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(entry, levels - 1) for entry in entries)
