"""One row -> what it gives: a prompt, what the rewards see of it, for SFT the answer to learn; or why it gives none."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

from grpo.config import DataConfig
from grpo.config.user_files import load_function
from grpo.data.chat import Message
from grpo.data.sources import Row
from grpo.text import has_surrogates, one_line, shorten

# Of what a user's function raised.
SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Example:
    """What one row gives."""

    prompt: str | list[Message]
    """The user's message, or a list of messages with `role` and `content`."""
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the reward functions get, by the names they get it by."""
    completion: str = ""
    """The answer to learn (SFT)."""
    tools: list[Any] | None = None
    """Functions that the chat template may offer to the model, as JSON schemas."""

    @property
    def texts(self) -> list[str]:
        """Prompt and what belongs to it, as far as they are text."""
        messages = [self.prompt] if isinstance(self.prompt, str) else [m["content"] for m in self.prompt]
        others = [value for value in self.columns.values() if value != self.prompt] + [self.completion]
        return [text for text in (*messages, *others) if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]


class BadRow(Exception):
    """Why a row cannot be used; `absent` is the path of a column that it does not have at all."""

    def __init__(self, reason: str, absent: str = ""):
        super().__init__(reason)
        self.absent = absent


def row_reader(data: DataConfig, completion_column: str = "") -> RowReader:
    """The function that turns a row into an Example, or None where `data.row` leaves it out; it raises BadRow.

    completion_column: the answer to learn, for SFT. Raises ValueError, or whatever a user's file raises, if there is no
    such function `data.row`.
    """
    if data.row:
        return _own_reader(data.row, completion_column)

    def read(row: Row) -> Example:
        prompt = _prompt(value_at(row, data.prompt_column), data.prompt_column)
        completion = _text(value_at(row, completion_column), completion_column) if completion_column else ""
        columns = {}
        if not completion_column:
            paths = data.reward_columns.items()
            columns = {name: prompt if path == data.prompt_column else _value(row, path) for name, path in paths}
        tools = _tools(value_at(row, data.tools_column, None), data.tools_column) if data.tools_column else None
        return Example(prompt, columns, completion, tools)

    return read


def _own_reader(name: str, completion_column: str) -> RowReader:
    function = load_function(name, "data.row")

    def read(row: Row) -> Example | None:
        try:
            made = function(dict(row))
        except Exception as error:  # a user's function may raise anything; it is told with the row's number
            text = shorten(one_line(f"{type(error).__name__}: {error}"), SHOWN_CHARACTERS)
            raise BadRow(f"data.row raised {text}") from error
        if made is None:
            return None
        if not isinstance(made, dict) or "prompt" not in made:
            keys = f"the keys {', '.join(map(str, made))}" if isinstance(made, dict) else type(made).__name__
            raise BadRow(f"data.row gave {keys}, and not a dict with `prompt`, or None")
        prompt = _prompt(made["prompt"], "prompt")
        completion = _text(value_at(made, completion_column), completion_column) if completion_column else ""
        names = [name for name in made if name not in ("prompt", "tools")] if not completion_column else []
        tools = _tools(made.get("tools"), "tools")
        return Example(prompt, {name: _value(made, name) for name in names}, completion, tools)

    return read


_REQUIRED = object()
# A default that no data has.
ABSENT = object()


def value_at(row: Any, path: str, default: Any = _REQUIRED) -> Any:
    """What is at `path`: `a.b` entry b of the table in column a, `a.0` the first of a list, `a.:-1` all but its last.

    A column whose whole name is `path` comes first. Where there is none: `default`, or BadRow with `absent`.
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
            raise BadRow(f"column {path!r} is missing", absent=path) from None
    return value


def _value(row: Row, path: str) -> Any:
    """Any value but none at all."""
    value = value_at(row, path)
    if value is None or (isinstance(value, float) and math.isnan(value)):  # tables write NaN for what is missing
        raise BadRow(f"column {path!r} is missing")
    _check_surrogates(value, path)
    return value


def _text(value: Any, path: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise BadRow(f"column {path!r} is missing")
    if not isinstance(value, str):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"column {path!r} is empty")
    _check_surrogates(value, path)
    return value


def _prompt(value: Any, path: str) -> str | list[Message]:
    if not isinstance(value, list):
        return _text(value, path)
    if not value:
        raise BadRow(f"column {path!r} is empty")
    messages = [_message(message, f"column {path!r}, message {number}") for number, message in enumerate(value, 1)]
    _check_surrogates(messages, path)
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"column {path!r} ends with the assistant's answer, which is not a part of the prompt; take {path}.:-1"
        )
    return messages


def _message(message: Any, where: str) -> Message:
    """Without entries that are None, which a table adds to messages that lack what others have."""
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {type(message).__name__}, not a table with role and content")
    message = without_none(message)
    if not isinstance(message.get("role"), str):
        raise BadRow(f"{where} has no role")
    message.setdefault("content", "" if message.get("tool_calls") else None)
    if not isinstance(message["content"], str):
        raise BadRow(f"{where} has no text as content")
    return message


def _tools(value: Any, path: str) -> list[Any] | None:
    """A list of schemas, also from JSON text; none where there is none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"column {path!r} is text, but not JSON ({error})") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise BadRow(f"column {path!r} holds {type(value).__name__}, not a list of functions")
    _check_surrogates(value, path)
    return without_none(value)


def without_none(value: Any) -> Any:
    """Tables without their entries that are None, at any depth."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def _check_surrogates(value: Any, path: str) -> None:
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
