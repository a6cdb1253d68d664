"""One row as a prompt or a chat, and the check of all rows before a run: which cannot be used, why, and the message."""

import contextlib
import datetime
import json
import re

import datasets
import pytest

from grpo.config import DataConfig, GRPOConfig, SFTConfig
from grpo.data.encode import EncodedRows
from grpo.data.prepare import load_chat_sources, load_sources, usable_chats, usable_prompts
from grpo.data.rows import (
    BadRow,
    ChatColumns,
    Example,
    TableRow,
    column_of,
    detect_format,
    no_format,
    read_chat,
    row_reader,
    value_at,
)
from tests.unit.data.test_data import word_tokenizer

GOOD = {"question": "1+2", "answer": "3"}
TOKENIZER = word_tokenizer()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(rows: tuple[dict, ...], table: bool, name: str = "f") -> str:
    """The rows as a file; in a table every row has every entry of every other row."""
    if table:
        datasets.Dataset.from_list(list(rows)).to_parquet(f"{name}.parquet")
        return f"{name}.parquet"
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return f"{name}.jsonl"


def checked(*rows: dict, table: bool = False, name: str = "f", **fields) -> EncodedRows:
    data = DataConfig(path=written(rows, table, name), **fields)
    return usable_prompts(load_sources(data), GRPOConfig(data=data, prompts_per_step=1), TOKENIZER)[0]


def fault(row: dict, **fields) -> str:
    """Why the row cannot be used, or nothing."""
    try:
        row_reader(DataConfig(**fields))(row)
    except BadRow as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "changes",
    [
        {"answer": float("nan")},
        {"answer": ["3", {"tests": ["a", "\ud800"]}]},
        {"answer": {"\ud800": 1}},
        {"question": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]},
    ],
)
def test_a_row_that_cannot_be_used(changes):
    """The last ends with the answer; test_malformed_data.py has many more."""
    assert fault(GOOD | changes).startswith(f"column '{next(iter(changes))}' ")


@pytest.mark.parametrize("answer", ["", 3, 0, 0.5, False, "👍 ü", [], [None, "3"], {"a": None}, {"a": [["b"]]}])
def test_values_that_a_reward_may_get(answer):
    assert row_reader(DataConfig())(GOOD | {"answer": answer}).columns == {"question": "1+2", "answer": answer}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a.b", 1),
        ("a.c.0.d", 2),
        ("a.c.-1", 3),
        ("a.c.:-1", [{"d": 2}]),
        ("x.y", "the column of that name"),
    ],
)
def test_a_path_leads_into_tables_and_lists(path, value):
    row = {"a": {"b": 1, "c": [{"d": 2}, 3]}, "x.y": "the column of that name", "x": {"y": "not this"}}
    assert value_at(row, path) == value


@pytest.mark.parametrize("path", ["b", "a.x", "a.c.7", "a.c.d", "a.b.c", "a.c.-3"])
def test_a_path_that_leads_nowhere(path):
    row = {"a": {"b": 1, "c": [2, 3]}}
    with pytest.raises(BadRow, match=f"column '{path}' is missing"):
        column_of(row, path)
    assert value_at(row, path) is None


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    ("missing", "fields"),
    [
        ("prompt", {"prompt_column": "prompt"}),
        ("reward_model.truth", {"answer_column": "reward_model.truth"}),
        ("tool", {"tools_column": "tool"}),
    ],
)
def test_a_column_that_no_row_has(table: bool, missing: str, fields: dict):
    row = GOOD | {"reward_model": {"ground_truth": "3", "style": "rule"}, "tools": ["x"]}
    with pytest.raises(ValueError) as refused:
        checked(row, row, table=table, **fields)
    message = str(refused.value)
    assert message.startswith(
        f"column {missing!r} is missing in f.{'parquet' if table else 'jsonl'}; columns there: que"
    )
    assert "reward_model.style" in message or missing == "tool"


