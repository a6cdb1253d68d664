"""One row -> what it gives: a prompt and what the rewards see of it, or a chat to learn (SFT); or why it gives none.

Left out of the formats: ShareGPT's `from` and `value`, images.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.user_files import load_function
from grpo.text import has_surrogates, reason_of

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


@dataclass(frozen=True)
class Example:
    """What one row gives."""

    prompt: str | list[Message] = ""
    """The user's message, or a list of messages with `role` and `content`; for GRPO."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What the reward functions get, by the names they get it by."""
    chat: list[Message] = field(default_factory=list)
    """What is to be learned (SFT): messages in their order; empty if it is plain text."""
    text: str = ""
    """Plain text to be learned, without turns."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the chat template may offer to the model, as JSON schemas."""

    @property
    def texts(self) -> list[str]:
        """All that the row says, as far as it is text."""
        messages = [message["content"] for message in (*as_messages(self.prompt), *self.chat)]
        columns = [value for value in self.columns.values() if value != self.prompt]
        return [text for text in (*messages, *columns, self.text) if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]
# How messages begin where a column holds them as text: as JSON, or as Python writes a list
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
# Of a text as template: the name of what stands there.
PLACEHOLDER = re.compile(r"\{(\w+)\}")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------


def row_reader(data: DataConfig) -> RowReader:
    """The function that turns a row into a prompt, or None where `data.row` leaves it out; it raises BadRow.

    Raises ValueError, or whatever a user's file raises, if there is no such function `data.row`.
    """
    if data.row:
        return _own_reader(data.row, _read_own_prompt)
    return functools.partial(_read_prompt, data.prompt_column, data.reward_columns, data.tools_column)


def _read_own_prompt(made: Row) -> Example:
    return _read_prompt("prompt", {name: name for name in made if name not in ("prompt", "tools")}, "tools", made)


def _read_prompt(prompt_column: str, columns: dict[str, str], tools_column: str, row: Row) -> Example:
    prompt = column_of(row, prompt_column, str, list)
    if as_messages(prompt)[-1]["role"] == "assistant":
        raise BadRow(
            f"column {prompt_column!r} ends with the assistant's answer, which is not a part of the prompt; take "
            f"{prompt_column}.:-1"
        )
    values = {name: prompt if path == prompt_column else column_of(row, path) for name, path in columns.items()}
    return Example(prompt, values, tools=tools_of(row, tools_column) if tools_column else None)


def teacher_prompt(example: Example, template: str) -> list[Message]:
    """The example's prompt as its teacher reads it: `template` stands in place of the last message of the user.

    {question} in it is that message, another {name} the column that rewards get by it. Raises BadRow for another name.
    """
    messages = as_messages(example.prompt)
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        raise BadRow("algorithm.teacher_template stands in place of a user's message, and the prompt has none")
    question = messages[places[-1]]
    values = example.columns | {"question": question["content"]}
    if unknown := [name for name in PLACEHOLDER.findall(template) if name not in values]:
        raise BadRow(
            f"algorithm.teacher_template has {{{unknown[0]}}}, which is none of {', '.join(values)}; name the column "
            "in data.columns"
        )
    # in one pass, so that nothing within a value is taken for a placeholder
    text = PLACEHOLDER.sub(lambda found: str(values[found[1]]), template)
    return [*messages[: places[-1]], question | {"content": text}, *messages[places[-1] + 1 :]]


def environment_of(columns: Mapping[str, Any], data: DataConfig, names: Collection[str]) -> str:
    """The name of a row's environment, empty if there is one for all. Raises BadRow if its column has another one."""
    if not data.environment_column:
        return ""
    name = columns.get(data.environment_column)
    if name not in [*names]:
        raise BadRow(f"column {data.environment_column!r} is {name!r}, and environment.classes has {', '.join(names)}")
    return name


def _own_reader(name: str, read: Callable[[Row], Example]) -> RowReader:
    """The user's function `data.row`, then `read` for the row that it makes. What it raises becomes BadRow."""
    function = load_function(name, "data.row")

    def read_own(row: Row) -> Example | None:
        try:
            made = function(dict(row))
        except Exception as error:  # a user's function may raise anything; it is told with the row's number
            raise BadRow(f"data.row raised {reason_of(error)}") from error
        if made is None:
            return None
        if not isinstance(made, dict):
            raise BadRow(f"data.row gave {type(made).__name__}, and not a dict, or None for no row")
        try:
            return read(made)
        except BadRow as error:
            raise BadRow(f"data.row gave the keys {', '.join(map(str, made)) or 'none'}: {error}") from error

    return read_own


