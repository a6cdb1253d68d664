"""Every row is looked at before a run: what cannot be used, why, and what is told about it."""

import json
import pathlib
import re

import datasets
import pytest

from grpo.data.rows import check_rows, load_rows, usable_rows

GOOD = {"question": "1+2", "answer": "3"}


def faults(*rows: dict) -> dict[int, str]:
    return check_rows(list(rows), ["question"], ["answer"], "f.jsonl")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"question": 7}, "column 'question' holds int, not text"),
        ({"question": [{"role": "user"}]}, "column 'question' holds list, not text"),
        ({"question": None}, "column 'question' is missing"),
        ({"question": ""}, "column 'question' is empty"),
        ({"question": " \n\t\u3000"}, "column 'question' is empty"),
        ({"question": "a \ud83d b"}, "column 'question' has a lone surrogate (half of a character)"),
        ({"answer": None}, "column 'answer' is missing"),
        ({"answer": float("nan")}, "column 'answer' is missing"),
        ({"answer": "\udfff"}, "column 'answer' has a lone surrogate (half of a character)"),
        ({"answer": ["3", {"tests": ["a", "\ud800"]}]}, "column 'answer' has a lone surrogate (half of a character)"),
        ({"answer": {"\ud800": 1}}, "column 'answer' has a lone surrogate (half of a character)"),
    ],
)
def test_a_row_that_cannot_be_used(changes, fault):
    assert faults(GOOD, GOOD | changes, GOOD) == {1: fault}


@pytest.mark.parametrize("answer", ["", 3, 0, 0.5, False, "👍 ü", [], [None, "3"], {"a": None}, {"a": [["b"]]}])
def test_values_that_a_reward_may_get(answer):
    assert faults(GOOD | {"answer": answer}) == {}


def test_a_row_without_the_column_and_the_first_fault_of_a_row():
    assert faults(GOOD, {"question": "1+2"}, {"answer": None, "question": None}) == {
        1: "column 'answer' is missing",
        2: "column 'question' is missing",
    }


def test_columns_that_are_not_used_may_hold_anything():
    assert faults(GOOD | {"note": "\ud800", "question2": None}) == {}


def test_rows_of_the_hub_are_looked_at_too():
    rows = datasets.Dataset.from_list([GOOD, GOOD | {"answer": None}, GOOD | {"question": "  "}] + [GOOD] * 2500)
    expected = {1: "column 'answer' is missing", 2: "column 'question' is empty"}
    assert check_rows(rows, ["question"], ["answer"], "a/b") == expected
    with pytest.raises(ValueError, match="column 'prompt' is missing in a/b; columns there: question, answer$"):
        check_rows(rows, ["prompt"], [], "a/b")


def test_a_column_that_no_row_has():
    rows = [GOOD, {"solution": "3"}]
    with pytest.raises(
        ValueError, match="column 'prompt' is missing in f.jsonl; columns there: question, answer, solution"
    ):
        check_rows(rows, ["prompt"], ["answer"], "f.jsonl")


def test_deep_rows_neither_pass_unseen_nor_end_the_check(tmp_path: pathlib.Path):
    deep = "\ud800"
    for _ in range(900):
        deep = [deep]
    assert list(faults(GOOD | {"answer": deep})) == [0]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ValueError, match="rows.jsonl, line 1: not JSON"):
        load_rows(str(path), "", "")


def test_bad_rows_are_refused_with_their_numbers():
    rows = [GOOD, {"question": ""}, GOOD, *[{"question": "1+2", "answer": None}] * 6]
    with pytest.raises(ValueError) as refused:
        usable_rows(rows, ["question"], ["answer"], "f.jsonl", "refuse")
    message = str(refused.value)
    assert message.startswith(
        "7 of 9 rows of f.jsonl cannot be used: row 2: column 'question' is empty; row 4: column 'answer' is missing;"
    )
    assert "row 7: column 'answer' is missing; and 2 more (counted from 1" in message
    assert "row 8" not in message and "\n" not in message and message.endswith("--data.bad-rows skip")


def test_bad_rows_are_skipped_and_counted(capsys):
    rows = [GOOD, {"question": "1+2"}, GOOD]
    assert usable_rows(rows, ["question"], ["answer"], "f\x1b[2J.jsonl", "skip") == [0, 2]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        r"warning: 1 of 3 rows of f\x1b[2J.jsonl cannot be used: row 2: column 'answer' is missing ("
    )
    assert line.endswith("they are left out")
    assert usable_rows(rows[:1], ["question"], ["answer"], "f.jsonl", "skip") == [0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad_rows", ["refuse", "skip"])
def test_no_row_is_left(bad_rows):
    with pytest.raises(ValueError, match=re.escape("1 of 1 rows of f.jsonl cannot be used: row 1: column 'question'")):
        usable_rows([{"question": None, "answer": 1}], ["question"], ["answer"], "f.jsonl", bad_rows)


def test_a_surrogate_in_a_file_is_found_however_it_is_written(tmp_path: pathlib.Path):
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps(GOOD).encode(),
        rb'{"question": "a\ud800b", "answer": 1}',
        b'{"question": "\xed\xa0\x80", "answer": 1}',
    ]
    path.write_bytes(b"\n".join(lines))
    assert list(check_rows(load_rows(str(path), "", ""), ["question"], ["answer"], str(path))) == [1, 2]
