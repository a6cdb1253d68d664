"""Every row is looked at before a run: what cannot be used, why, and what is told about it."""

import datasets
import pytest

from grpo.config import DataConfig, SFTConfig
from grpo.config.sources import Source
from grpo.data.columns import BadRow, value_at
from grpo.data.examples import row_reader
from grpo.data.rows import check_chat_rows, check_rows
from grpo.data.sources import TableRows

GOOD = {"question": "1+2", "answer": "3"}
FILE = Source("", "f.jsonl")


def checked(*rows: dict, source: Source = FILE, **fields):
    return check_rows(source, list(rows), DataConfig(**fields))


def fault(row: dict, **fields) -> str:
    """Why the row cannot be used, or nothing."""
    try:
        row_reader(DataConfig(**fields))(row)
    except BadRow as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"question": 7}, "column 'question' holds int, not text"),
        ({"question": {"role": "user"}}, "column 'question' holds dict, not text"),
        ({"question": None}, "column 'question' is missing"),
        ({"question": ""}, "column 'question' is empty"),
        ({"question": []}, "column 'question' is empty"),
        ({"question": " \n\t\u3000"}, "column 'question' is empty"),
        ({"question": "a \ud83d b"}, "column 'question' has a lone surrogate (half of a character)"),
        ({"answer": None}, "column 'answer' is missing"),
        ({"answer": float("nan")}, "column 'answer' is missing"),
        ({"answer": "\udfff"}, "column 'answer' has a lone surrogate (half of a character)"),
        ({"answer": ["3", {"tests": ["a", "\ud800"]}]}, "column 'answer' has a lone surrogate (half of a character)"),
        ({"answer": {"\ud800": 1}}, "column 'answer' has a lone surrogate (half of a character)"),
        ({"question": ["1+2"]}, "column 'question', message 1 is str, not a table with role and content"),
        ({"question": [{"content": "1+2"}]}, "column 'question', message 1 has no role"),
        ({"question": [{"role": "user"}]}, "column 'question', message 1 has no text as content"),
        ({"question": [{"role": "user", "content": 3}]}, "column 'question', message 1 has no text as content"),
        (
            {"question": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]},
            "column 'question' ends with the assistant's answer, which is not a part of the prompt; take question.:-1",
        ),
    ],
)
def test_a_row_that_cannot_be_used(changes, expected):
    assert fault(GOOD | changes) == expected


@pytest.mark.parametrize("answer", ["", 3, 0, 0.5, False, "👍 ü", [], [None, "3"], {"a": None}, {"a": [["b"]]}])
def test_values_that_a_reward_may_get(answer):
    assert row_reader(DataConfig())(GOOD | {"answer": answer}).columns == {"question": "1+2", "answer": answer}


def test_the_first_fault_of_a_row_counts():
    assert fault({"question": "1+2"}) == "column 'answer' is missing"
    assert fault({"answer": None, "question": None}) == "column 'question' is missing"


def test_columns_that_are_not_used_may_hold_anything():
    assert fault(GOOD | {"note": "\ud800", "question2": None}) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a.b", 1),
        ("a.c.0.d", 2),
        ("a.c.-1", 3),
        ("a.c.:-1", [{"d": 2}]),
        ("a.c.1:", [3]),
        ("x.y", "the column of that name"),
    ],
)
def test_a_path_leads_into_tables_and_lists(path, value):
    row = {"a": {"b": 1, "c": [{"d": 2}, 3]}, "x.y": "the column of that name", "x": {"y": "not this"}}
    assert value_at(row, path) == value


@pytest.mark.parametrize("path", ["b", "a.x", "a.c.7", "a.c.d", "a.b.c", "a.c.-3"])
def test_a_path_that_leads_nowhere(path):
    row = {"a": {"b": 1, "c": [2, 3]}}
    with pytest.raises(BadRow, match=f"column '{path}' is missing") as missing:
        value_at(row, path)
    assert missing.value.absent == path
    assert value_at(row, path, None) is None


