"""One row -> what it gives: a prompt and what the rewards see of it, or a chat to learn (SFT); or why it gives none.

Left out of the formats: ShareGPT's `from` and `value`, images, weights of single messages.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.user_files import load_function
from grpo.data.columns import ABSENT, BadRow, Message, Row, any_value, messages_of, text_of, tools_of, value_at
from grpo.text import one_line, shorten

# Of what a user's function raised.
SHOWN_CHARACTERS = 200


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
        return functools.partial(_own_prompt, own_function(data.row))
    return functools.partial(_prompt_row, data)


def _prompt_row(data: DataConfig, row: Row) -> Example:
    prompt = _prompt(value_at(row, data.prompt_column), data.prompt_column)
    paths = data.reward_columns.items()
    columns = {name: prompt if path == data.prompt_column else any_value(row, path) for name, path in paths}
    tools = tools_of(value_at(row, data.tools_column, None), data.tools_column) if data.tools_column else None
    return Example(prompt, columns, tools=tools)


def _own_prompt(own: Callable[[Row], dict | None], row: Row) -> Example | None:
    made = own(row)
    if made is None:
        return None
    if "prompt" not in made:
        keys = ", ".join(map(str, made))
        raise BadRow(f"data.row gave the keys {keys}, and not a dict with `prompt`, or None")
    columns = {name: any_value(made, name) for name in made if name not in ("prompt", "tools")}
    return Example(_prompt(made["prompt"], "prompt"), columns, tools=tools_of(made.get("tools"), "tools"))


def own_function(name: str) -> Callable[[Row], dict | None]:
    """The user's function `data.row`; what it raises, and what is no dict, becomes BadRow."""
    function = load_function(name, "data.row")

    def call(row: Row) -> dict | None:
        try:
            made = function(dict(row))
        except Exception as error:  # a user's function may raise anything; it is told with the row's number
            text = shorten(one_line(f"{type(error).__name__}: {error}"), SHOWN_CHARACTERS)
            raise BadRow(f"data.row raised {text}") from error
        if made is not None and not isinstance(made, dict):
            raise BadRow(f"data.row gave {type(made).__name__}, and not a dict with `prompt`, or None")
        return made

    return call


def _prompt(value: Any, path: str) -> str | list[Message]:
    if not isinstance(value, list):
        return text_of(value, path)
    messages = messages_of(value, path)
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"column {path!r} ends with the assistant's answer, which is not a part of the prompt; take {path}.:-1"
        )
    return messages


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

    def needed(self, row_format: RowFormat) -> tuple[str, ...]:
        """The columns without which a row is not of this format."""
        return {
            "prompt_completion": (self.prompt, self.completion),
            "messages": ("messages",),
            "alpaca": ("instruction", "output"),
            "text": ("text",),
        }[row_format]


# In the order in which `detect_format` tries them: the columns that the config names come first.
ROW_FORMATS: tuple[RowFormat, ...] = ("prompt_completion", "messages", "alpaca", "text")


def detect_format(rows: Iterable[Row], columns: ChatColumns) -> RowFormat | None:
    """The first row format that some of these rows have all columns for; None if there is none."""
    rows = list(rows)
    for name in ROW_FORMATS:
        needed = columns.needed(name)
        if any(all(value_at(row, column, ABSENT) is not ABSENT for column in needed) for row in rows):
            return name
    return None


def no_format(names: Iterable[str], columns: ChatColumns) -> str:
    """The message about rows that have columns of these names, and no format."""
    choices = ", or ".join(" and ".join(columns.needed(name)) for name in ROW_FORMATS)
    return (
        f"the columns {', '.join(map(str, names)) or 'none'} are no row format; there must be {choices}; rename "
        "columns, or name those of prompt and completion"
    )


def chat_reader(config: SFTConfig, row_format: RowFormat) -> RowReader:
    """The function that turns a row of this format into a chat, or None where `data.row` leaves it out.

    row_format: `auto` only with `data.row`, of which each row is looked at for itself.
    """
    columns = ChatColumns.of(config)
    if config.data.row:
        return functools.partial(_own_chat, own_function(config.data.row), row_format, columns)
    return functools.partial(read_chat, row_format, columns)


def _own_chat(
    own: Callable[[Row], dict | None], row_format: RowFormat, columns: ChatColumns, row: Row
) -> Example | None:
    if (made := own(row)) is None:
        return None
    its_format = detect_format([made], columns) if row_format == "auto" else row_format
    if its_format is None:
        raise BadRow(f"data.row gave no chat: {no_format(made, columns)}")
    return read_chat(its_format, columns, made)


def read_chat(row_format: RowFormat, columns: ChatColumns, row: Row) -> Example:
    """One row as a chat, read as `row_format`, which is not `auto`. The row is left as it is.

    Raises BadRow, without the row's number, if the row does not hold what the format asks for.
    """
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
