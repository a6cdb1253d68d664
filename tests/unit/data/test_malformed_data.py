"""Data that cannot be used, in every row format and kind of file: one line that says where and why, nothing else.

Rows are read, put through the chat template and tokenized as a run does it. Each case below spoils one value of a row,
or the bytes of a file.
"""

import gzip
import json
import lzma
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.examples import toys
from grpo.config import DataConfig
from grpo.data.encode import Encoded, Encoder, RowStatus
from grpo.data.rows import ChatColumns, chat_reader, detect_format, row_reader
from grpo.watch.failures import BadInput, refuse_bad_input
from tests.unit.data.test_data import prepared

MOST_CHARACTERS = 3000  # of a message


@pytest.fixture(scope="module")
def tokenizer():
    return toys.trained_tokenizer(["What is 1 + 2? It is 3. user assistant system"], 300)


CHAT = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
# A good row of each format, as GSM8K has it among them
GRPO_ROWS = {
    "question and answer": {"question": "What is 1+2?", "answer": "1+2 = 3\n#### 3"},
    "messages as a prompt": {"question": [{"role": "user", "content": "1+2?"}], "answer": "3"},
}
SFT_ROWS = {
    "messages": {"messages": CHAT},
    "prompt and completion": {"question": "1+2?", "completion": "3"},
    "prompt and completion as messages": {"question": CHAT[:1], "completion": CHAT[1:]},
    "Alpaca": {"instruction": "Add", "input": "1 and 2", "output": "3"},
    "text": {"text": "One and two is three."},
}
EVERY_ROW = GRPO_ROWS | SFT_ROWS
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "arguments", "name", "text", "type"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def encoded(row_format: str, row: dict, tokenizer) -> Encoded:
    """What becomes of a row of either script."""
    data = DataConfig(system_prompt="")
    if row_format in GRPO_ROWS:
        encoder, read = Encoder(tokenizer, data, 100), row_reader(data)
    else:
        columns = ChatColumns.of(data, "completion")
        encoder = Encoder(tokenizer, data, 100, "assistant")
        read = chat_reader("", detect_format([EVERY_ROW[row_format]], columns), columns)
    (found,) = encoder.encode([row], read)
    return found


def look_at(path: pathlib.Path, tokenizer) -> None:
    """What a driver does with its data at the start of a run."""
    with refuse_bad_input():
        prepared(DataConfig(path=str(path), system_prompt=""), tokenizer)


def refusal(path: pathlib.Path, tokenizer) -> str:
    """The one line that it is refused with; it names the file."""
    with pytest.raises(BadInput) as refused:
        look_at(path, tokenizer)
    message = str(refused.value)
    assert str(path) in message and "\n" not in message and len(message) < MOST_CHARACTERS, message
    return message


# ---- one value of a row ---------------------------------------------------------------------------------------------

ABSENT = "absent"
BAD_TEXTS = {
    "absent": ABSENT,
    "null": None,
    "a whole number": 7,
    "true": True,
    "a table": {"text": "1+2?"},
    "empty": "",
    "blanks": " \t\n\u2003",
    "half a character": "1+\ud83d",
    "a list of texts": ["1+2?"],
    "an empty list": [],
    "no content": [{"role": "user"}],
    "a role that is a number": [{"role": 1, "content": "1+2?"}],
    "content that is a number": [{"role": "user", "content": 3}],
    "content with an image": [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    "half a character inside": [{"role": "user", "content": "\udc00"}],
    "a call that is text": [{"role": "assistant", "content": "", "tool_calls": ["f()"]}],
    "a call with broken JSON": [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    ],
}
BAD_ANSWERS = ("absent", "null", "half a character")  # a reward may get anything else
CASES = [
    (row_format, column, what)
    for row_format, row in EVERY_ROW.items()
    for column in row
    for what in BAD_TEXTS
    if (column != "answer" or what in BAD_ANSWERS) and column != "input"
]
CASES += [("Alpaca", "input", what) for what in ("a whole number", "true", "a table", "half a character")]


@pytest.mark.parametrize("row_format, column, what", CASES)
def test_a_row_with_one_bad_value(row_format, column, what, tokenizer):
    value = BAD_TEXTS[what]
    row = EVERY_ROW[row_format] | {column: value}
    if value is ABSENT:
        del row[column]
    found = encoded(row_format, row, tokenizer)
    assert found.status == RowStatus.BAD and column in found.reason and "\n" not in found.reason


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_json_is_used_or_refused_with_a_reason(data, tokenizer):
    row_format = data.draw(st.sampled_from(sorted(EVERY_ROW)))
    row = EVERY_ROW[row_format]
    column = data.draw(st.sampled_from(sorted(row)))
    value = data.draw(JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=2))
    found = encoded(row_format, row | {column: value}, tokenizer)
    assert bool(found.reason) == (found.status == RowStatus.BAD) and "\n" not in found.reason


