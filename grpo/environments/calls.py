"""Calls of tools in what the model wrote, in one of four styles; what cannot be read becomes a sentence for the model.

    hermes        <tool_call>{"name": "look", "arguments": {"place": "attic"}}</tool_call>, any number of them
    llama3_json   {"name": "look", "parameters": {"place": "attic"}} as the whole turn; several with ; between them
    tag           <tool>look attic</tool>, or an object of arguments in place of the text; short enough for tiny models
    fence         the object of hermes in a block of Markdown that begins with ```json; Qwen2.5-Coder writes calls so

Left out: styles that write each argument in a tag of its own, as GLM and Qwen3-Coder do.
"""

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# Style -> how a call is written, for messages.
STYLES = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama3_json": '{"name": ..., "parameters": {...}}',
    "tag": "<tool>name argument</tool>",
    "fence": '```json {"name": ..., "arguments": {...}} ```',
}
TAGS = {"hermes": ("<tool_call>", "</tool_call>"), "tag": ("<tool>", "</tool>"), "fence": ("```json", "```")}
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
# Style -> what may begin a call: a tag, or an object with which the turn, or what follows its thoughts, begins
OPENINGS = {style: f"(?P<call>{opening})" for style, (opening, _) in TAGS.items()}
OPENINGS["llama3_json"] = rf"(?:\A|{END_OF_THOUGHT})\s*(?P<call>(?:<\|python_tag\|>\s*)?)(?={{)"
MARKS = {style: re.compile(f"{opening}|{THOUGHT}|{END_OF_THOUGHT}") for style, opening in OPENINGS.items()}
ENDS = {style: re.compile("|".join(tags)) for style, tags in TAGS.items()}
BLANKS, BETWEEN = re.compile(r"\s*"), re.compile(r"[;,\s]*")
NAME_OF_OBJECT = re.compile(r"\s*([^\s<]+)\s+(?={)")
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any] | str
    """By name; as text, the only argument of a tool that takes one."""


def parse(text: str, style: str) -> list[Call | str]:
    """Read the calls of a turn, in order, except those in its thoughts, where a model may try things out.

    A <think> that nothing closes goes on to the end; a </think> that nothing opened ends what began the turn. Inside a
    JSON text neither they nor the tags of calls mean anything. A text in place of a call says why that one cannot be
    read, and how it is written.
    """
    found: list[Call | str] = []
    at, is_thought = 0, False
    while mark := MARKS[style].search(text, at):
        at = mark.end()
        if mark[0].startswith(END_OF_THOUGHT):
            if not is_thought:
                found.clear()
            is_thought = False
        elif mark[0] == THOUGHT:
            is_thought = True
        if mark["call"] is not None and not is_thought:
            calls, at = _objects(text, at) if style == "llama3_json" else _in_tags(text, at, style)
            found += calls
    return found


def written_call(name: str, arguments: dict[str, Any], style: str) -> str:
    """A call as a model writes it, for trials."""
    if style == "tag":
        return f"<tool>{name} {json.dumps(arguments)}</tool>"
    call = json.dumps({"name": name, "parameters" if style == "llama3_json" else "arguments": arguments})
    if style == "llama3_json":
        return call
    opening, closing = TAGS[style]
    return f"{opening}\n{call}\n{closing}"


def other_style(text: str, style: str, tools: Collection[str]) -> str:
    """The style in which a turn calls one of `tools`, if it does so in another one than `style`; else empty."""
    for other in STYLES:
        calls = parse(text, other) if other != style else []
        if any(isinstance(call, Call) and call.name in tools for call in calls):
            return other
    return ""


def style_of(template: str) -> str:
    """The style that a chat template asks the model for. Raises ValueError if it is none of them."""
    if "<tool_call>" in template and not re.search("<function=|<arg_key>", template):
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama3_json"
    styles = "; ".join(f"{style}: {form}" for style, form in STYLES.items())
    raise ValueError(
        f"the chat template asks for calls of tools in no style that is known here ({styles}); say with "
        "--environment.calls which of them the model shall use, and in data.system_prompt how it is written"
    )


def _objects(text: str, at: int) -> tuple[list[Call | str], int]:
    """Read the objects at `at`, one behind the other; returns calls, and where they end."""
    found: list[Call | str] = []
    while text.startswith("{", at):
        start = at
        try:
            value, at = DECODER.raw_decode(text, start)
            call = _from_json(value)
        except (ValueError, RecursionError) as error:
            at = at if at > start else len(text)
            call = _unreadable(error, "llama3_json")
        if '"name"' in text[start:at]:  # else an object of its own, which may be an answer
            found.append(call)
        at = BETWEEN.match(text, at).end()
    return found, at


def _in_tags(text: str, start: int, style: str) -> tuple[list[Call | str], int]:
    """Read what an opening tag before `start` opens; returns the call, none if it is none, and where it ends."""
    closing, at, problem = TAGS[style][1], start, None
    try:
        if style == "tag":
            call, at = _tagged(text, start)
        else:
            value, at = DECODER.raw_decode(text, BLANKS.match(text, start).end())
            call = _from_json(value)
    except (ValueError, RecursionError) as error:
        problem = error
    end = ENDS[style].search(text, at)
    if style == "fence" and '"name"' not in text[start : end.start() if end else len(text)]:
        return [], at  # a block that is no call
    if end is None or end[0] != closing:
        return [_unreadable(ValueError(f"it has no {closing}"), style)], at
    if not problem and text[at : end.start()].strip():
        problem = ValueError(f"it has no {closing} right behind its object")
    return [_unreadable(problem, style) if problem else call], end.end()


def _unreadable(error: Exception, style: str) -> str:
    is_json = isinstance(error, json.JSONDecodeError | RecursionError)
    return f"This call cannot be read: {'it is no JSON, ' if is_json else ''}{error}. Write {STYLES[style]}."


def _tagged(text: str, start: int) -> tuple[Call, int]:
    """Read a name and an object, or else a name and the text up to the next tag; returns the call and its end."""
    if head := NAME_OF_OBJECT.match(text, start):
        with contextlib.suppress(ValueError, RecursionError):
            arguments, at = DECODER.raw_decode(text, head.end())
            at = BLANKS.match(text, at).end()
            if text.startswith(TAGS["tag"][1], at):
                return Call(head[1], arguments), at
    end = ENDS["tag"].search(text, start)
    body = text[start : end.start() if end else len(text)]
    name, rest = [*body.strip().split(maxsplit=1), "", ""][:2]
    if not name:
        raise ValueError("it names no tool")
    return Call(name, rest), start + len(body)


def _from_json(call: Any) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("it names no tool")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write the object as text
        arguments = json.loads(arguments)
    if not isinstance(arguments or {}, dict):
        raise ValueError("its arguments are no object")
    return Call(call["name"], arguments or {})
