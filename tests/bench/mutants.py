"""Would the unit tests notice? Each small change to the algorithm, alone, against the tests that cover its file.

    python tests/bench/mutants.py [PART_OF_A_FILE_NAME ...] > mutants.txt

A mutant has one operator, comparison, constant, name or call replaced, or a condition turned around. It is killed if a
test fails, or all take longer than LIMIT. Mutants run in a copy of the tree, each in a fork of a process that has
imported the libraries; NUM_PROCESSES at a time. Printed are the survivors, then the numbers of each file. Left out:
messages of errors, annotations, and changes of two places at once.
"""

import ast
import concurrent.futures
import copy
import importlib
import itertools
import os
import pathlib
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
UNIT_TESTS = pathlib.Path("tests/unit")  # of the tree that is tested, the current folder
NUM_PROCESSES = 2
LIMIT = 60  # seconds of a core for one mutant's tests, which take 2 to 15
SCRIPT_TESTS = ("test_objective", "test_advantages", "test_losses", "test_updates")
# file: unit tests that cover it, the fastest first
TESTS = {
    "grpo/algorithm/advantages.py": ("test_advantages", "test_objective"),
    "grpo/algorithm/aggregation.py": ("test_losses", "test_objective"),
    "grpo/algorithm/importance.py": ("test_objective", "test_losses"),
    "grpo/algorithm/inputs.py": ("test_losses", "test_objective"),
    "grpo/algorithm/losses.py": ("test_losses", "test_check_loss"),
    "grpo/run/trial.py": ("test_losses", "test_check_loss"),
    "grpo/data/layout.py": ("test_layout",),
    "train_grpo.py": SCRIPT_TESTS,
}
# of the script, what trains
FUNCTIONS = {"train_grpo.py": ("add_advantages", "update", "grpo_objective", "policy_loss")}

OPERATORS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
NAMES = {"minimum": "maximum", "amin": "amax", "any": "all", "min": "max", "exp": "expm1", "floor": "ceil"}
NAMES |= {other: name for name, other in NAMES.items()}
# calls that are left out: x.name(...) and name(x, ...) become x
LEFT_OUT = ("detach", "clamp", "clamped", "where", "masked_fill", "square", "sqrt", "abs", "sorted", "double", "exp")


def mutants(tree: ast.Module, functions: tuple[str, ...]) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yield line, description and a function that makes the change in `tree`; one at a time may be made."""
    for top in tree.body:
        if not functions or getattr(top, "name", "") in functions:
            yield from _of_node(top)


def _of_node(node: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST):
                continue
            for new in _replacements(child):
                before, after = ast.unparse(child) or type(child).__name__, ast.unparse(new) or type(new).__name__
                line = getattr(child, "lineno", getattr(node, "lineno", 0))

                def make(name=name, place=place, new=new):
                    if place is None:
                        setattr(node, name, new)
                    else:
                        getattr(node, name)[place] = new

                yield line, f"{before[:70]} -> {after[:70]}", make
            yield from _of_node(child)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in a node's place."""
    if type(node) in OPERATORS:
        yield OPERATORS[type(node)]()
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.UnaryOp):  # -x, ~x, not x
        yield node.operand
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant) or isinstance(node, ast.AugAssign):
        yield ast.Pass()
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in LEFT_OUT:
            yield node.func.value
        if isinstance(node.func, ast.Name) and node.func.id in LEFT_OUT and node.args:
            yield node.args[0]
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield ast.Call(ast.Name(NAMES[node.func.id]), node.args, node.keywords)


def outcome(tree: pathlib.Path, tests: tuple[str, ...]) -> str:
    """Return "passed", "failed" or "late" for a tree's unit tests, run in a fork."""
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests/bench")))]
        import pytest

        paths = [next(UNIT_TESTS.rglob(f"{test}.py")) for test in tests]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *paths]))
    _, status = os.waitpid(pid, 0)
    return "late" if os.WIFSIGNALED(status) else "failed" if status else "passed"


def try_part(file: str, part: int) -> tuple[list[str], int]:
    """Run every NUM_PROCESSES-th mutant of a file; returns the survivors and how many there were."""
    source = (ROOT / file).read_text()
    survivors = []
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        unwanted = shutil.ignore_patterns(".*", "__pycache__", "runs", "shared")
        shutil.copytree(ROOT, tree, ignore=unwanted, symlinks=True)
        unchanged = outcome(tree, TESTS[file])
        if unchanged != "passed":
            raise RuntimeError(f"{file}: the tests of the unchanged tree: {unchanged}")
        parsed = ast.parse(source)
        total = sum(1 for _ in mutants(parsed, FUNCTIONS.get(file, ())))
        for number in range(part, total, NUM_PROCESSES):
            changed = copy.deepcopy(parsed)
            all_mutants = mutants(changed, FUNCTIONS.get(file, ()))
            line, description, make = next(itertools.islice(all_mutants, number, None))
            make()
            (tree / file).write_text(ast.unparse(ast.fix_missing_locations(changed)))
            count += 1
            if outcome(tree, TESTS[file]) == "passed":
                survivors.append(f"{file}:{line}: {description}")
    return survivors, count


def main(wanted: list[str]) -> None:
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT))
    for name in ("pytest", "train_grpo", "hypothesis"):  # for their libraries; what is the project's, forks import anew
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] in ("grpo", "train_grpo", "tests")]:
        del sys.modules[name]
    with concurrent.futures.ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for file in (file for file in TESTS if not wanted or any(part in file for part in wanted)):
            parts = list(pool.map(try_part, [file] * NUM_PROCESSES, range(NUM_PROCESSES)))
            survivors = sum((s for s, _ in parts), [])
            count = sum(c for _, c in parts)
            print("\n".join([*sorted(survivors), f"{file}: {count - len(survivors)} of {count} killed"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
