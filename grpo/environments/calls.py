"""Calls of tools in what the model wrote, in one of three styles; what cannot be read becomes a sentence for the model.

    hermes        <tool_call>{"name": "look", "arguments": {"place": "attic"}}</tool_call>, any number of them
    llama3_json   {"name": "look", "parameters": {"place": "attic"}} as the whole turn; several with ; between them
    tag           <tool>look attic</tool>, or an object of arguments in place of the text; short enough for tiny models

Left out: styles that write each argument in a tag of its own, as GLM and Qwen3-Coder do.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

# Style -> how a call is written, for messages.
STYLES = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama3_json": '{"name": ..., "parameters": {...}}',
    "tag": "<tool>name argument</tool>",
}
TAGS = {"hermes": ("<tool_call>", "</tool_call>"), "tag": ("<tool>", "</tool>")}
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
    return _whole_turn(text) if style == "llama3_json" else _between(text, style)


def written_call(name: str, arguments: dict[str, Any], style: str) -> str:
    """A call as a model writes it, for trials."""
    if style == "tag":
        return f"<tool>{name} {json.dumps(arguments)}</tool>"
    call = json.dumps({"name": name, "parameters" if style == "llama3_json" else "arguments": arguments})
    return call if style == "llama3_json" else f"<tool_call>\n{call}\n</tool_call>"


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


def _between(text: str, style: str) -> list[Call | str]:
    opener, closer = TAGS[style]
    found: list[Call | str] = []
    for part in text.split(opener)[1:]:
        body, closed, _ = part.partition(closer)
        if not closed:
            found.append(_unreadable(f"it has no {closer}", style))
        elif style == "tag":
            found.append(_tagged(body))
        else:
            found.append(_from_json(body, style))
    return found


def _whole_turn(text: str) -> list[Call | str]:
    """Calls by a turn that is nothing else; text before the first, or behind the last, is no call."""
    text, found = text.strip().removeprefix(PYTHON_TAG).strip(), []
    while text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            end = len(text)
        if '"name"' in text[:end]:  # else a JSON object of its own, which may be an answer
            found.append(_from_json(text[:end], "llama3_json"))
        text = text[end:].lstrip("; \n\t,")
    return found


def _tagged(body: str) -> Call | str:
    name, *more = body.split(maxsplit=1) or [""]
    rest = more[0].strip() if more else ""
    if not name:
        return _unreadable("it names no tool", "tag")
    try:
        arguments = json.loads(rest)
    except (ValueError, RecursionError):
        arguments = rest
    return Call(name, arguments if isinstance(arguments, dict) else rest)


def _from_json(body: str, style: str) -> Call | str:
    try:
        call = json.loads(body)
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):  # some models write the object as text
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is no JSON, {error}", style)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _unreadable("it names no tool", style)
    if not isinstance(arguments or {}, dict):
        return _unreadable("its arguments are no object", style)
    return Call(call["name"], arguments or {})


def _unreadable(why: str, style: str) -> str:
    return f"This call cannot be read: {why}. Write {STYLES[style]}."
