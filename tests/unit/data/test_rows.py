"""One row as a prompt or a chat, and the check of all rows before a run: which cannot be used, why, and the message."""

import datetime
import json
import pathlib
import re

import datasets
import pytest

from grpo.config import DataConfig
from grpo.data.encode import EncodedRows, Encoder
from grpo.data.prepare import encode_sources, load_chat_sources
from grpo.data.rows import BadRow, ChatColumns, Example, TableRow, column_of, detect_format, read_chat, row_reader
from tests import write_lines
from tests.unit.data.test_data import prepared, word_tokenizer

GOOD = {"question": "1+2", "answer": "3"}
USER, ASSISTANT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}
COLUMNS = ChatColumns("question", "answer")
TOKENIZER = word_tokenizer()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(rows: tuple[dict, ...], table: bool, name: str = "f") -> str:
    """The rows as a file; in a table every row has every entry of every other row."""
    if table:
        datasets.Dataset.from_list(list(rows)).to_parquet(f"{name}.parquet")
        return f"{name}.parquet"
    return str(write_lines(pathlib.Path(f"{name}.jsonl"), rows))


def prompts(*rows: dict, table: bool = False, name: str = "f", **fields) -> EncodedRows:
    data = DataConfig(path=written(rows, table, name), **fields)
    return prepared(data, TOKENIZER)[0]


def chats(*rows: dict, table: bool = False, row_format: str = "auto", **fields) -> EncodedRows:
    data = DataConfig(path=written(rows, table), system_prompt="", **fields)
    sources = load_chat_sources(data, row_format, "completion")
    return encode_sources(sources, Encoder(TOKENIZER, data, 2048, "all"))[0]


def texts_of(found: EncodedRows) -> list[str]:
    return [TOKENIZER.decode(found.get(row).ids) for row in found.usable]


def chat_of(row: dict) -> Example:
    return read_chat("auto", COLUMNS, row)


# ---- One row


@pytest.mark.parametrize("answer", ["", 0, "👍 ü", [None, "3"], {"a": None}])
def test_values_that_a_reward_may_get(answer):
    assert row_reader(DataConfig())(GOOD | {"answer": answer}).columns == {"question": "1+2", "answer": answer}


def test_a_path_leads_into_tables_and_lists_or_nowhere():
    row = {"a": {"b": 1, "c": [{"d": 2}, 3]}, "x.y": "the column of that name", "x": {"y": "not this"}}
    paths = {"a.b": 1, "a.c.0.d": 2, "a.c.-1": 3, "a.c.:-1": [{"d": 2}], "x.y": "the column of that name"}
    assert {path: column_of(row, path) for path in paths} == paths
    for path in ("b", "a.x", "a.c.7", "a.c.d", "a.b.c", "a.c.-3"):
        with pytest.raises(BadRow, match=f"column '{path}' is missing"):
            column_of(row, path)


ALPACA = {"instruction": "1+1?", "output": "two"}


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"messages": [USER, ASSISTANT], "source": "x"}, [USER, ASSISTANT]),
        ({"messages": json.dumps([USER, ASSISTANT])}, [USER, ASSISTANT]),  # CSV can hold them no other way
        ({"messages": [USER | {"role": "environment"}]}, [USER | {"role": "environment"}]),  # a template's own role
        ({"question": [USER], "answer": "two"}, [USER, ASSISTANT]),
        (ALPACA | {"input": "Now", "text": "all"}, [USER | {"content": "1+1?\n\nNow"}, ASSISTANT]),
        (ALPACA | {"system": "Brief", "history": []}, [{"role": "system", "content": "Brief"}, USER, ASSISTANT]),
        # text parts are joined as a server joins them
        ({"messages": [USER | {"content": [{"text": "1+1?"}, {"text": "Now"}]}]}, [USER | {"content": "1+1?\nNow"}]),
    ],
)
def test_rows_with_turns(row, chat):
    assert chat_of(row) == Example(chat=chat)


@pytest.mark.parametrize("nothing", [None, float("nan"), " \n", []])
def test_an_optional_column_may_hold_nothing(nothing):
    """Tables write NaN for what is missing."""
    row = ALPACA | {"input": nothing, "system": nothing, "history": nothing}
    assert chat_of(row) == Example(chat=[USER, ASSISTANT])
    assert chat_of({"messages": [USER, ASSISTANT], "tools": nothing}) == Example(chat=[USER, ASSISTANT])
    assert row_reader(DataConfig(tools_column="tool"))(GOOD | {"tool": nothing}).tools is None


