"""Rows of each format as chats; rows that are none are told with what is wrong about them."""

import json
import re

import pytest

from grpo.config import DataConfig
from grpo.data.rows import BadRow, ChatColumns, Example, detect_format, no_format, read_chat, row_reader

USER, ASSISTANT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}


COLUMNS = ChatColumns("question", "answer")


def chat_of(row: dict, row_format: str = "auto") -> Example:
    return read_chat(detect_format([row], COLUMNS) if row_format == "auto" else row_format, COLUMNS, row)


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": [USER, ASSISTANT], "source": "x"}, [USER, ASSISTANT]),
        ({"question": "1+1?", "answer": "two"}, [USER, ASSISTANT]),
        ({"question": [USER], "answer": [ASSISTANT]}, [USER, ASSISTANT]),
        ({"question": [USER, ASSISTANT, USER], "answer": "two"}, [USER, ASSISTANT, USER, ASSISTANT]),
        ({"instruction": "1+1?", "input": "", "output": "two"}, [USER, ASSISTANT]),
        ({"instruction": "1+1?", "output": "two"}, [USER, ASSISTANT]),
        (
            {"instruction": "Add", "input": "1 and 1", "output": "two", "text": "all of it"},
            [{"role": "user", "content": "Add\n\n1 and 1"}, ASSISTANT],
        ),
    ],
)
def test_rows_with_turns(row, messages):
    assert chat_of(row) == Example(chat=messages)


def test_an_alpaca_row_may_have_a_system_prompt_and_earlier_turns():
    row = {"instruction": "and 2+2?", "output": "four", "system": "Be brief.", "history": [["1+1?", "two"]]}
    asked = [{"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "four"}]
    assert chat_of(row) == Example(chat=[{"role": "system", "content": "Be brief."}, USER, ASSISTANT, *asked])
    assert chat_of(row | {"system": "", "history": []}) == Example(chat=asked)
    with pytest.raises(BadRow, match="column 'history', entry 1 is not a list of a question and its answer"):
        chat_of(row | {"history": ["1+1?"]})


def test_messages_as_json_text_are_messages():
    """CSV can hold them no other way; how Python writes a list is refused."""
    for row in ({"messages": [USER, ASSISTANT]}, {"question": [USER], "answer": [ASSISTANT]}):
        assert chat_of({name: json.dumps(value) for name, value in row.items()}) == Example(chat=[USER, ASSISTANT])
        with pytest.raises(BadRow, match="column '(messages|question)' holds text that is not JSON"):
            chat_of({name: str(value) for name, value in row.items()})
    prompt = row_reader(DataConfig())({"question": json.dumps([USER]), "answer": "2"}).prompt
    assert prompt == [USER]
    for text in ("[1, 2]", '[{"a": 1}] is JSON', "role: user"):
        assert row_reader(DataConfig())({"question": text, "answer": "2"}).prompt == text


def test_the_first_format_that_fits_is_taken_unless_one_is_named():
    row = {"text": "t", "instruction": "i", "output": "o", "question": "q", "answer": "a", "messages": [USER]}
    expected = {
        "messages": Example(chat=[USER]),
        "prompt_completion": Example(chat=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
        "alpaca": Example(chat=[{"role": "user", "content": "i"}, {"role": "assistant", "content": "o"}]),
        "text": Example(text="t"),
    }
    assert {name: chat_of(row, name) for name in expected} == expected
    needed = {"prompt_completion": ["question"], "messages": ["messages"], "alpaca": ["output"], "text": ["text"]}
    for name, columns in needed.items():
        assert detect_format([{}, row], COLUMNS) == name
        row = {column: value for column, value in row.items() if column not in columns}
    assert detect_format([row], COLUMNS) is None
    told = no_format(row, COLUMNS)
    assert re.search("instruction, answer .* question and answer, .*messages, .*output, .*text", told), told


def test_columns_may_be_paths():
    row = {"messages": [USER, ASSISTANT, USER, {"role": "assistant", "content": "2"}], "also": {"tools": [{"a": 1}]}}
    columns = ChatColumns("messages.:-1", "messages.-1.content", "also.tools")
    assert detect_format([row], columns) == "prompt_completion"
    assert read_chat("prompt_completion", columns, row) == Example(chat=row["messages"], tools=[{"a": 1}])


def test_what_a_table_adds_to_messages_is_left_out():
    """A table gives each row every entry that any has; arguments of a call may be there as JSON text."""
    function = {"name": "add", "arguments": '{"b": 1, "a": null}'}
    call = {"id": "1", "type": "function", "function": function}
    row = {
        "messages": [
            {"role": "user", "content": "1+1?", "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call, {"name": "sub", "arguments": {"a": 1, "b": None}}],
            },
            {"role": "tool", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "!"}], "name": "add"},
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    before = repr(row)
    assert chat_of(row) == Example(
        chat=[
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": None}}},
                    {"name": "sub", "arguments": {"a": 1}},
                ],
            },
            {"role": "tool", "content": "2!", "name": "add"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    assert repr(row) == before
    assert chat_of({"messages": [USER], "tools": [{"name": "f", "default": None}]}).tools == [{"name": "f"}]
    assert chat_of({"messages": [USER], "tools": []}).tools is None


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [USER, "hi"]}, "message 2 holds str, not a table$"),
        (
            {"messages": [ASSISTANT | {"tool_calls": [{"function": {"arguments": "{a: 1}"}}]}]},
            "message 1, tool call 1, arguments holds text that is not JSON",
        ),
        ({"messages": [USER], "tools": "[" * 100_000}, "^column 'tools' holds text that is not JSON"),
        ({"messages": [USER], "tools": ["add"]}, "^column 'tools', entry 1 holds str, not a table$"),
    ],
)
def test_rows_that_are_no_chats(row, message):
    with pytest.raises(BadRow, match=message):
        chat_of(row)