# ---- the bytes of a file --------------------------------------------------------------------------------------------

LINE = json.dumps(GRPO_ROWS["question and answer"]).encode()
# name: (ending of the file's name, its bytes, what is said besides its path)
BAD_FILES = {
    "nothing": (".jsonl", b"", "has no rows"),
    "NUL bytes": (".jsonl", LINE + b"\n\0\0\0\0\n", "line 2: not JSON"),
    "a NUL within a text": (".jsonl", LINE + b"\n" + LINE.replace(b"What", b"Wh\0t"), "line 2: not JSON"),
    "bytes that are no UTF-8": (".jsonl", LINE + b"\n" + LINE.replace(b"What", b"Wh\xe4t"), "UnicodeDecodeError"),
    "UTF-16": (".jsonl", LINE.decode().encode("utf-16"), "UnicodeDecodeError"),
    "two rows on a line": (".jsonl", LINE + LINE, "line 1: not JSON"),
    "a list on a line": (".jsonl", LINE + b"\n[1, 2]\n", "line 2: a list, not a JSON object"),
    "Python instead of JSON": (".jsonl", b"{'question': 'a', 'answer': '3'}\n", "line 1: not JSON"),
    "a number of 5,000 digits": (".jsonl", b'{"question": "a", "answer": ' + b"9" * 5000 + b"}\n", "line 1: not JSON"),
    "compressed": (".jsonl.gz", gzip.compress(LINE), "unpack it"),
    "compressed CSV": (".csv", lzma.compress(b"question,answer\na,1\n"), "UTF-8"),
    "a list in JSON lines": (".jsonl", b"[" + LINE + b"]", "line 1: a list"),
    "an empty list": (".json", b"[]", "has no rows"),
    "a list of texts": (".json", b'["a", "b"]', "entry 1 is a str, not a JSON object"),
    "a list, then more": (".json", b"[" + LINE + b"]\n" + LINE, "not JSON"),
    "CSV of a header": (".csv", b"question,answer\n", "has no rows"),
    "a cell too many": (
        ".csv",
        b"question,answer\na,1\nb,2,3\n",
        "line 3: its cells are not one for each of 2",
    ),
    "a cell too few": (".csv", b"question,answer\na\n", "line 2: its cells are not"),
    "two columns of one name": (".csv", b"answer,answer\na,1\n", "line 2: its cells are not"),
    "an empty cell": (".csv", b"question,answer\na,1\n,2\n", "row 2: column 'question' is missing"),
    "a quote that does not end": (".csv", b'question,answer\na,1\n"b,2\n', "line 3"),
    "a quote within quotes": (".csv", b'question,answer\n"a "b" c",1\n', "line 2: '"),
    "cells between semicolons": (".csv", b'question;answer\n"a; b";1\n', "line 2: '"),
    "cells between tabs": (".tsv", b"question\tanswer\na\t1\n", "ends in none of"),
    "a pointer of git-lfs": (".parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "a table of Arrow": (".arrow", b"ARROW1\0\0", "ends in none of"),
    "Parquet of nothing": (".parquet", b"", "could not be loaded"),
    "Parquet's ends alone": (".parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "could not be loaded"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read(name, tokenizer, tmp_path):
    ending, content, said = BAD_FILES[name]
    path = tmp_path / f"rows{ending}"
    path.write_bytes(content)
    assert said in refusal(path, tokenizer)