def test_mixed_types_in_a_nested_column_are_one_clear_line():
    def row(truth) -> dict:
        return {"question": "1+2", "reward_model": {"ground_truth": truth}}

    rows = [row("3"), row(3), row("4"), row(["5"]), row("6")]
    with pytest.raises(ValueError) as refused:
        checked(*rows, answer_column="reward_model.ground_truth")
    assert re.search(
        "2 of 5 rows.* row 2: .*answer .number.*, .* row 4: .*answer .list.*, .*bad-rows skip$", str(refused.value)
    )
    assert checked(*rows, answer_column="reward_model.ground_truth", bad_rows="skip").usable == [0, 2, 4]
    assert checked(row(3), row(3.5), answer_column="reward_model.ground_truth").usable == [0, 1]  # both are numbers


def test_deep_rows_neither_pass_unseen_nor_end_the_check():
    deep = "\ud800"
    for _ in range(900):
        deep = [deep]
    assert "surrogate" in fault(GOOD | {"answer": deep})


def test_bad_rows_are_refused_with_their_numbers():
    rows = [GOOD, {"question": ""}, GOOD, *[{"question": "1+2", "answer": None}] * 6]
    with pytest.raises(ValueError) as refused:
        checked(*rows)
    message = str(refused.value)
    assert re.match(r"7 of 9 rows of f.jsonl .*row 2: .*'question'.*rows 4, 5, 6, 7, 8, ..: .*'answer'", message)
    assert "\n" not in message and message.endswith("--data.bad-rows skip")


def test_bad_rows_are_skipped_and_counted(capsys):
    found = checked(GOOD, {"question": "1+2"}, GOOD, name="f\x1b[2J", bad_rows="skip")
    assert found.usable == [0, 2]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: 1 of 3 rows of f\\x1b\[2J.jsonl .*row 2: .*'answer'.* left out$", first)
    assert second.endswith("left out: 1 that cannot be used")
    checked(GOOD, bad_rows="skip")
    out = capsys.readouterr().out
    assert "warning" not in out and "left out" not in out


def test_values_that_json_cannot_hold_are_told():
    rows = [GOOD | {"day": datetime.date(2024, 1, day)} for day in (1, 2)]
    with pytest.raises(ValueError, match="2 of 2 rows of f.parquet .* rows 1, 2: .*what JSON cannot .*date"):
        checked(*rows, table=True, columns={"day": "day"})


# ---- one row as a chat

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


def test_an_alpaca_row_may_have_a_system_prompt_and_no_earlier_turns():
    row = {"instruction": "1+1?", "output": "two", "system": "Be brief.", "history": []}
    assert chat_of(row) == Example(chat=[{"role": "system", "content": "Be brief."}, USER, ASSISTANT])
    assert chat_of(row | {"system": ""}) == Example(chat=[USER, ASSISTANT])
    with pytest.raises(BadRow, match="column 'history' has earlier turns.*--data.row"):
        chat_of(row | {"history": [["0+1?", "one"]]})


@pytest.mark.parametrize("nothing", [None, float("nan"), "", " \n", []])
def test_an_optional_column_may_hold_nothing(nothing):
    """Tables write NaN for what is missing."""
    alpaca = {"instruction": "1+1?", "output": "two"}
    for column in ("input", "system", "history"):
        assert chat_of(alpaca | {column: nothing}) == Example(chat=[USER, ASSISTANT])
    assert chat_of({"messages": [USER, ASSISTANT], "tools": nothing}) == Example(chat=[USER, ASSISTANT])
    row = GOOD | {"tool": nothing}
    assert row_reader(DataConfig(tools_column="tool"))(row).tools is None


def test_an_entry_of_a_message_may_be_nan():
    messages = [USER | {"name": float("nan")}, ASSISTANT | {"tool_calls": float("nan")}]
    assert chat_of({"messages": messages, "tools": "NaN"}) == Example(chat=[USER, ASSISTANT])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [{"from": "human", "value": "1+1?"}]}, "message 1 has ShareGPT's from; .*--data.row"),
        ({"messages": '[{"from": "human", "value": "1+1?"}]'}, "message 1 has ShareGPT's from; .*--data.row"),
        ({"messages": [{"role": "user", "value": "1+1?"}]}, "message 1 has ShareGPT's value; .*--data.row"),
        ({"messages": [USER, ASSISTANT | {"role": "gpt"}]}, "message 2, role is 'gpt', which .* call 'assistant'"),
        ({"messages": [USER | {"role": "User"}]}, "message 1, role is 'User', which .* call 'user'.*--data.row"),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "1"}, {"type": "image"}]}]},
            "2 parts, 1 of them wi",
        ),
        (
            {"question": "1+1?", "answer": [USER, ASSISTANT]},
            "'answer' begins with a message of the user.*answer.:-1 as",
        ),
        ({"question": [USER, ASSISTANT], "answer": "!"}, "'question' ends with the assistant's .* take question.:-1"),
    ],
)
def test_chats_of_other_shapes_are_refused_with_the_way_out(row: dict, message: str):
    """They would have no label, or the question twice, or two answers in a row."""
    with pytest.raises(BadRow, match=message):
        chat_of(row)


