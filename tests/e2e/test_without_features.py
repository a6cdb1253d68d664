"""The core is complete in itself: it runs, and its tests pass, in a copy without the folders of grpo/features/."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from grpo import features
from tests.torchrun import ROOT, SETTINGS

# What goes with each folder besides it and tests/unit/features/NAME
ALSO = {
    "environments": [
        "grpo/tools/check_environment.py",
        "tests/e2e/test_environments.py",
        "tests/dist/test_turns.py",
        "tests/dist/programs/turns.py",
        "tests/e2e/test_methods.py",  # return_to_go among them
        "tests/unit/test_commands.py",
    ],
    "programs": ["configs/qwen2_5_coder_0_5b_programs.py"],
    "reward_model": [
        "tests/e2e/test_reward_model.py",
        "tests/dist/test_reward_model.py",
        "tests/dist/programs/reward_model.py",
    ],
}
IMPORT_ALL = """
import importlib, pathlib
files = sorted(pathlib.Path("grpo").rglob("*.py"))
modules = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
for module in [*modules, "train_grpo", "train_sft"]:
    importlib.import_module(module)
from grpo import features
print(features.present())
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The copy."""
    copy = tmp_path_factory.mktemp("core") / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
    for name in features.FEATURES:
        for folder in (f"grpo/features/{name}", f"tests/unit/features/{name}"):
            shutil.rmtree(copy / folder)
        for file in ALSO[name]:
            (copy / file).unlink()
    return copy


def python(core: pathlib.Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=core,
        env=os.environ | SETTINGS | {"PYTHONPATH": str(core)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


def test_every_module_imports(core: pathlib.Path):
    assert python(core, "-c", IMPORT_ALL).endswith("[]\n")


def test_the_core_runs_sft_and_grpo(core: pathlib.Path):
    """As the example for notebooks does, in one process."""
    assert python(core, "-m", "configs.examples.notebook").splitlines()[-1].startswith("done; ")


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("part", ["unit", "e2e", "dist"])
def test_the_whole_suite_of_the_core_passes(core: pathlib.Path, part: str):
    python(core, "-m", "pytest", "-q", f"tests/{part}", "--ignore=tests/e2e/test_without_features.py")