def test_rows_of_a_table_are_looked_at_too():
    table = datasets.Dataset.from_list(
        [GOOD | {"more": "x"}, GOOD | {"answer": None}, GOOD | {"question": "  "}, *[GOOD] * 2500]
    )
    found = check_rows(FILE, TableRows(table), DataConfig(bad_rows="skip"))
    assert found.usable[:3] == [0, 3, 4] and len(found.usable) == 2501
    assert found.left_out == {"that cannot be used": 2}
    assert found.rows.table.column_names == ["question", "answer"]  # others are not read
    with pytest.raises(ValueError, match="column 'prompt' is missing in f.jsonl; columns there: question, answer, mo"):
        check_rows(FILE, TableRows(table), DataConfig(prompt_column="prompt"))


def test_a_column_that_no_row_has():
    with pytest.raises(
        ValueError, match="column 'prompt' is missing in f.jsonl; columns there: question, answer, solution$"
    ):
        checked(GOOD, {"solution": "3"}, prompt_column="prompt")


@pytest.mark.parametrize("as_table", [False, True])
def test_a_column_path_that_no_row_has(as_table: bool):
    rows = [{"question": "1+2", "reward_model": {"ground_truth": "3", "style": "rule"}}] * 3
    rows = TableRows(datasets.Dataset.from_list(rows)) if as_table else rows
    with pytest.raises(ValueError) as refused:
        check_rows(FILE, rows, DataConfig(answer_column="reward_model.truth"))
    assert str(refused.value) == (
        "column 'reward_model.truth' is missing in f.jsonl; columns there: question, reward_model.ground_truth, "
        "reward_model.style"
    )


def test_mixed_types_in_a_nested_column_are_one_clear_line():
    def row(truth) -> dict:
        return {"question": "1+2", "reward_model": {"ground_truth": truth}}

    rows = [row("3"), row(3), row("4"), row(["5"]), row("6")]
    with pytest.raises(ValueError) as refused:
        checked(*rows, answer_column="reward_model.ground_truth")
    assert str(refused.value) == (
        "2 of 5 rows of f.jsonl cannot be used: row 2: column 'answer' holds a number, and in most rows text; row 4: "
        "column 'answer' holds a list, and in most rows text (counted from 1, without blank lines); correct these "
        "rows, or leave them out with --data.bad-rows skip"
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
    assert message.startswith(
        "7 of 9 rows of f.jsonl cannot be used: row 2: column 'question' is empty; row 4: column 'answer' is missing;"
    )
    assert "row 7: column 'answer' is missing; and 2 more (counted from 1" in message
    assert "row 8" not in message and "\n" not in message and message.endswith("--data.bad-rows skip")


def test_bad_rows_are_skipped_and_counted(capsys):
    found = checked(GOOD, {"question": "1+2"}, GOOD, source=Source("", "f\x1b[2J.jsonl"), bad_rows="skip")
    assert found.usable == [0, 2] and found.left_out == {"that cannot be used": 1}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        r"warning: 1 of 3 rows of f\x1b[2J.jsonl cannot be used: row 2: column 'answer' is missing ("
    )
    assert line.endswith("they are left out")
    assert checked(GOOD, bad_rows="skip").left_out == {}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_no_row_is_left(bad_rows):
    with pytest.raises(ValueError, match="1 of 1 rows of f.jsonl cannot be used: row 1: column 'question'"):
        checked({"question": None, "answer": 1}, bad_rows=bad_rows)


# ---- a function of the user's


@pytest.fixture
def own(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"def rows(row):\n    {body}\n")
        return f"{path}:rows"

    return write


