"""One row -> what it gives: a prompt and what the rewards see of it, or a chat to learn (SFT); or why it gives none.

Left out of the formats: ShareGPT's `from` and `value`, images, weights of single messages.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.user_files import load_function
from grpo.data.columns import ABSENT, BadRow, Message, Row, any_value, messages_of, text_of, tools_of, value_at
from grpo.text import reason_of


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
        messages = self.chat if isinstance(self.prompt, str) else [*self.prompt, *self.chat]
        columns = [value for value in self.columns.values() if value != self.prompt]
        texts = (self.prompt, *(message["content"] for message in messages), *columns, self.text)
        return [text for text in texts if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]


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
    prompt = value_at(row, prompt_column)
    if not isinstance(prompt, list):
        prompt = text_of(prompt, prompt_column)
    elif (prompt := messages_of(prompt, prompt_column))[-1]["role"] == "assistant":
        raise BadRow(
            f"column {prompt_column!r} ends with the assistant's answer, which is not a part of the prompt; take "
            f"{prompt_column}.:-1"
        )
    values = {name: prompt if path == prompt_column else any_value(row, path) for name, path in columns.items()}
    tools = value_at(row, tools_column, None) if tools_column else None
    return Example(prompt, values, tools=tools_of(tools, tools_column))


def environment_of(columns: Mapping[str, Any], data: DataConfig, names: Collection[str]) -> str:
    """The name of a row's environment, empty if there is one for all. Raises BadRow if its column has another one."""
    name = columns.get(data.environment_column) if data.environment_column else ""
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
        "columns, or name those of prompt and completion"
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
        return Example(text=_text(row, "text"))
    if row_format == "alpaca":
        return Example(chat=_alpaca(row))
    tools = tools_of(value_at(row, columns.tools, None), columns.tools)
    if row_format == "messages":
        return Example(chat=messages_of(value_at(row, "messages"), "messages"), tools=tools)
    messages = []
    for column, role in ((columns.prompt, "user"), (columns.completion, "assistant")):
        value = value_at(row, column)
        is_list = isinstance(value, list)
        messages += messages_of(value, column) if is_list else [{"role": role, "content": text_of(value, column)}]
    return Example(chat=messages, tools=tools)


def _alpaca(row: Row) -> list[Message]:
    """`instruction` and, where there is one, `input` below it are the user's; `output` is the assistant's."""
    question = _text(row, "instruction")
    if row.get("input"):
        question = f"{question}\n\n{_text(row, 'input')}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}]


def _text(row: Row, column: str) -> str:
    return text_of(value_at(row, column), column)