def test_a_role_may_be_a_templates_own():
    assert chat_of({"messages": [USER | {"role": "environment"}]}).chat == [USER | {"role": "environment"}]


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
    assert chat_of(TableRow(row)) == Example(
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
            {"role": "tool", "content": "2\n!", "name": "add"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    assert repr(row) == before
    (_, turn, _) = chat_of(row).chat
    assert turn["tool_calls"][1] == {"name": "sub", "arguments": {"a": 1, "b": None}}  # in JSON lines it is meant
    tools = [{"name": "f", "default": None}]
    assert chat_of(TableRow({"messages": [USER], "tools": tools})).tools == [{"name": "f"}]
    assert chat_of({"messages": [USER], "tools": tools}).tools == tools
    as_text = '[{"name": "f", "default": null}]'  # in which no table has added anything
    assert chat_of({"messages": [USER], "tools": as_text}).tools == [{"name": "f", "default": None}]
    assert chat_of({"messages": [USER], "tools": []}).tools is None


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [USER], "tools": "[" * 100_000}, "^column 'tools' holds text that is not JSON"),
        ({"messages": [USER], "tools": ["add"]}, "^column 'tools', entry 1 holds str, not a table$"),
    ],
)
def test_tools_that_are_no_schemas(row, message):
    with pytest.raises(BadRow, match=message):
        chat_of(row)


# ---- a function of the user's


@pytest.fixture
def own(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"def rows(row):\n    {body}\n")
        return f"{path}:rows"

    return write


def test_an_own_function_makes_prompt_and_columns_and_leaves_rows_out(own, capsys):
    name = own(
        "return None if row['level'] > 2 else "
        "{'prompt': row['q'].strip(), 'answer': row['a'][-1], 'level': row['level']}"
    )
    rows = [{"q": f" {i}? ", "a": ["x", str(i)], "level": i} for i in range(5)]
    found = checked(*rows, row=name)
    assert found.usable == [0, 1, 2]
    assert f"left out: 2 left out by {name}\n" in capsys.readouterr().out
    prompt = found.prompt(2, 0)
    assert prompt.content == "2?" and prompt.columns == {"answer": "2", "level": 2}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['no']", "rows 1, 2: data.row raised KeyError: 'no'"),
        ("return [row]", "rows 1, 2: data.row gave list, and not a dict, or None"),
        ("return row", "rows 1, 2: data.row gave the keys question, answer: column 'prompt' is missing"),
        ("return {'prompt': 3}", "rows 1, 2: data.row gave the keys prompt: column 'prompt' holds int, not text"),
        ("return None", "0 of 2 rows of f.jsonl are left: 2 left out by "),
    ],
)
def test_an_own_function_that_fails_is_told_with_the_row(own, body, message):
    with pytest.raises(ValueError) as refused:
        checked(GOOD, GOOD, row=own(body))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_an_own_function_gives_the_same_columns_for_all_rows(own):
    name = own("return {'prompt': 'p', **({'level': 1} if row['question'] else {})}")
    with pytest.raises(ValueError, match="row 2: its columns are none, and in most rows level .number."):
        checked(GOOD, GOOD | {"question": ""}, row=name)


# ---- chats of a source


