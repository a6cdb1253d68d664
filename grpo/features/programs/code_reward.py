"""A reward: 1.0 for a program that passes its tests."""

import ast
import contextlib
import dataclasses
import itertools
import json
import math
import secrets
import time
import warnings
from typing import Any

from grpo.features.programs.run import Limits, run_python
from grpo.rewards.answers import without_thoughts
from grpo.workers.worker import Rewards


def code_reward(
    completions: list[str],
    tests: list[Any],
    *,
    timeout_seconds: float = 5.0,
    memory_gib: float = 1.0,
    call_timeout_seconds: float = math.inf,
    worker_memory_gib: float = math.inf,
    **columns: list,
) -> Rewards:
    """Pay 1.0 if the program in a completion passes all of its tests, else 0.0. None if there are no tests.

    The program is the last closed block fenced as ```python or, if there is none, without a language. `tests` is one of
      - Python source, or a list of lines as in MBPP. It runs after the program in its namespace and raises if a test
        fails. Its end must be reached: a program that exits early, with whatever code, gets 0.0. What the program has
        under `if __name__ == "__main__":` does not run.
      - a list of {"input": .., "output": ..}, or its JSON. The program runs once for each pair. It must read the input
        from stdin, print the output and exit with 0. Blanks at line ends and empty lines at the end do not count.
    `timeout_seconds` limits the wall clock for all tests of a completion together, and the CPU time of each process.
    `memory_gib` limits the address space of each process.

    Python tests run in the program's own process. So a program can win that searches the interpreter's frames for the
    success marker, or that returns objects which equal everything. Pairs are compared outside, and the program never
    sees the expected output. run.py says what a program can and cannot do.

    Raises ValueError if `tests` has none of these forms.
    """
    if not 0 < timeout_seconds < call_timeout_seconds:
        raise ValueError(
            f"timeout_seconds is {timeout_seconds}; set it above 0 and below reward.timeout_seconds = "
            f"{call_timeout_seconds}, after which a call is ended without a reward"
        )
    if not 0 < memory_gib <= worker_memory_gib:
        raise ValueError(
            f"memory_gib is {memory_gib}; set it above 0 and to at most reward.memory_gib = {worker_memory_gib}, which "
            "the process that starts the code has itself"
        )
    limits = Limits(timeout_seconds, memory_gib)
    rewards = []
    for text, test in zip(completions, map(_read_tests, tests), strict=True):
        code = _last_program(without_thoughts(text))
        passes = bool(test and code) and _passes(code, test, limits)
        rewards.append(float(passes) if test else None)
    return rewards


def _last_program(text: str) -> str | None:
    """Return the last closed ```python block, or else the last without a language. Blocks are read line by line.

    A block in a list is indented: each line loses what stands before the fence, as in Markdown.
    """
    last_blocks = {}
    language = None
    for line in text.splitlines(keepends=True):
        fence = line.strip()
        indent = len(line) - len(line.lstrip(" \t"))
        if language is None and fence.startswith("```"):
            language = fence[3:].strip().lower()
            block = ""
            fence_indent = indent
        elif language is not None and fence == "```":
            last_blocks[language] = block
            language = None
        elif language is not None:
            block += line[min(indent, fence_indent) :]
    programs = [last_blocks.get(name, "") for name in ("python", "py", "python3", "")]
    return next(filter(str.strip, programs), None)


def _read_tests(tests: Any) -> str | list[tuple[str, str]]:
    """Return tests as Python source or as pairs of input and output. Empty if there are none.

    Raises ValueError if `tests` has none of the forms that code_reward describes.
    """
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # Python that starts with a list
            tests = json.loads(tests)
    if tests is None or isinstance(tests, str):
        return _checked_source(tests or "")
    if isinstance(tests, list | tuple):
        if all(isinstance(test, str) for test in tests):
            return _checked_source("\n".join(tests))
        tables = [test for test in tests if isinstance(test, dict)]
        pairs = [(test.get("input"), test.get("output")) for test in tables]
        are_texts = [isinstance(text, str) for text in itertools.chain(*pairs)]
        are_calls = [test.get("fn_name") or test.get("testtype") == "functional" for test in tables]
        if len(pairs) == len(tests) and all(are_texts) and not any(are_calls):
            return pairs
    raise ValueError(
        f"cannot read tests of type {type(tests).__name__}: {str(tests)[:200]!r}; give Python source or a list (or its "
        'JSON) of {"input": text, "output": text} for stdin and stdout. configs/examples/code_rows.py makes them of '
        "the forms of public data sets, also of calls of a function"
    )


