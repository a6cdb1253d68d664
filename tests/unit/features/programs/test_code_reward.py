"""Programs in completions: which one is run, what its tests pay, and that success cannot be had without them."""

import json
import types

import pytest

from grpo.config import RewardConfig
from grpo.features.programs import code_reward as module
from grpo.features.programs.code_reward import code_reward
from grpo.features.programs.run import Outcome
from grpo.rewards.loading import load_functions

# For a program that ends by itself, on a machine that may be busy.
SECONDS = 600.0

ADD = "```python\ndef add(a, b):\n    return a + b\n```\n"
SUBTRACT = "```python\ndef add(a, b):\n    return a - b\n```\n"
ADD_TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
SUM_TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "10 20\n", "output": "30\n"}]


def program(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "tests", "reward"),
    [
        (ADD, ADD_TESTS, 1.0),
        (ADD, ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"], 1.0),
        (ADD, json.dumps(["assert add(2, 3) == 5", "assert add(1, 1) == 3"]), 0.0),
        (SUBTRACT + ADD, ADD_TESTS, 1.0),
        (ADD + SUBTRACT, ADD_TESTS, 0.0),
        (ADD + "prints\n```\n5\n```", ADD_TESTS, 1.0),
        (ADD + "```text\n5\n```", ADD_TESTS, 1.0),
        ("```text\n5\n```\nbetween\n```\ndef add(a, b): return a + b\n```", ADD_TESTS, 1.0),
        ("1. Adds:\n\n   ```python\n   def add(a, b):\n\n       return a + b\n   ```\n", ADD_TESTS, 1.0),  # in a list
        ("  ```python\ndef add(a, b):\n    return a + b\n  ```", ADD_TESTS, 1.0),
        (program("text = '''\n   3\n  \n'''"), "assert text == '\\n   3\\n  \\n'", 1.0),
        (ADD.replace("`", ""), ADD_TESTS, 0.0),
        ("```python\ndef add(a, b): return a + b", ADD_TESTS, 0.0),
        (program("def add(a, b) return"), ADD_TESTS, 0.0),
        (program("from __future__ import annotations\ndef add(a: X, b): return a + b"), ADD_TESTS, 1.0),
        (program("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int"), "assert A(1).x == 1", 1.0),
        (program("name = __name__"), "assert name == 'program'; import __main__; assert __main__.name", 1.0),
        (program("def add(a, b): return a + b\nif __name__ == '__main__': raise SystemExit(input())"), ADD_TESTS, 1.0),
        (f"<think>\n```python\ndef add(a, b):\n</think>{ADD}", ADD_TESTS, 1.0),
        (f"<think>{ADD}", ADD_TESTS, 0.0),  # cut off in its thoughts
        (program("print(sum(map(int, input().split())))"), SUM_TESTS, 1.0),
        (program("print(sum(map(int, input().split())), end='  \\n\\n')"), json.dumps(SUM_TESTS), 1.0),
        (program("print(sum(map(int, input().split())))\nraise SystemExit(1)"), SUM_TESTS, 0.0),
        (program("print('', sum(map(int, input().split())))"), SUM_TESTS, 0.0),
        (program("while True: pass"), SUM_TESTS, 0.0),
        (ADD, "  \n", None),
        (ADD, None, None),
        (ADD, "[]", None),
        (ADD, [" "], None),
    ],
)
def test_code_reward(text, tests, reward):
    seconds = 2.0 if "while True" in text else SECONDS
    assert code_reward([text], tests=[tests], timeout_seconds=seconds, question=["?"]) == [reward]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "quit()",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit",
        "import builtins; builtins.exec = builtins.compile = lambda *a, **k: None",
        "import os; os._exit = os.write = print",
        "__builtins__['exec'] = print",
        "import builtins; builtins.AssertionError = SystemExit",
        "import sys, threading, os\nthreading.Timer(0.05, os._exit, (0,)).start()\nimport time; time.sleep(1)",
        "import sys; print(sys.stdin.read(), open(0).read(), *sys.argv, open(sys.argv[0]).read()); raise SystemExit",
        "import os, sys\nfor name in ('0', '1', '2', '3', '4', '5'):\n"
        "    try: print(open('/proc/self/fd/' + name).read())\n    except OSError: pass\nraise SystemExit",
        "print(vars(), globals()); raise SystemExit",
        "import __main__; print(vars(__main__)); raise SystemExit",
    ],
)
def test_success_cannot_be_had_by_leaving_early(code):
    seconds = 2.0 if "/proc/self/fd" in code else SECONDS  # it waits for what nobody writes
    assert code_reward([program(code)], tests=["assert False"], timeout_seconds=seconds) == [0.0]


