"""The core is complete in itself: it runs, and its tests pass, in a copy without the folders of grpo/features/."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from grpo import features
from tests.door import goes_with
from tests.torchrun import ROOT, run_python

# In a process that has imported the libraries (forks.py), which takes the project's modules from the copy alone
PROGRAM = """
import importlib, os, pathlib, runpy, sys
core = sys.argv[1]
ours = ("grpo", "configs", "tests", "train_grpo", "train_sft")
for name in [name for name in sys.modules if name.split(".")[0] in ours]:
    del sys.modules[name]
os.chdir(core)
sys.path = [core, *(path for path in sys.path if path != sys.argv[2])]
files = sorted(pathlib.Path(core, "grpo").rglob("*.py"))
modules = [".".join(file.relative_to(core).with_suffix("").parts).removesuffix(".__init__") for file in files]
for module in [*modules, "train_grpo", "train_sft"]:
    assert importlib.import_module(module).__file__.startswith(core), module
from grpo import features
print("present:", features.present())
import pytest
assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]) == 0
runpy.run_module("configs.examples.notebook", run_name="__main__")
"""

NOT_OURS = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__", "runs")


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> pathlib.Path:
    """The copy."""
    copy = tmp_path_factory.mktemp("core") / "project"
    shutil.copytree(ROOT, copy, ignore=NOT_OURS)
    for name in features.FEATURES:
        for path in map(copy.joinpath, goes_with(name)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return copy


def test_modules_and_tests_import_and_the_example_for_notebooks_says_what_is_true(core):
    """It trains by SFT and GRPO in one process."""
    (core / "program.py").write_text(PROGRAM)
    output = run_python(core / "program.py", core, ROOT)
    assert "present: []\n" in output
    assert "[1.0, 0.0]\n" in output
    assert "tensor([ 0.7070, -0.7070])" in output
    # advantage +-0.7070: -(1.2 * 0.7070) where clipped, exp(0.5) * 0.7070 where not
    assert len(re.findall(r"-0\.8484", output)) == len(re.findall(r" 1\.1657", output)) == 3
    # both loops took their two steps
    assert len(re.findall(r"^step [12]/2 ", output, re.MULTILINE)) == 4
    assert "grad" in output
    assert output.splitlines()[-1].startswith("done; everything is in ")  # nothing is said behind it


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("part", ["unit", "e2e", "dist"])
def test_the_whole_suite_of_the_core_passes(core, part):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"tests/{part}", "--ignore=tests/e2e/test_without_features.py"],
        cwd=core,
        env=os.environ | {"PYTHONPATH": str(core)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