def _checked_source(tests: str) -> str:
    """Return Python tests without blanks around them. Raises ValueError for those that no program could fail, or pass.

    Some data sets have tests that only define what somebody else calls: HumanEval's `check`, functions for pytest,
    classes of unittest. Others call what returns the failures, and raises none.
    """
    tests = tests.strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # such as about "\d"
            statements = ast.parse(tests).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot read tests: they are no Python ({error}): {tests[:200]!r}") from error
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    at_once = [statement for statement in statements if not isinstance(statement, definitions)]
    nodes = list(itertools.chain(*map(ast.walk, at_once)))
    if tests and not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in nodes):
        raise ValueError(
            f"tests assert and call nothing, so every program would pass: {tests[:200]!r}; add the calls in data.row, "
            "such as check(name) for HumanEval's (configs/examples/code_rows.py does it for functions of pytest)"
        )
    for node in nodes:
        match node:
            case ast.Call(ast.Attribute(ast.Name(module), name)) if f"{module}.{name}" in RETURN_FAILURES:
                raise ValueError(
                    f"tests call {module}.{name}, which raises nothing, so every program would pass: {tests[:200]!r}; "
                    "call the functions themselves in data.row"
                )
    return tests


# Calls that return how the tests went
RETURN_FAILURES = ("pytest.main", "doctest.testmod")

# Runs the program and then the tests as one module, whose namespace has nothing of this harness. It is named __main__
# for the tests alone: what a program does as a script, such as to read stdin, is not tested here. The marker comes in
# through stdin and not in a file, and goes out only after the tests have passed. Whatever is called after the program
# was looked up before it, so that replacing exec or os.write changes nothing. Leaving by _exit keeps threads and exit
# handlers out. unittest.main() exits also after a success, as a program may that leaves early, and a runner of unittest
# raises nothing after a failure. So main returns, and a run without a test or with one that did not simply pass ends
# the process: a program could skip its own test.
_HARNESS = """
def run(exec=exec):
    import json, os, sys, types
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out, write, leave = os.dup(1), os.write, os._exit
    if "unittest" in job["tests"]:
        import unittest
        start, run_suite = unittest.main, unittest.TextTestRunner.run
        def run_all(runner, suite):
            result = run_suite(runner, suite)
            not_passed = result.errors + result.failures + result.skipped + result.expectedFailures
            if not_passed or result.unexpectedSuccesses or not result.testsRun:
                leave(1)
            return result
        unittest.TextTestRunner.run = run_all
        unittest.main = lambda *words, **options: start(*words, **options | {"exit": False})
    program, tests = (compile(job[name], name, "exec", dont_inherit=True) for name in ("program", "tests"))
    module = sys.modules["__main__"] = sys.modules["program"] = types.ModuleType("program")
    exec(program, module.__dict__)
    module.__name__ = "__main__"
    exec(tests, module.__dict__)
    write(out, job["marker"].encode())
    leave(0)
run()
"""


def _passes(code: str, tests: str | list[tuple[str, str]], limits: Limits) -> bool:
    """Run the program on its tests. True if it passes all of them within the seconds for all together."""
    if isinstance(tests, str):
        marker = secrets.token_hex(16)
        job = {"program": code, "tests": tests, "marker": marker}
        outcome = run_python(_HARNESS, json.dumps(job), limits)
        return outcome.status == "ok" and marker in outcome.stdout
    deadline = time.monotonic() + limits.timeout_seconds
    for stdin, expected in tests:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return False
        limits_left = dataclasses.replace(limits, timeout_seconds=seconds_left)
        outcome = run_python(code, stdin, limits_left)
        if outcome.status != "ok" or _lines(outcome.stdout) != _lines(expected):
            return False
    return True


def _lines(output: str) -> list[str]:
    """Split an output into lines without blanks at their ends or empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


code_reward.confines_itself = True  # its programs, not the process that runs them
