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
# What a value must be, as messages name it.
KINDS = {str: "text", list: "a list", dict: "a table"}


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


def column_of(row: Row, path: str, *kinds: type) -> Any:
    """What is at `path`, of one of these kinds: str is text, list is messages; none takes any value but no value."""
    where = f"column {path!r}"
    value = _of_kind(value_at(row, path), where, *(kinds or (object,)))
    if kinds and not (value.strip() if isinstance(value, str) else value):
        raise BadRow(f"{where} is empty")
    if list in kinds and isinstance(value, list):
        value = [_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]
    _check_surrogates(value, where)
    return value


def as_messages(prompt: str | list[Message], role: str = "user") -> list[Message]:
    """A prompt as messages; a text is the user's."""
    return [{"role": role, "content": prompt}] if isinstance(prompt, str) else prompt


def tools_of(row: Row, path: str) -> list[dict[str, Any]] | None:
    """What is at `path` as a list of JSON schemas, None where nothing is.

    It may be JSON text, since tables cannot hold schemas of several shapes.
    """
    value, where = value_at(row, path, None), f"column {path!r}"
    if isinstance(value, str) and value.strip():
        value = _json(value, where)
    if not value:
        return None
    for number, tool in enumerate(_of_kind(value, where, list), 1):
        _of_kind(tool, f"{where}, entry {number}", dict)
    _check_surrogates(value, where)
    return without_none(value)


def without_none(value: Any) -> Any:
    """Tables without their entries that are None, at any depth: a table gives every row the entries that any has."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def kinds_of(columns: dict[str, Any]) -> str:
    """The columns with the types of their values, such as `answer (str), level (number)`; whole or not is no type."""
    kinds = {name: "number" if type(value) in (int, float) else type(value).__name__ for name, value in columns.items()}
    return ", ".join(f"{name} ({kinds[name]})" for name in sorted(kinds)) or "none"


def _of_kind(value: Any, where: str, *kinds: type) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables write NaN for what is missing
        raise BadRow(f"{where} is missing")
    if not isinstance(value, kinds):
        raise BadRow(f"{where} holds {type(value).__name__}, not {' or '.join(KINDS[kind] for kind in kinds)}")
    return value


def _check_surrogates(value: Any, where: str) -> None:
    """No tokenizer, file or process takes a lone one, also not inside a list or table."""
    waiting = [value]  # not recursive: JSON may be nested as deep as Python's stack
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and has_surrogates(value):
            raise BadRow(f"{where} has a lone surrogate (half of a character)")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def _message(message: Any, where: str) -> Message:
    """A message as chat templates take it: content is text, the arguments of tool calls are tables."""
    message = without_none(_of_kind(message, where, dict))
    _of_kind(message.get("role"), f"{where}, role", str)
    calls = _of_kind(message.get("tool_calls") or [], f"{where}, tool_calls", list)
    content = message.get("content", "" if calls else None)
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    message = message | {"content": _of_kind(content, f"{where}, content", str)}
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{where}, tool call {n}") for n, call in enumerate(calls, 1)]
    return message


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With arguments as a table: chat templates turn them into JSON, and JSON text would be quoted once more."""
    call = _of_kind(call, where, dict)
    function = _of_kind(call.get("function", call), f"{where}, function", dict)
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": _json(function["arguments"], f"{where}, arguments")}
    return call | {"function": function} if "function" in call else function


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} holds text that is not JSON ({error})") from error
