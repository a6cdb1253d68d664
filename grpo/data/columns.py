"""What is in a row: values at column paths, texts, messages, tools; or BadRow, which says why it cannot be used."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from grpo.text import has_surrogates

Row = Mapping[str, Any]
# One turn of a chat: role and content, perhaps tool_calls, reasoning_content or whatever else the chat template reads.
Message = dict[str, Any]

_REQUIRED = object()
# A default that no data has.
ABSENT = object()


class BadRow(ValueError):
    """Why a row cannot be used."""


def value_at(row: Any, path: str, default: Any = _REQUIRED) -> Any:
    """What is at `path`: `a.b` entry b of the table in column a, `a.0` the first of a list, `a.:-1` all but its last.

    A column whose whole name is `path` comes first. Where there is none: `default`, or BadRow.
    """
    if path in row:
        return row[path]
    value = row
    for part in path.split("."):
        try:
            if isinstance(value, dict):
                value = value[part]
            elif isinstance(value, list) and re.fullmatch(r"-?\d*:-?\d*", part):
                value = value[slice(*(int(end) if end else None for end in part.split(":")))]
            elif isinstance(value, list) and re.fullmatch(r"-?\d+", part):
                value = value[int(part)]
            else:
                raise KeyError(part)
        except LookupError:
            if default is not _REQUIRED:
                return default
            raise BadRow(f"column {path!r} is missing") from None
    return value


def any_value(row: Any, path: str) -> Any:
    """What is at `path`, whatever it is except nothing at all."""
    value = value_at(row, path)
    _check_there(value, path)
    check_surrogates(value, path)
    return value


def text_of(value: Any, path: str) -> str:
    """The value of column `path`, which must be text with something in it."""
    _check_there(value, path)
    if not isinstance(value, str):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"column {path!r} is empty")
    check_surrogates(value, path)
    return value


def messages_of(value: Any, path: str) -> list[Message]:
    """The value of column `path`, which must be a list of messages."""
    _check_there(value, path)
    if not isinstance(value, list):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise BadRow(f"column {path!r} is empty")
    messages = [_message(message, f"column {path!r}, message {number}") for number, message in enumerate(value, 1)]
    check_surrogates(messages, path)
    return messages


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A prompt as messages; a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def tools_of(value: Any, path: str) -> list[dict[str, Any]] | None:
    """The value of column `path` as a list of JSON schemas, None where it is empty.

    It may be JSON text, since tables cannot hold schemas of several shapes.
    """
    if isinstance(value, str) and value.strip():
        value = _json(value, f"column {path!r} is text")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(f"column {path!r} holds no list of JSON schemas")
    check_surrogates(value, path)
    return without_none(value)


def without_none(value: Any) -> Any:
    """Tables without their entries that are None, at any depth: a table gives every row the entries that any has."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def check_surrogates(value: Any, path: str) -> None:
    """No tokenizer, file or process takes a lone one, also not inside a list or table."""
    waiting = [value]  # not recursive: JSON may be nested as deep as Python's stack
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and has_surrogates(value):
            raise BadRow(f"column {path!r} has a lone surrogate (half of a character)")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def kinds_of(columns: dict[str, Any]) -> str:
    """The columns with the types of their values, such as `answer (str), level (number)`; whole or not is no type."""
    kinds = {name: "number" if type(value) in (int, float) else type(value).__name__ for name, value in columns.items()}
    return ", ".join(f"{name} ({kinds[name]})" for name in sorted(kinds)) or "none"


def _check_there(value: Any, path: str) -> None:
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables write NaN for what is missing
        raise BadRow(f"column {path!r} is missing")


def _message(message: Any, where: str) -> Message:
    """A message as chat templates take it: content is text, the arguments of tool calls are tables."""
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {type(message).__name__}, not a table with role and content")
    message = without_none(message)
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no role")
    calls = message.get("tool_calls")
    content = message.get("content", "" if calls else None)
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"{where} has no text as content")
    message = message | {"content": content}
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(f"{where}: tool_calls must be a list of tables")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """With arguments as a table: chat templates turn them into JSON, and JSON text would be quoted once more."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise BadRow(f"{where}: the function of a tool call is {type(function).__name__}, not a table")
    if isinstance(function.get("arguments"), str):
        arguments = _json(function["arguments"], f"{where}: what a tool call has as arguments is text")
        function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what}, but not JSON ({error})") from error
