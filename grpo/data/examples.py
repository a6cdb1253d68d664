"""One row -> what it gives: a prompt and what the rewards see of it, or a chat to learn (SFT); or why it gives none."""

import dataclasses
from collections.abc import Callable
from typing import Any

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.user_files import load_function
from grpo.data.columns import BadRow, Message, any_value, messages_of, text_of, tools_of, value_at
from grpo.data.formats import TOOLS_COLUMN, Chat, Columns, detect_format, no_format, row_to_chat
from grpo.data.sources import Row
from grpo.text import one_line, shorten

# Of what a user's function raised.
SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Example:
    """What one row gives."""

    prompt: str | list[Message] = ""
    """The user's message, or a list of messages with `role` and `content`."""
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the reward functions get, by the names they get it by."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the chat template may offer to the model, as JSON schemas."""
    chat: Chat | None = None
    """What is to be learned; for SFT, in place of a prompt and columns."""

    @property
    def texts(self) -> list[str]:
        """Prompt and what belongs to it, as far as they are text."""
        if self.chat:
            return self.chat.texts
        messages = [self.prompt] if isinstance(self.prompt, str) else [m["content"] for m in self.prompt]
        others = [value for value in self.columns.values() if value != self.prompt]
        return [text for text in (*messages, *others) if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]


def row_reader(data: DataConfig) -> RowReader:
    """The function that turns a row into a prompt, or None where `data.row` leaves it out; it raises BadRow.

    Raises ValueError, or whatever a user's file raises, if there is no such function `data.row`.
    """
    if data.row:
        own = _own_function(data.row)

        def read_own(row: Row) -> Example | None:
            made = own(row)
            if made is None:
                return None
            if "prompt" not in made:
                keys = ", ".join(map(str, made))
                raise BadRow(f"data.row gave the keys {keys}, and not a dict with `prompt`, or None")
            columns = {name: any_value(made, name) for name in made if name not in ("prompt", "tools")}
            return Example(_prompt(made["prompt"], "prompt"), columns, tools_of(made.get("tools"), "tools"))

        return read_own

    def read(row: Row) -> Example:
        prompt = _prompt(value_at(row, data.prompt_column), data.prompt_column)
        paths = data.reward_columns.items()
        columns = {name: prompt if path == data.prompt_column else any_value(row, path) for name, path in paths}
        tools = tools_of(value_at(row, data.tools_column, None), data.tools_column) if data.tools_column else None
        return Example(prompt, columns, tools)

    return read


def chat_columns(config: SFTConfig) -> Columns:
    """The columns that the rows of SFT are read from; what `data.row` makes has `prompt` for the user's message."""
    data = config.data
    if data.row:
        return Columns("prompt", config.completion_column)
    return Columns(data.prompt_column, config.completion_column, data.tools_column or TOOLS_COLUMN)


def chat_reader(config: SFTConfig, row_format: RowFormat) -> RowReader:
    """The same for SFT: a function that turns a row of this format into a chat.

    row_format: `auto` only with `data.row`, of which each row is looked at for itself.
    """
    columns = chat_columns(config)
    own = _own_function(config.data.row) if config.data.row else None

    def read(row: Row) -> Example | None:
        if own and (row := own(row)) is None:
            return None
        its_format = detect_format([row], columns) if row_format == "auto" else row_format
        if its_format is None:
            raise BadRow(f"data.row gave no chat: {no_format(row, columns)}")
        return Example(chat=row_to_chat(row, its_format, columns))

    return read


def _own_function(name: str) -> Callable[[Row], dict | None]:
    """The user's function; what it raises, and what is no dict, becomes BadRow."""
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
