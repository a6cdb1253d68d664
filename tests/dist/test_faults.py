"""A rank that fails, dies, hangs or is stopped ends the job soon, with one line that names it, and nothing is left."""

import concurrent.futures
import pathlib
import re
import subprocess

import pytest

from tests.torchrun import run_torchrun

PROGRAM = "tests/dist/programs/faults.py"
DEADLINE = 15.0  # seconds that nothing may happen; in the phase generate three times as long

# What the line says of a rank to which this happened
HANGS = "hangs in phase {phase}: nothing has happened for"
KINDS = {
    "raise": "failed in phase {phase}: forced",
    "kill": "was ended from outside in phase {phase}",
    "hang": HANGS,
    "mute": HANGS,
    "spin": HANGS,
    "stop": "does not answer, last seen in phase {phase}: nothing has happened for",
}
# rank and its role, phase, what happens to it: each phase, each kind
CELLS = [
    ("0 (trainer)", "train", "kill"),
    ("0 (trainer)", "train", "mute"),
    ("0 (trainer)", "generate", "stop"),
    ("1 (trainer)", "sync", "hang"),
    ("2 (reference)", "reference", "kill"),
    ("3 (generator)", "generate", "raise"),
]
PLACES = (
    ("0 (trainer)", "train"),
    ("0 (trainer)", "sync"),
    ("1 (trainer)", "train"),
    ("1 (trainer)", "sync"),
    ("2 (reference)", "reference"),
    ("3 (generator)", "generate"),
    ("3 (generator)", "sync"),
)
MORE_CELLS = [(*place, kind) for place in PLACES for kind in KINDS if kind != "mute" and (*place, kind) not in CELLS]
AT_ONCE = 2  # most of a cell's seconds are waiting


@pytest.fixture(scope="module")
def outcomes(request):
    """Cell -> its run, for all that are asked for; they run side by side from the first test on."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item.callspec.params["cell"] for item in items if "outcomes" in item.fixturenames]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {cell: pool.submit(run_cell, *cell) for cell in asked}
        pool.shutdown(cancel_futures=True)


def run_cell(rank: str, phase: str, kind: str) -> subprocess.CompletedProcess:
    return run_torchrun(PROGRAM, rank[0], phase, kind, DEADLINE, nproc=4)


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_one_line_names_the_rank(outcomes, cell):
    check_cell(*cell, outcomes[cell].result())


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE_CELLS, ids=" ".join)
def test_one_line_names_any_rank(outcomes, cell):
    check_cell(*cell, outcomes[cell].result())


def check_cell(rank: str, phase: str, kind: str, result: subprocess.CompletedProcess) -> None:
    """A run's error line, its end, torchrun's root cause."""
    line, output = KINDS[kind], result.stdout
    assert result.returncode == 1, output
    (error,) = [text for text in output.splitlines() if text.startswith("error: ")]
    assert error.startswith(f"error: rank {rank} {line.format(phase=phase)}"), output
    root_cause = output.partition("Root Cause")[2]
    assert (error in root_cause) != (kind == "kill"), output  # then torchrun itself says what it was
    assert kind != "kill" or "SIGKILL" in root_cause
    assert (f"rank {rank} is here, in phase {phase}:" in output) == (kind in ("hang", "mute", "spin"))
    assert output.count("Traceback") == (2 if kind == "raise" else 1), output  # torchrun's own is one


LATE = """
import os, sys, time
from grpo.config import RolesConfig
from grpo.roles.process_groups import setup_roles
from grpo.watch.failures import run_script

if os.environ["RANK"] == "2":
    time.sleep(600)
run_script(lambda: setup_roles(RolesConfig(num_trainers=3, num_references=0, num_generators=0), deadline_minutes=0.1))
"""


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(tmp_path: pathlib.Path):
    """Nobody is watched before all ranks have met; that has a deadline too."""
    (tmp_path / "late.py").write_text(LATE)
    result = run_torchrun(str(tmp_path / "late.py"), nproc=3)
    line = "of 3 ranks, these did not start within 6 s: 2"
    assert result.returncode == 1 and f"error: rank 0 (rank) failed in phase start: {line}" in result.stdout
    assert line in result.stdout.partition("Root Cause")[2]


def test_a_stop_signal_at_any_rank_reaches_the_driver():
    """SIGTERM at the generator: all ranks end between two steps, without an error."""
    result = run_torchrun(PROGRAM, 3, "sync", "term", DEADLINE, nproc=4)
    assert result.returncode == 0, result.stdout
    assert "SIGTERM: the run stops when this step is done and saved" in result.stdout
    (step,) = re.findall(r"^ended after step (\d+)$", result.stdout, re.MULTILINE)
    assert 2 <= int(step) < 100
    assert "error" not in result.stdout and "Traceback" not in result.stdout
