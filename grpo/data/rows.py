"""One row -> an Example: a prompt and the columns for the rewards, or a chat to learn (SFT); else the reason why not.

Left out of the formats: ShareGPT's `from` and `value`, images.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.config import DataConfig, RowFormat
from grpo.config.user_files import load_function
from grpo.text import has_surrogates, reason_of

Row = Mapping[str, Any]
# One turn of a chat: role, content and whatever else the chat template reads, such as tool_calls or reasoning_content
Message = dict[str, Any]
Messages = list[Message]
# JSON schemas of functions that the model may call
Tools = list[dict[str, Any]]

# A default value that no data has
ABSENT = object()
# Kinds of values, as messages name them
KINDS = {str: "text", list: "a list", dict: "a table"}


class TableRow(dict[str, Any]):
    """A row of a table. Its tables and lists of tables have all entries that any row has, those it lacks as None."""


class BadRow(ValueError):
    """The reason why a row cannot be used."""


@dataclass(frozen=True)
class Example:
    """The content of one row, as far as a run uses it."""

    prompt: str | Messages = ""
    """The user's message, or a list of messages with `role` and `content`; for GRPO."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The columns for the reward functions, by the names of their arguments."""
    chat: Messages = field(default_factory=list)
    """The messages to learn (SFT), in order; empty if plain text is learned."""
    text: str = ""
    """Plain text to learn, without turns."""
    tools: Tools | None = None
    """Functions that the chat template may offer to the model, as JSON schemas."""

    @property
    def texts(self) -> list[str]:
        """List of all texts of the row."""
        messages = as_messages(self.prompt) + self.chat
        values = [message["content"] for message in messages]
        values += [value for value in self.columns.values() if value != self.prompt]
        values.append(self.text)
        return [value for value in values if value and isinstance(value, str)]


RowReader = Callable[[Row], Example | None]
# The beginning of messages that a column holds as text: JSON, or as Python writes a list
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
# Roles, in small letters, and what chat templates call them. A role that is not here may be a template's own.
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------


def row_reader(data: DataConfig) -> RowReader:
    """Return the function that makes an Example of a row, or None if `data.row` leaves it out. It raises BadRow.

    Raises what `load_function` raises if there is no function `data.row`.
    """
    if data.row:
        return _own_reader(data.row, _read_own_prompt)
    return functools.partial(
        _read_prompt,
        data.prompt_column,
        data.reward_columns,
        data.tools_column,
    )


def _read_own_prompt(row: Row) -> Example:
    """Read a row that `data.row` made: `prompt`, `tools`, and columns for the rewards."""
    columns = {name: name for name in row if name not in ("prompt", "tools")}
    return _read_prompt("prompt", columns, "tools", row)


def _read_prompt(
    prompt_column: str,
    columns: dict[str, str],
    tools_column: str,
    row: Row,
) -> Example:
    """Read a prompt, the columns for the rewards (name -> path) and the tools, if `tools_column` is not empty."""
    prompt = column_of(row, prompt_column, str, list)
    _check_end(as_messages(prompt), prompt_column)
    values = {}
    for name, path in columns.items():
        values[name] = prompt if path == prompt_column else column_of(row, path)
    tools = tools_of(row, tools_column) if tools_column else None
    return Example(prompt, values, tools=tools)


def _check_end(prompt: Messages, path: str) -> None:
    """Raise BadRow for a prompt that ends with the assistant's reply. path: the column that it is from."""
    if prompt[-1]["role"] == "assistant":
        raise BadRow(
            f"column {path!r} ends with the assistant's reply, which is not a part of the prompt; take {path}.:-1"
        )


def environment_of(
    columns: Mapping[str, Any],
    names: Collection[str],
) -> str:
    """Return the name of a row's environment, empty if all rows have the same. Raises BadRow for an unknown one."""
    if "" in names:
        return ""
    name = columns.get("environment")
    if name not in list(names):
        raise BadRow(f"column 'environment' is {name!r}, and environment.name has {', '.join(names)}")
    return name


def _own_reader(name: str, read: Callable[[Row], Example]) -> RowReader:
    """Return a function that calls the user's `data.row`, then `read` with the row that it makes.

    Whatever the user's function raises becomes BadRow.
    """
    function = load_function(name, "data.row")

    def read_own(row: Row) -> Example | None:
        """Read one row of the data."""
        try:
            own_row = function(dict(row))
        except Exception as error:  # a user's function may raise anything; the message has the row's number
            raise BadRow(f"data.row raised {reason_of(error)}") from error
        if own_row is None:
            return None
        if not isinstance(own_row, dict):
            raise BadRow(f"data.row gave {type(own_row).__name__}, and not a dict, or None for no row")
        try:
            return read(type(row)(own_row))
        except BadRow as error:
            keys = ", ".join(map(str, own_row)) or "none"
            raise BadRow(f"data.row gave the keys {keys}: {error}") from error

    return read_own