def test_an_own_function_makes_prompt_and_columns_and_leaves_rows_out(own):
    name = own(
        "return None if row['level'] > 2 else "
        "{'prompt': row['q'].strip(), 'answer': row['a'][-1], 'level': row['level']}"
    )
    rows = [{"q": f" {i}? ", "a": ["x", str(i)], "level": i} for i in range(5)]
    found = checked(*rows, row=name)
    assert found.usable == [0, 1, 2]
    assert found.left_out == {f"left out by {name}": 2}
    example = found.example(2)
    assert example.prompt == "2?" and example.columns == {"answer": "2", "level": 2}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['no']", "row 1: data.row raised KeyError: 'no'; row 2"),
        ("return [row]", "row 1: data.row gave list, and not a dict with `prompt`, or None"),
        ("return row", "row 1: data.row gave the keys question, answer, and not a dict with `prompt`, or None"),
        ("return {'prompt': 3}", "row 1: column 'prompt' holds int, not text"),
        ("return None", "left out all 2 rows of f.jsonl; let it return a dict"),
    ],
)
def test_an_own_function_that_fails_is_told_with_the_row(own, body, message):
    with pytest.raises(ValueError) as refused:
        checked(GOOD, GOOD, row=own(body))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_an_own_function_gives_the_same_columns_for_all_rows(own):
    name = own("return {'prompt': 'p', **({'level': 1} if row['question'] else {})}")
    with pytest.raises(ValueError, match="row 2: data.row gave the columns none, and before level"):
        checked(GOOD, GOOD | {"question": ""}, row=name)


def test_an_own_function_may_not_change_its_mind(own):
    name = own("row['n'].append(1); return {'prompt': 'p'} if len(row['n']) < 2 else None")
    found = checked({"n": []}, row=name)
    with pytest.raises(ValueError, match="row 1 of f.jsonl could be used when the run started, and now: left out"):
        found.example(0)


def test_a_tools_column_may_be_empty_but_must_be_there():
    assert checked(GOOD | {"tools": []}, GOOD, tools_column="tools").usable == [0, 1]
    with pytest.raises(ValueError, match="column 'tool' is missing in f.jsonl; columns there: question, answer, tools"):
        checked(GOOD | {"tools": []}, tools_column="tool")


# ---- SFT


def chats(*rows: dict, table: bool = False, row_format: str = "auto", **fields):
    rows = TableRows(datasets.Dataset.from_list(list(rows))) if table else list(rows)
    return check_chat_rows(FILE, rows, SFTConfig(data=DataConfig(**fields), row_format=row_format))


@pytest.mark.parametrize("table", [False, True])
def test_the_first_rows_decide_the_format_of_a_source(table, capsys):
    rows = [{"text": None, "instruction": "add", "output": "two"}, {"text": "once", "instruction": "sub"}]
    with pytest.raises(ValueError, match="1 of 2 rows of f.jsonl cannot be used: row 2: column 'output' is missing"):
        chats(*rows, table=table)
    assert "data: f.jsonl has instruction and output, so its row_format is alpaca\n" in capsys.readouterr().out
    assert chats(*rows, table=table, bad_rows="skip").usable == [0]
    assert chats(*rows, table=table, bad_rows="skip", row_format="text").example(1).texts == ["once"]
    with pytest.raises(ValueError, match="column 'messages' is missing in f.jsonl; columns there: text, instruction"):
        chats(*rows, table=table, row_format="messages")
    with pytest.raises(ValueError, match="f.jsonl: the columns q, a are no row format; there must be question and com"):
        chats({"q": "1+1", "a": "2"}, table=table)


def test_only_the_columns_of_the_format_are_read_from_a_table():
    row = {"messages": [{"role": "user", "content": "1+1"}], "tools": "[]", "text": "x", "more": 1}
    assert chats(row, table=True).rows.table.column_names == ["messages", "tools"]
    with pytest.raises(ValueError, match="column 'functions' is missing in f.jsonl"):
        chats(row, table=True, tools_column="functions")


def test_an_own_function_may_make_rows_of_any_format(own):
    name = own("return {'messages': [{'role': 'user', 'content': row['q']}]} if row['q'] else {'text': 'none'}")
    found = chats({"q": "1+1"}, {"q": ""}, row=name)
    assert [found.example(row).texts for row in found.usable] == [["1+1"], ["none"]]


def test_an_own_function_that_makes_no_chat(own):
    with pytest.raises(ValueError, match="row 1: data.row gave no chat: the columns q are no row format"):
        chats({"q": "1+1"}, row=own("return row"))
