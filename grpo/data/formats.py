"""Rows of supervised data in the formats that are in use -> chats: messages with roles, or plain text.

Left out: ShareGPT's `from` and `value`, images, weights of single messages.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.config import RowFormat
from grpo.data.columns import ABSENT, Message, messages_of, text_of, tools_of, value_at

TOOLS_COLUMN = "tools"


@dataclass(frozen=True)
class Chat:
    """What one row has to teach: messages, or a text without turns."""

    messages: list[Message]
    """In their order; empty if the row is plain text."""
    text: str = ""
    """Plain text."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the chat template offers to the model."""

    @property
    def texts(self) -> list[str]:
        """All that it says."""
        return [text for text in (self.text, *(message["content"] for message in self.messages)) if text]


@dataclass(frozen=True)
class Columns:
    """Where a row holds what; each may be a path, see `value_at`."""

    prompt: str
    completion: str
    tools: str = TOOLS_COLUMN

    def needed(self, row_format: RowFormat) -> tuple[str, ...]:
        """The columns without which a row is not of this format."""
        return {
            "prompt_completion": (self.prompt, self.completion),
            "messages": ("messages",),
            "alpaca": ("instruction", "output"),
            "text": ("text",),
        }[row_format]


def detect_format(rows: Iterable[Mapping[str, Any]], columns: Columns) -> RowFormat | None:
    """The row format that some of these rows have columns for; of several, the first in the order of `ROW_FORMATS`.

    None if there is none.
    """
    rows = list(rows)
    for name in ROW_FORMATS:
        needed = columns.needed(name)
        if any(all(value_at(row, column, ABSENT) is not ABSENT for column in needed) for row in rows):
            return name
    return None


def no_format(names: Iterable[str], columns: Columns) -> str:
    """What to tell about rows that have columns of these names, and no format."""
    choices = ", or ".join(" and ".join(columns.needed(name)) for name in ROW_FORMATS)
    return (
        f"the columns {', '.join(map(str, names)) or 'none'} are no row format; there must be {choices}; rename "
        "columns, or name those of prompt and completion"
    )


def row_to_chat(row: Mapping[str, Any], row_format: RowFormat, columns: Columns) -> Chat:
    """One row as a chat, read as `row_format`, which is not `auto`. The row is left as it is.

    Raises BadRow, without the row's number, if the row does not hold what the format asks for.
    """
    return ROW_FORMATS[row_format](row, columns)


def _from_prompt_completion(row: Mapping[str, Any], columns: Columns) -> Chat:
    """Each of the two columns holds a text, the user's and the assistant's, or messages."""
    messages = []
    for column, role in ((columns.prompt, "user"), (columns.completion, "assistant")):
        value = value_at(row, column)
        is_list = isinstance(value, list)
        messages += messages_of(value, column) if is_list else [{"role": role, "content": text_of(value, column)}]
    return Chat(messages, tools=_tools(row, columns))


def _from_messages(row: Mapping[str, Any], columns: Columns) -> Chat:
    """Column `messages`, and the tools if there are any."""
    return Chat(messages_of(value_at(row, "messages"), "messages"), tools=_tools(row, columns))


def _from_alpaca(row: Mapping[str, Any], columns: Columns) -> Chat:
    """`instruction` and, where there is one, `input` below it are the user's; `output` is the assistant's."""
    question = _text(row, "instruction")
    if row.get("input"):
        question = f"{question}\n\n{_text(row, 'input')}"
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}])


def _from_text(row: Mapping[str, Any], columns: Columns) -> Chat:
    return Chat([], text=_text(row, "text"))


# In the order in which `detect_format` tries them: the columns that the config names come first.
ROW_FORMATS: dict[RowFormat, Callable[[Mapping[str, Any], Columns], Chat]] = {
    "prompt_completion": _from_prompt_completion,
    "messages": _from_messages,
    "alpaca": _from_alpaca,
    "text": _from_text,
}


def _text(row: Mapping[str, Any], column: str) -> str:
    return text_of(value_at(row, column), column)


def _tools(row: Mapping[str, Any], columns: Columns) -> list[dict[str, Any]] | None:
    return tools_of(value_at(row, columns.tools, None), columns.tools)