# ---------------------------------------------------------------------------------------------------------------------
# Chats
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatColumns:
    """The columns of what is to be learned; each may be a path, see `value_at`."""

    prompt: str
    completion: str
    tools: str = "tools"

    @classmethod
    def of(cls, data: DataConfig, completion: str) -> "ChatColumns":
        """Return the columns that `data` names. A row that `data.row` makes has `prompt` for the user's message."""
        if data.row:
            return cls("prompt", completion)
        return cls(data.prompt_column, completion, data.tools_column or "tools")

    @property
    def of_format(self) -> dict[RowFormat, tuple[str, ...]]:
        """Table of the columns that each row format needs, in the order in which formats are tried."""
        return {
            "prompt_completion": (self.prompt, self.completion),
            "messages": ("messages",),
            "alpaca": ("instruction", "output"),
            "text": ("text",),
        }


def detect_format(rows: Iterable[Row], columns: ChatColumns) -> RowFormat | None:
    """Return the first row format that some row has all columns for, or None."""
    rows = list(rows)
    for name, needed in columns.of_format.items():
        for row in rows:
            if all(value_at(row, column, ABSENT) is not ABSENT for column in needed):
                return name
    return None


def no_format(names: Iterable[str], columns: ChatColumns) -> str:
    """Write the message about rows whose columns, of these names, fit no format."""
    listed = ", ".join(map(str, names)) or "none"
    choices = ", or ".join(" and ".join(needed) for needed in columns.of_format.values())
    return (
        f"the columns {listed} are no row format; there must be {choices}; name those of prompt_completion with "
        "--data.prompt-column and --completion-column, or make other rows of them with --data.row"
    )


def chat_reader(own_function: str, row_format: RowFormat, columns: ChatColumns) -> RowReader:
    """Return the function that makes a chat of a row in this format, or None if `data.row` leaves the row out.

    own_function: `data.row`. row_format: can be `auto` with it only; then it is found out for each row.
    """
    read = functools.partial(read_chat, row_format, columns)
    return _own_reader(own_function, read) if own_function else read


def read_chat(row_format: RowFormat, columns: ChatColumns, row: Row) -> Example:
    """Read a row as a chat. `auto` takes the first format that the row has all columns for.

    Raises BadRow, without the row's number, if the row lacks something that the format needs.
    """
    if row_format == "auto":
        row_format = detect_format([row], columns)
        if row_format is None:
            raise BadRow(no_format(row, columns))
    if row_format == "text":
        return Example(text=column_of(row, "text", str))
    if row_format == "alpaca":
        return Example(chat=_alpaca_chat(row))
    if row_format == "messages":
        chat = column_of(row, "messages", list)
    else:
        question = column_of(row, columns.prompt, str, list)
        reply = column_of(row, columns.completion, str, list)
        before = as_messages(question)
        after = as_messages(reply, "assistant")
        _check_end(before, columns.prompt)
        if after[0]["role"] != "assistant":
            raise BadRow(
                f"column {columns.completion!r} begins with a message of the {after[0]['role']}, not of the assistant; "
                f"if it is a whole chat, take {columns.completion}.:-1 as the prompt and "
                f"{columns.completion}.-1.content as the completion, or make `messages` of it with --data.row"
            )
        chat = before + after
    return Example(chat=chat, tools=tools_of(row, columns.tools))


def _alpaca_chat(row: Row) -> Messages:
    """Read an Alpaca row: `system` if there is any, `instruction` with `input` below it, and `output`."""
    if optional(row, "history"):
        raise BadRow("column 'history' has earlier turns, which are not read; make `messages` of them with --data.row")
    chat = []
    if optional(row, "system"):
        chat += as_messages(column_of(row, "system", str), "system")
    question = column_of(row, "instruction", str)
    if optional(row, "input"):
        question += "\n\n" + column_of(row, "input", str)
    chat += as_messages(question)
    chat += as_messages(column_of(row, "output", str), "assistant")
    return chat


# ---------------------------------------------------------------------------------------------------------------------
# What is in a row: values at column paths, texts, messages, tools
# ---------------------------------------------------------------------------------------------------------------------


def value_at(row: Any, path: str, default: Any = None) -> Any:
    """Return the value at `path`, or `default` if there is none.

    `a.b` is entry b of the table in column a. `a.0` is the first entry of a list, `a.-1` the last, and `a.:-1` all
    except the last. A column with `path` as its whole name comes first.

    >>> row = {"chat": [{"content": "2 + 2?"}, {"content": "4"}]}
    >>> value_at(row, "chat.-1.content"), value_at(row, "chat.5.content", "none")
    ('4', 'none')
    """
    if path in row:
        return row[path]
    value = row
    for key in path.split("."):
        try:
            if isinstance(value, list) and key == ":-1":
                value = value[:-1]
            elif isinstance(value, list) and re.fullmatch(r"-?\d+", key):
                value = value[int(key)]
            elif isinstance(value, dict):
                value = value[key]
            else:
                return default
        except LookupError:
            return default
    return value


def optional(row: Row, path: str) -> Any:
    """Return the value at `path` of a column that a row may lack; None for NaN and blank text too."""
    value = value_at(row, path)
    is_blank = isinstance(value, str) and not value.strip()
    return None if is_blank or _is_missing(value) else value


