"""Rows of supervised data in the formats that are in use -> chats: messages with roles, or plain text.

Left out: ShareGPT's `from` and `value`, images, weights of single messages.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.config import RowFormat

# One turn: role and content, perhaps tool_calls, reasoning_content or whatever else the chat template reads.
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """What one row has to teach: messages, or a text without turns."""

    messages: list[Message]
    """In their order; empty if the row is plain text."""
    text: str = ""
    """Plain text."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the chat template offers to the model."""


def detect_format(columns: Collection[str], prompt_column: str, completion_column: str) -> RowFormat:
    """The row format that these columns speak for; of several, the first in the order of `ROW_FORMATS`.

    Raises ValueError if there is none.
    """
    needed = {
        "messages": ("messages",),
        "prompt_completion": (prompt_column, completion_column),
        "alpaca": ("instruction", "output"),
        "text": ("text",),
    }
    for name in ROW_FORMATS:
        if all(column in columns for column in needed[name]):
            return name
    choices = ", or ".join(" and ".join(names) for names in needed.values())
    raise ValueError(
        f"the columns {', '.join(columns) or 'none'} are no row format; there must be {choices}; rename columns, or "
        "name those of prompt and completion"
    )


def row_to_chat(row: Mapping[str, Any], row_format: RowFormat, prompt_column: str, completion_column: str) -> Chat:
    """One row as a chat; `auto` looks at the row's own columns. The row is left as it is.

    Raises ValueError, without the row's number, if the row does not hold what the format asks for.
    """
    if row_format == "auto":
        row_format = detect_format(row, prompt_column, completion_column)
    return ROW_FORMATS[row_format](row, prompt_column, completion_column)


def _from_messages(row: Mapping[str, Any], *_: str) -> Chat:
    """Column `messages`, and `tools` if there is one."""
    return Chat(_messages(row, "messages"), tools=_tools(row))


def _from_prompt_completion(row: Mapping[str, Any], prompt_column: str, completion_column: str) -> Chat:
    """Each of the two columns holds a text, the user's and the assistant's, or messages."""
    messages = []
    for column, role in ((prompt_column, "user"), (completion_column, "assistant")):
        if isinstance(row.get(column), list):
            messages += _messages(row, column)
        else:
            messages.append({"role": role, "content": _text(row, column)})
    return Chat(messages, tools=_tools(row))


def _from_alpaca(row: Mapping[str, Any], *_: str) -> Chat:
    """`instruction` and, where there is one, `input` below it are the user's; `output` is the assistant's."""
    question = _text(row, "instruction")
    if row.get("input"):
        question = f"{question}\n\n{_text(row, 'input')}"
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}])


def _from_text(row: Mapping[str, Any], *_: str) -> Chat:
    return Chat([], text=_text(row, "text"))


# In the order in which `detect_format` tries them.
ROW_FORMATS: dict[RowFormat, Callable[..., Chat]] = {
    "messages": _from_messages,
    "prompt_completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "text": _from_text,
}


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} " + ("is missing" if value is None else f"holds {_kind(value)}, not text"))
    if not value.strip():
        raise ValueError(f"column {column!r} is empty")
    return value


def _messages(row: Mapping[str, Any], column: str) -> list[Message]:
    value = row.get(column)
    if not isinstance(value, list):
        what = "is missing" if value is None else f"holds {_kind(value)}, not a list of messages"
        raise ValueError(f"column {column!r} {what}")
    if not value:
        raise ValueError(f"column {column!r} has no messages")
    return [_message(message, f"column {column!r}, message {number}") for number, message in enumerate(value, 1)]


def _message(message: Any, where: str) -> Message:
    """A message as chat templates take it: content is text, the arguments of tool calls are objects."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_kind(message)}, not an object with role and content")
    message = _without_none(message)
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} has no role")
    calls = message.get("tool_calls")
    content = message.get("content", "" if calls else None)
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} has no text as content")
    message = message | {"content": content}
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"{where}: tool_calls must be a list of objects")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """With arguments as an object: chat templates turn them into JSON, and JSON text would be quoted once more."""
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise ValueError(f"{where}: the function of a tool call is {_kind(function)}, not an object")
    if isinstance(function.get("arguments"), str):
        arguments = _json(function["arguments"], f"{where}: the arguments of a tool call")
        function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Column `tools`: a list of schemas, also as JSON text, since tables cannot hold schemas of several shapes."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "column 'tools'")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("column 'tools' does not hold a list of JSON schemas")
    return _without_none(tools)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} are text, but not JSON ({error})") from error


def _without_none(value: Any) -> Any:
    """Without the entries of objects that are None: a table gives every row the entries that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    return type(value).__name__
