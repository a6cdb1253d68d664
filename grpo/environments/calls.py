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
from collections.abc import Collection, Iterator
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
END_OF_THOUGHT, PYTHON_TAG = "</think>", "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any] | str
    """By name; as text, the only argument of a tool that takes one."""


def parse(text: str, style: str) -> list[Call | str]:
    """The calls in a turn, in order, none if there is none; behind thoughts alone, where a model may try things out.

    A text in place of a call says why that one cannot be read, and how it is written.
    """
    text = text.rpartition(END_OF_THOUGHT)[2]
    found: list[Call | str] = []
    for body in text.split(TAGS[style][0])[1:] if style in TAGS else _objects(text):
        try:
            if style in TAGS:
                body, closed, _ = body.partition(TAGS[style][1])
                if style == "fence" and '"name"' not in body:
                    continue  # a block that is no call
                if not closed:
                    raise ValueError(f"it has no {TAGS[style][1]}")
            found.append(_tagged(body) if style == "tag" else _from_json(body))
        except (ValueError, RecursionError) as error:
            is_json = isinstance(error, json.JSONDecodeError | RecursionError)
            why = f"it is no JSON, {error}" if is_json else error
            found.append(f"This call cannot be read: {why}. Write {STYLES[style]}.")
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


def _objects(text: str) -> Iterator[str]:
    """The JSON objects of a turn that is nothing else; text before the first, or behind the last, is no call."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    while text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)
        if '"name"' in text[:end]:  # else an object of its own, which may be an answer
            yield text[:end]
        text = text[end:].lstrip("; \n\t,")


def _tagged(body: str) -> Call:
    name, rest = [*body.strip().split(maxsplit=1), "", ""][:2]
    if not name:
        raise ValueError("it names no tool")
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(arguments := json.loads(rest), dict):
            return Call(name, arguments)
    return Call(name, rest)


def _from_json(body: str) -> Call:
    call = json.loads(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("it names no tool")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write the object as text
        arguments = json.loads(arguments)
    if not isinstance(arguments or {}, dict):
        raise ValueError("its arguments are no object")
    return Call(call["name"], arguments or {})