TEST_CASE = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(2, 3), 5)\n"
)
SET_UP = """
import unittest
class T(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sum = add(2, 3)
    def test(self):
        self.assertEqual(self.sum, 5)
unittest.main()
"""


@pytest.mark.parametrize(
    ("tests", "reward_of_right"),
    [
        (f"{TEST_CASE}unittest.main()", 1.0),
        (f"{TEST_CASE}if __name__ == '__main__':\n    unittest.main(argv=[''], verbosity=2, exit=False)", 1.0),
        (f"from unittest import main\n{TEST_CASE}main()", 1.0),
        (f"{TEST_CASE}unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))", 1.0),
        (SET_UP, 1.0),
        ("import unittest\nunittest.TestCase().assertEqual(add(2, 3), 5)", 1.0),
        ("import unittest\nunittest.main()", 0.0),  # not one test
    ],
)
def test_unittest_pays_the_right_program_alone(tests, reward_of_right):
    """And none that is wrong, that leaves, or that skips its own test."""
    bodies = ("return a - b", "raise SystemExit(0)", "import unittest; raise unittest.SkipTest", "quit(0)")
    wrong = [program(f"def add(a, b):\n    {body}") for body in bodies]
    rewards = code_reward([ADD, *wrong], tests=[tests] * (1 + len(wrong)), timeout_seconds=SECONDS)
    assert rewards == [reward_of_right, *[0.0] * len(wrong)]


def test_success_is_a_marker_that_is_drawn_anew(monkeypatch):
    monkeypatch.setattr(module.secrets, "token_hex", lambda length: "the-marker")
    known = program("print('the-marker'); import os, sys; sys.stdout.flush(); os._exit(0)")
    assert code_reward([known], tests=["assert False"], timeout_seconds=SECONDS) == [1.0]
    monkeypatch.undo()
    assert code_reward([known], tests=["assert False"], timeout_seconds=SECONDS) == [0.0]


def test_all_tests_of_a_completion_share_the_time(monkeypatch):
    """By a clock that only programs move, each by 0.5 s."""
    clock = [0.0]

    def run(code, stdin, limits):
        granted.append(limits.timeout_seconds)
        clock[0] += 0.5
        return Outcome("ok", stdin, "")

    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module, "run_python", run)
    for number, reward, expected in ((3, 1.0, [1.5, 1.0, 0.5]), (4, 0.0, [1.5, 1.0, 0.5])):
        granted = []
        tests = [{"input": "a", "output": "a"}] * number
        assert code_reward([program("any")], tests=[tests], timeout_seconds=1.5) == [reward]
        assert granted == expected


@pytest.mark.parametrize(
    "tests",
    [
        *(5, {"input": "1"}, [{"input": "1"}], '[{"inputs": ["1"]}]', [1, 2], '{"inputs": ["1"], "outputs": ["2"]}'),
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],  # arguments and not stdin: no program would pass
        [{"input": "1", "output": "2", "fn_name": "add"}],
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
    ],
)
def test_unreadable_tests_are_refused(tests):
    with pytest.raises(ValueError, match=r'cannot read tests .* list \(or its JSON\) of {"input": text'):
        code_reward([ADD], tests=[tests])


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("def check(candidate):\n    assert candidate(2, 3) == 5\n", "assert and call nothing"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()\n", "assert and call nothing"),
        ("import pytest\ndef test(): assert add(2, 3) == 5\npytest.main(['-q'])", "pytest.main, which raises nothing"),
        ("import doctest\ndoctest.testmod()", "doctest.testmod, which raises nothing"),
        (["TASK = 'add'", "TASK == 'sub'"], "assert and call nothing"),
        ("Input: 2 3 Output: 5", "are no Python"),
        ("(" * 10_000, "are no Python"),
    ],
)
def test_tests_that_no_program_can_fail_or_pass_are_refused(tests, reason):
    with pytest.raises(ValueError, match=reason):
        code_reward([program("pass")], tests=[tests])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_seconds": 10.0}, r"is 10.0; set it .* below reward.timeout_seconds = 10.0"),
        ({"memory_gib": 8}, r"memory_gib is 8; .* at most reward.memory_gib = 4.0"),
    ],
)
def test_options_beyond_those_of_the_process_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_functions(RewardConfig(functions={"code_reward": 1.0}, options={"code_reward": options}))
