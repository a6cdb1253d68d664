"""Rows of public data sets of programming problems, with tests in a form that `code_reward` reads: for `data.row`.

    --data.path PrimeIntellect/verifiable-coding-problems --data.row configs/examples/code_rows.py:verifiable
    --reward.functions code_reward 1

A problem with inputs and outputs for stdin and stdout keeps them as pairs. Where a function is called, tests become
Python that calls it and compares the result as JSON, so that an object which equals everything does not help. Rows
without tests are left out, and with `kodcode` rows whose tests need pytest to be called.
"""

import ast
import json

READ = "Write a Python program that reads from stdin and prints to stdout, in one ```python block."
CALLED = "Write {name} in Python, imports included, in one ```python block."


def apps(row):
    """Read a row of APPS or TACO: a question, starter code, and lists of inputs and outputs."""
    question = "\n\n".join(filter(None, [row["question"], row["starter_code"]]))
    return problem(question, row["input_output"])


def verifiable(row):
    """Read a row of verifiable-coding-problems: a prompt, and cases that say which function they call, if any."""
    facts = row["verification_info"]
    if isinstance(facts, str):
        facts = json.loads(facts)
    return problem(row["prompt"], facts["test_cases"])


def deepcoder(row):
    """Read a row of DeepCoder's data: a problem, and tests of one of the other forms."""
    return problem(row["problem"], row["tests"])


def livecodebench(row):
    """Read a row of LiveCodeBench. Only its public tests, which the question shows too: the others are a pickle."""
    question = "\n\n".join(filter(None, [row["question_content"], row["starter_code"]]))
    name = json.loads(row["metadata"] or "{}").get("func_name", "")
    return problem(question, row["public_test_cases"], name)


def problem(question, tests, name=""):
    """Return a row for `data.row`, or None if there are no tests. name: of the function that is called, if any.

    tests: cases with input and output, or a dict of lists of inputs and outputs, or the JSON of either.
    """
    cases = json.loads(tests or "[]") if isinstance(tests, str) else tests
    if isinstance(cases, dict):
        name = cases.get("fn_name") or name
        pairs = zip(cases.get("inputs", []), cases.get("outputs", []), strict=True)
        cases = [{"input": given, "output": expected} for given, expected in pairs]
    if not cases:
        return None
    first = cases[0]
    name = name or first.get("fn_name") or (first.get("metadata") or {}).get("func_name", "")
    if name:
        return {"prompt": f"{question}\n\n{CALLED.format(name=name)}", "tests": calls(name, cases)}
    pairs = [{"input": as_text(case["input"]), "output": as_text(case["output"])} for case in cases]
    return {"prompt": f"{question}\n\n{READ}", "tests": json.dumps(pairs)}


def calls(name, cases):
    """Return Python tests that call a function, or the method of this name of a class `Solution`."""
    arguments = [case["input"] for case in cases]
    results = [case["output"] for case in cases]
    if isinstance(arguments[0], str):  # LiveCodeBench: an argument as JSON on each line
        arguments = [[json.loads(line) for line in given.splitlines()] for given in arguments]
        results = [json.loads(result) for result in results]
    elif all(isinstance(result, list) and len(result) == 1 for result in results):
        # APPS has a result in a list of one. A function whose results are all such lists cannot be told from that.
        results = [result[0] for result in results]
    lines = ["import json", f'function = Solution().{name} if "Solution" in globals() else {name}']
    for given, result in zip(arguments, results, strict=True):
        lines.append(f"assert json.loads(json.dumps(function(*{given!r}))) == {result!r}")
    return "\n".join(lines)


def as_text(text):
    """Return an input or output as text; some rows have it as a list of lines."""
    return text if isinstance(text, str) else "\n".join(text)


def kodcode(row):
    """Read a row of KodCode, whose functions for pytest are called one after the other.

    A row is left out if a test is a method or has arguments or decorators, because nothing would call it. Tests that
    import pytest need it installed.
    """
    statements = []
    names = []
    for statement in ast.parse(row["test"]).body:
        if isinstance(statement, ast.ClassDef | ast.AsyncFunctionDef):
            return None
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test"):
            if statement.decorator_list or ast.unparse(statement.args):
                return None
            names.append(f"{statement.name}()")
        # the program has no file of its own: its names are there already
        if not (isinstance(statement, ast.ImportFrom) and statement.module == "solution"):
            statements.append(ast.unparse(statement))
    if not names:
        return None
    prompt = f"{row['question']}\n\nReply with one ```python block."
    return {"prompt": prompt, "tests": "\n".join([*statements, *names])}