def chats(*rows: dict, table: bool = False, row_format: str = "auto", **fields) -> EncodedRows:
    data = DataConfig(path=written(rows, table), system_prompt="", **fields)
    config = SFTConfig(data=data, row_format=row_format, sequences_per_step=1, train_on="all")
    return usable_chats(load_chat_sources(config), config, TOKENIZER)[0]


def texts_of(found: EncodedRows) -> list[str]:
    return [TOKENIZER.decode(found.get(row).ids) for row in found.usable]


@pytest.mark.parametrize("table", [False, True])
def test_the_first_rows_decide_the_format_of_a_source(table, capsys):
    rows = [{"text": None, "instruction": "add", "output": "yes"}, {"text": "Be brief", "instruction": "sub"}]
    with pytest.raises(ValueError, match="1 of 2 rows of f.* cannot be used: row 2: column 'output' is missing"):
        chats(*rows, table=table)
    assert " has instruction and output, so its row_format is alpaca\n" in capsys.readouterr().out
    assert chats(*rows, table=table, bad_rows="skip").usable == [0]
    assert texts_of(chats(*rows, table=table, bad_rows="skip", row_format="text")) == ["Be brief <eos>"]
    with pytest.raises(ValueError, match="column 'messages' is missing in f.*; columns there: text, instruction"):
        chats(*rows, table=table, row_format="messages")
    with pytest.raises(ValueError, match="f.*: the columns q, a are no row format; there must be question and com"):
        chats({"q": "1+1", "a": "2"}, table=table)


@pytest.mark.parametrize("table", [True, False])
def test_columns_that_are_not_read_are_told(table: bool, capsys):
    """GRPO reads tools and system prompts only where it is told to, and SFT no system prompt beside messages."""
    row = GOOD | {"reward_model": {"style": "rule"}, "tools": "[]", "system": "Be brief.", "none": None}
    checked(row, table=table, answer_column="reward_model.style")
    assert "has columns that are not read: answer, tools, system\n" in capsys.readouterr().out
    chats({"messages": [{"role": "user", "content": "add"}], "tools": "[]", "system": "Be brief."}, table=table)
    assert "has columns that are not read: system\n" in capsys.readouterr().out
    checked(GOOD, table=table)
    assert "not read" not in capsys.readouterr().out


def test_notes_about_rows_are_one_line_with_their_number(capsys):
    """And rows that are left out do not count."""
    row = GOOD | {"question": [{"role": "user", "content": "add", "mood": "glad"}]}
    plain = GOOD | {"question": [{"role": "user", "content": "add"}]}
    checked(plain, row, row, row | {"answer": None}, bad_rows="skip")
    lines = [line for line in capsys.readouterr().out.splitlines() if "bring" in line]
    assert lines == [
        "warning: 2 of 3 rows of f.jsonl:train bring mood, which the chat template of tiny does not write everywhere"
    ]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_token_that_the_model_has_no_row_for(is_chat):
    """n19 is token 29, the last one."""
    row = {"question": "add n19", "answer": "3", "completion": "yes"}
    data = DataConfig(
        path=written(({"question": "add", "answer": "3", "completion": "yes"}, row), False), system_prompt=""
    )
    for vocab_size in (30, 29):
        refuses = pytest.raises(ValueError, match="row 2: token 'n19' .29. is not among the model's vocab_size=29")
        with refuses if vocab_size == 29 else contextlib.nullcontext():
            if is_chat:
                config = SFTConfig(data=data, sequences_per_step=1)
                usable_chats(load_chat_sources(config), config, TOKENIZER, vocab_size)
            else:
                config = GRPOConfig(data=data, prompts_per_step=1)
                usable_prompts(load_sources(data), config, TOKENIZER, vocab_size=vocab_size)


def test_an_own_function_may_make_rows_of_any_format(own):
    name = own("return {'messages': [{'role': 'user', 'content': row['q']}]} if row['q'] else {'text': 'brief'}")
    assert texts_of(chats({"q": "add"}, {"q": ""}, row=name)) == ["<user> add", "brief <eos>"]


def test_an_own_function_that_makes_no_chat(own):
    with pytest.raises(ValueError, match="row 1: data.row gave the keys q: the columns q are no row format"):
        chats({"q": "1+1"}, row=own("return row"))