def column_of(row: Row, path: str, *kinds: type) -> Any:
    """Return the value at `path`, which must be text (`str`) or messages (`list`) if kinds are given, and not empty.

    Without kinds any value will do, except a missing one. Messages may be JSON text, as in CSV.
    """
    where = f"column {path!r}"
    value = value_at(row, path)
    if list in kinds and isinstance(value, str) and MESSAGES_AS_TEXT.match(value):
        value = _from_json(value, where)
    _check_kind(value, where, *kinds)
    if kinds:
        content = value.strip() if isinstance(value, str) else value
        if not content:
            raise BadRow(f"{where} is empty")
        if isinstance(value, list):
            if isinstance(row, TableRow):
                value = without_missing(value)
            value = [_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]
    _check_surrogates(value, where)
    return value


def as_messages(prompt: str | Messages, role: str = "user") -> Messages:
    """Return a prompt as messages; a text becomes one message of `role`.

    >>> as_messages("2 + 2?")
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    if isinstance(prompt, str):
        return [{"role": role, "content": prompt}]
    return prompt


def tools_of(row: Row, path: str) -> Tools | None:
    """Return the JSON schemas at `path`, None if there are none.

    They may be JSON text, since a table cannot hold schemas of several shapes.
    """
    where = f"column {path!r}"
    value = optional(row, path)
    if isinstance(row, TableRow):
        value = without_missing(value)
    if isinstance(value, str):
        value = _from_json(value, where)
    if not value or _is_missing(value):  # JSON text may say NaN too
        return None
    _check_kind(value, where, list)
    for number, tool in enumerate(value, 1):
        _check_kind(tool, f"{where}, entry {number}", dict)
    _check_surrogates(value, where)
    return value


def without_missing(value: Any) -> Any:
    """Drop entries that are None or NaN, at any depth."""
    if isinstance(value, dict):
        return {key: without_missing(entry) for key, entry in _present(value).items()}
    if isinstance(value, list):
        return [without_missing(entry) for entry in value]
    return value


def _present(table: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are not None or NaN."""
    return {key: entry for key, entry in table.items() if not _is_missing(entry)}


def _is_missing(value: Any) -> bool:
    """Say whether there is no value: None, or NaN, which tables write for what is missing."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_kind(value: Any, where: str, *kinds: type) -> None:
    """Raise BadRow if the value is missing, or of none of these kinds, if any are given."""
    if _is_missing(value):
        raise BadRow(f"{where} is missing")
    if kinds and not isinstance(value, kinds):
        expected = " or ".join(KINDS[kind] for kind in kinds)
        raise BadRow(f"{where} holds {type(value).__name__}, not {expected}")


def _check_surrogates(value: Any, where: str) -> None:
    """Raise BadRow for half of a character, at any depth: no tokenizer, file or process takes one."""
    remaining = [value]  # not recursive: JSON may be nested as deep as Python's stack
    while remaining:
        value = remaining.pop()
        if isinstance(value, str) and has_surrogates(value):
            raise BadRow(f"{where} has a lone surrogate (half of a character)")
        if isinstance(value, dict):
            remaining += [*value, *value.values()]
        elif isinstance(value, list):
            remaining += value


def _message(message: Any, where: str) -> Message:
    """Return a message as chat templates take it: content is text, and the arguments of tool calls are tables."""
    _check_kind(message, where, dict)
    message = _present(message)
    if "from" in message and "role" not in message:
        raise BadRow(f"{where} has ShareGPT's from; make role and content of from and value with --data.row")
    role = message.get("role")
    _check_kind(role, f"{where}, role", str)
    usual_role = ROLES.get(role.lower(), role)
    if role != usual_role:
        raise BadRow(f"{where}, role is {role!r}, which chat templates call {usual_role!r}; rename it with --data.row")
    calls = message.get("tool_calls") or []
    _check_kind(calls, f"{where}, tool_calls", list)
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        texts = [str(part["text"]) for part in content if isinstance(part, dict) and "text" in part]
        if len(texts) < len(content):
            raise BadRow(
                f"{where}, content has {len(content)} parts, {len(content) - len(texts)} of them without `text`, such "
                "as images, which are not read; make one text of it with --data.row"
            )
        content = "\n".join(texts)  # as vLLM's server joins them
    _check_kind(content, f"{where}, content", str)
    message["content"] = content
    if calls:
        message["tool_calls"] = [
            _tool_call(call, f"{where}, tool call {number}") for number, call in enumerate(calls, start=1)
        ]
    return message


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments as a table: chat templates turn them into JSON, and would quote text again."""
    _check_kind(call, where, dict)
    call = _present(call)
    function = call.get("function", call)
    _check_kind(function, f"{where}, function", dict)
    function = _present(function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments, f"{where}, arguments")
        function |= {"arguments": arguments}
    if "function" in call:
        return call | {"function": function}
    return function


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} holds text that is not JSON ({error})") from error
