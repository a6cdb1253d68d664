"""One row -> what it gives: a prompt and what the rewards see of it, or a chat to learn (SFT); or why it gives none.

Left out of the formats: ShareGPT's `from` and `value`, images, weights of single messages.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.config import DataConfig, RowFormat, SFTConfig
from grpo.config.user_files import load_function
from grpo.data.columns import ABSENT, BadRow, Message, Row, as_messages, column_of, tools_of, value_at
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
        messages = [message["content"] for message in (*as_messages(self.prompt), *self.chat)]
        columns = [value for value in self.columns.values() if value != self.prompt]
        return [text for text in (*messages, *columns, self.text) if text and isinstance(text, str)]


RowReader = Callable[[Row], Example | None]
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
        return Example(text=column_of(row, "text", str))
    if row_format == "alpaca":  # `input`, where there is one, stands below `instruction`
        parts = ["instruction", *(["input"] if row.get("input") else [])]
        question, answer = "\n\n".join(column_of(row, part, str) for part in parts), column_of(row, "output", str)
        return Example(chat=as_messages(question) + as_messages(answer, "assistant"))
    if row_format == "messages":
        chat = column_of(row, "messages", list)
    else:
        question, answer = (column_of(row, path, str, list) for path in (columns.prompt, columns.completion))
        chat = as_messages(question) + as_messages(answer, "assistant")
    return Example(chat=chat, tools=tools_of(row, columns.tools))
