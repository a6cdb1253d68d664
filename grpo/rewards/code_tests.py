"""What code_reward needs: the program that a completion holds, the tests of its row, and whether it passes them."""

import contextlib
import json
import secrets
import time
from typing import Any

from grpo.workers.programs import Limits, run_python


def last_program(text: str) -> str | None:
    """The last closed ```python block, else the last without a language; line by line, so that each fence pairs up."""
    found: dict[str, str] = {}
    language, block = None, []
    for line in text.splitlines(keepends=True):
        fence = line.strip()
        if language is None and fence.startswith("```"):
            language, block = fence[3:].strip().lower(), []
        elif language is not None and fence == "```":
            found[language] = "".join(block)
            language = None
        elif language is not None:
            block.append(line)
    return next((found[name] for name in ("python", "py", "python3", "") if found.get(name, "").strip()), None)


def read_tests(tests: Any) -> str | list[tuple[str, str]]:
    """Python source or pairs of input and output, in one of the forms that code_reward describes; empty if none.

    Raises ValueError if `tests` has none of these forms.
    """
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        with contextlib.suppress(ValueError):  # Python that starts with a list
            tests = json.loads(tests)
    if tests is None or isinstance(tests, str):
        return (tests or "").strip()
    if isinstance(tests, list | tuple):
        if all(isinstance(test, str) for test in tests):
            return "\n".join(tests).strip()
        if all(
            isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
            for test in tests
        ):
            return [(test["input"], test["output"]) for test in tests]
    raise ValueError(
        f"cannot read tests of type {type(tests).__name__}: {str(tests)[:200]!r}; give Python source or a "
        'list (or its JSON) of {"input": text, "output": text}'
    )


# Runs program, then tests, as one module named __main__ whose namespace has nothing of this harness. The marker comes
# in through stdin and not in a file, and goes out only once the tests are through; all that is called after the program
# ran was taken before, so that replacing exec or os.write changes nothing; and leaving by _exit keeps threads and exit
# handlers from having a say.
_HARNESS = """
def run(exec=exec):
    import json, os, sys, types
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out, write, leave = os.dup(1), os.write, os._exit
    program, tests = (compile(job[name], name, "exec", dont_inherit=True) for name in ("program", "tests"))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(program, module.__dict__)
    exec(tests, module.__dict__)
    write(out, job["marker"].encode())
    leave(0)
run()
"""


def passes(code: str, tests: str | list[tuple[str, str]], timeout_seconds: float, memory_gib: float) -> bool:
    """Whether the program passes all tests. Seconds are for all of them together, GiB of address space per process."""
    if isinstance(tests, str):
        marker = secrets.token_hex(16)
        job = json.dumps({"program": code, "tests": tests, "marker": marker})
        outcome = run_python(_HARNESS, job, Limits(timeout_seconds, memory_gib))
        return outcome.status == "ok" and marker in outcome.stdout
    deadline = time.monotonic() + timeout_seconds
    for given, expected in tests:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return False
        outcome = run_python(code, given, Limits(seconds_left, memory_gib))
        if outcome.status != "ok" or _lines(outcome.stdout) != _lines(expected):
            return False
    return True


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]