# ---------------------------------------------------------------------------------------------------------------------
# Chats
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatColumns:
    """Where a row holds what is to be learned; each may be a path, see `value_at`."""

    prompt: str
    completion: str
    tools: str = "tools"

    @classmethod
    def of(cls, config: SFTConfig) -> "ChatColumns":
        """Those that the config names; what `data.row` makes has `prompt` for the user's message."""
        if config.data.row:
            return cls("prompt", config.completion_column)
        return cls(config.data.prompt_column, config.completion_column, config.data.tools_column or "tools")

    @property
    def of_format(self) -> dict[RowFormat, tuple[str, ...]]:
        """Row format -> the columns without which a row is not of it, in the order in which formats are tried."""
        return {
            "prompt_completion": (self.prompt, self.completion),
            "messages": ("messages",),
            "alpaca": ("instruction", "output"),
            "text": ("text",),
        }


def detect_format(rows: Iterable[Row], columns: ChatColumns) -> RowFormat | None:
    """The first row format that some of these rows have all columns for; None if there is none."""
    rows = list(rows)
    for name, needed in columns.of_format.items():
        if any(all(value_at(row, column, ABSENT) is not ABSENT for column in needed) for row in rows):
            return name
    return None


def no_format(names: Iterable[str], columns: ChatColumns) -> str:
    """The message about rows that have columns of these names, and no format."""
    choices = ", or ".join(" and ".join(needed) for needed in columns.of_format.values())
    return (
        f"the columns {', '.join(map(str, names)) or 'none'} are no row format; there must be {choices}; rename "
        "columns, or name those of --row-format prompt_completion with --data.prompt-column and --completion-column"
    )


def chat_reader(config: SFTConfig, row_format: RowFormat) -> RowReader:
    """The function that turns a row of this format into a chat, or None where `data.row` leaves it out.

    row_format: `auto` only with `data.row`, of which each row is looked at for itself.
    """
    read = functools.partial(read_chat, row_format, ChatColumns.of(config))
    return _own_reader(config.data.row, read) if config.data.row else read


def read_chat(row_format: RowFormat, columns: ChatColumns, row: Row) -> Example:
    """One row as a chat; `auto` takes the first format that it has all columns of. The row is left as it is.

    Raises BadRow, without the row's number, if the row does not hold what the format asks for.
    """
    if row_format == "auto" and (row_format := detect_format([row], columns)) is None:
        raise BadRow(no_format(row, columns))
    if row_format == "text":
        return Example(text=column_of(row, "text", str))
    if row_format == "alpaca":
        return Example(chat=_alpaca_chat(row))
    if row_format == "messages":
        chat = column_of(row, "messages", list)
    else:
        question, answer = (column_of(row, path, str, list) for path in (columns.prompt, columns.completion))
        chat = as_messages(question) + as_messages(answer, "assistant")
    return Example(chat=chat, tools=tools_of(row, columns.tools))


def _alpaca_chat(row: Row) -> list[Message]:
    """What an Alpaca row has of `system`, of the earlier questions and answers in `history`, and of its own turns.

    `input` stands below `instruction`.
    """
    chat = as_messages(column_of(row, "system", str), "system") if row.get("system") else []
    for number, turns in enumerate(_of_kind(row.get("history") or [], "column 'history'", list), 1):
        where = f"column 'history', entry {number}"
        if not isinstance(turns, list) or len(turns) != 2:
            raise BadRow(f"{where} is not a list of a question and its answer")
        question, answer = (_of_kind(text, where, str) for text in turns)
        chat += as_messages(question) + as_messages(answer, "assistant")
    parts = ["instruction", *(["input"] if row.get("input") else [])]
    question = "\n\n".join(column_of(row, part, str) for part in parts)
    chat += as_messages(question) + as_messages(column_of(row, "output", str), "assistant")
    _check_surrogates(chat, "column 'history'")
    return chat


# ---------------------------------------------------------------------------------------------------------------------
# What is in a row: values at column paths, texts, messages, tools
# ---------------------------------------------------------------------------------------------------------------------


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
    """What is at `path`, of one of these kinds: str is text, list is messages; none takes any value but no value.

    Messages may be JSON text, as CSV has them.
    """
    where = f"column {path!r}"
    value = value_at(row, path)
    if list in kinds and isinstance(value, str) and MESSAGES_AS_TEXT.match(value):
        value = _json(value, where)
    value = _of_kind(value, where, *(kinds or (object,)))
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