DEEP = json.loads("[" * 900 + '"\\ud800"' + "]" * 900)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        # they would have no label, or the question twice, or two answers in a row
        ({"messages": [{"from": "human", "value": "1+1?"}]}, "message 1 has ShareGPT's from; .*--data.row"),
        ({"messages": [USER, ASSISTANT | {"role": "gpt"}]}, "message 2, role is 'gpt', which .* call 'assistant'"),
        ({"messages": [USER | {"content": [{"text": "1"}, {"type": "image"}]}]}, "2 parts, 1 of them without `text`"),
        ({"question": "1+1?", "answer": [USER, ASSISTANT]}, "'answer' begins with a message of the user.*answer.:-1"),
        ({"question": [USER, ASSISTANT], "answer": "!"}, "'question' ends with the assistant's .* take question.:-1"),
        (ALPACA | {"history": [["0+1?", "one"]]}, "column 'history'"),
        ({"messages": str([USER, ASSISTANT])}, "column 'messages' holds text that is not JSON"),  # as Python writes it
        ({"messages": [USER], "tools": "[" * 100_000}, "^column 'tools'"),
        ({"messages": [USER], "tools": ["add"]}, "^column 'tools'"),
        ({"instruction": "i", "answer": "a"}, "instruction, answer .* question and answer, .*messages, .*output, .*te"),
    ],
)
def test_chats_of_other_shapes_are_refused_with_the_way_out(row, message):
    with pytest.raises(BadRow, match=message):
        chat_of(row)


def test_text_that_is_no_list_of_messages_is_a_question_and_deep_values_are_looked_through():
    for text in ("[1, 2]", '[{"a": 1}] is JSON', "role: user"):
        assert row_reader(DataConfig())({"question": text, "answer": "2"}).prompt == text
    with pytest.raises(BadRow, match="surrogate"):
        row_reader(DataConfig())(GOOD | {"answer": DEEP})


def test_the_first_format_that_fits_is_taken_and_its_columns_may_be_paths():
    row = {"text": "t", "instruction": "i", "output": "o", "question": "q", "answer": "a", "messages": [USER]}
    formats = {"prompt_completion": "question", "messages": "messages", "alpaca": "output", "text": "text"}
    for name, column in formats.items():
        assert detect_format([{}, row], COLUMNS) == name
        row.pop(column)
    assert detect_format([row], COLUMNS) is None
    row = {"messages": [USER, ASSISTANT, USER, {"role": "assistant", "content": "2"}], "also": {"tools": [{"a": 1}]}}
    columns = ChatColumns("messages.:-1", "messages.-1.content", "also.tools")
    assert detect_format([row], columns) == "prompt_completion"
    assert read_chat("prompt_completion", columns, row) == Example(chat=row["messages"], tools=[{"a": 1}])


def test_nulls_of_a_table_are_left_out_and_those_of_json_stay():
    """A table gives each row every entry that any has. In JSON, a null directly in a message or call means none."""
    arguments = {"a": 1, "b": None}
    turn = {"role": "assistant", "content": None, "name": None, "tool_calls": [{"name": "f", "arguments": arguments}]}
    row = {"messages": [turn], "tools": [{"name": "f", "default": None}]}
    before = repr(row)
    for kind, kept in ((dict, arguments), (TableRow, {"a": 1})):
        example = chat_of(kind(row))
        call = {"name": "f", "arguments": kept}
        assert example.chat == [{"role": "assistant", "content": "", "tool_calls": [call]}]
        assert example.tools == [{"name": "f"} | ({"default": None} if kind is dict else {})]
    assert repr(row) == before
    turn["tool_calls"][0]["arguments"] = json.dumps(arguments)  # to which no table has added anything
    assert chat_of(TableRow(row)).chat[0]["tool_calls"][0]["arguments"] == arguments


# ---- All rows of a source


@pytest.mark.parametrize("table", [False, True])
def test_a_column_that_no_row_has(table):
    row = GOOD | {"reward_model": {"ground_truth": "3", "style": "rule"}, "tools": ["x"]}
    for field, missing in (("prompt_column", "prompt"), ("answer_column", "reward_model.x"), ("tools_column", "t")):
        message = f"^column '{missing}' is missing in f.*columns there: .*reward_model"
        with pytest.raises(ValueError, match=message):
            prompts(row, row, table=table, **{field: missing})


def test_bad_rows_are_refused_with_their_numbers_or_skipped_and_counted(capsys):
    rows = [GOOD, {"question": ""}, GOOD, *[{"question": "1+2", "answer": None}] * 6]
    with pytest.raises(ValueError) as refused:
        prompts(*rows)
    message = str(refused.value)
    assert re.match(r"7 of 9 rows of f.jsonl .*row 2: .*'question'.*row 4: .*'answer'", message)
    assert "\n" not in message and message.endswith("--data.bad-rows skip")
    assert prompts(*rows, name="f\x1b[2J", bad_rows="skip").usable == [0, 2]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"warning: 7 of 9 rows of f\\x1b\[2J.jsonl .*row 2: .*'answer'.* left out$", first)
    assert second.endswith("left out: 7 that cannot be used")


def test_values_that_json_cannot_hold_are_told():
    rows = [GOOD | {"day": datetime.date(2024, 1, day)} for day in (1, 2)]
    with pytest.raises(ValueError, match="2 of 2 rows of f.parquet .* row 1: .*what JSON cannot .*date"):
        prompts(*rows, table=True, columns={"day": "day"})


def test_a_token_that_the_model_has_no_row_for():
    """n19 is token 29, the last one."""
    data = DataConfig(path=written((GOOD, GOOD | {"question": "add n19"}), False), system_prompt="")
    prepared(data, TOKENIZER, vocab_size=30)
    with pytest.raises(ValueError, match="row 2: token 'n19' .29. is not among the model's vocab_size=29"):
        prepared(data, TOKENIZER, vocab_size=29)


def test_the_first_rows_decide_the_format_of_a_source(capsys):
    rows = [{"text": None, "instruction": "add", "output": "yes"}, {"text": "Be brief", "instruction": "sub"}]
    with pytest.raises(ValueError, match="1 of 2 rows of f.* cannot be used: row 2: column 'output' is missing"):
        chats(*rows, table=True)
    assert " has instruction and output, so its row_format is alpaca\n" in capsys.readouterr().out
    assert texts_of(chats(*rows, table=True, bad_rows="skip", row_format="text")) == ["Be brief <eos>"]
    with pytest.raises(ValueError, match="f.*: the columns q, a are no row format; there must be question and com"):
        chats({"q": "1+1", "a": "2"})


# ---- A function of the user's


@pytest.fixture
def own(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / f"mine{len([*tmp_path.iterdir()])}.py"  # a file is loaded once
        path.write_text(f"def rows(row):\n    {body}\n")
        return f"{path}:rows"

    return write


def test_an_own_function_makes_rows_of_any_format_and_leaves_some_out(own, capsys):
    name = own("return None if row['n'] > 2 else {'prompt': row['q'].strip(), 'answer': row['a'][-1], 'n': row['n']}")
    found = prompts(*({"q": f" {i}? ", "a": ["x", str(i)], "n": i} for i in range(5)), row=name)
    assert found.usable == [0, 1, 2]
    assert f"left out: 2 left out by {name}\n" in capsys.readouterr().out
    prompt = found.prompt(2, 0)
    assert prompt.content == "2?" and prompt.columns == {"answer": "2", "n": 2}
    name = own("return {'messages': [{'role': 'user', 'content': row['q']}]} if row['q'] else {'text': 'brief'}")
    assert texts_of(chats({"q": "add"}, {"q": ""}, row=name)) == ["<user> add", "brief <eos>"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['no']", "row 1: data.row raised KeyError: 'no'"),
        ("return [row]", "row 1: data.row gave list, and not a dict, or None"),
        ("return row", "row 1: data.row gave the keys question, answer: column 'prompt' is missing"),
        ("return {'prompt': 3}", "row 1: data.row gave the keys prompt: column 'prompt' holds int, not text"),
        ("return None", "0 of 2 rows of f.jsonl are left: 2 left out by "),
    ],
)
def test_an_own_function_that_fails_is_told_with_the_row(own, body, message):
    with pytest.raises(ValueError) as refused:
        prompts(GOOD, GOOD, row=own(body))
    assert message in str(refused.value) and "\n" not in str(refused.value)
