"""What the learning bench does besides training: who runs when on which GPU, and which seconds it counts."""

import argparse
import signal
import sys
import time

import pytest

from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import learning

OURS = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 1, "time/startup": 60, "time/step": 2},
    {"step": 2, "eval/accuracy": 0.5},  # written before its step's line
    {"step": 2, "time/step": 3, "time/evaluate": 1},
]
TRL = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 0, "time/startup": 60},
    {"step": 1, "time/step": 2},
    {"step": 2, "time/step": 2},  # its steps are without evaluations
    {"step": 2, "eval/accuracy": 0.5},
]


@pytest.mark.parametrize("lines", [OURS, TRL])
def test_seconds_are_those_since_the_launch_without_evaluations(lines):
    assert learning.curve(lines) == [(0, 60, 0.4), (2, 60 + 2 + 2, 0.5)]


@pytest.fixture
def runs_of(tmp_path, monkeypatch):
    """Runs of programs that only wait, in a folder of the test."""
    monkeypatch.setattr(learning, "RUNS", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")

    def make(*programs: tuple[str, str, learning.Run | None]) -> list[learning.Run]:
        return [learning.Run(stage, 0, [sys.executable, "-c", code], after) for stage, code, after in programs]

    handler = signal.getsignal(signal.SIGTERM)  # `launch` sets its own
    yield make
    signal.signal(signal.SIGTERM, handler)


def finish(runs: list[learning.Run], gpus: int, limit: float) -> None:
    try:
        learning.work(
            runs, argparse.Namespace(gpus=gpus, seeds=[0], flags=[], name="learning"), time.monotonic() + limit
        )
    finally:
        for run in runs:
            if run.process:
                learning.end(run.process)


def test_what_starts_from_a_failed_run_is_not_run(runs_of):
    (start,) = runs_of(("sft", "raise SystemExit(3)", None))
    (after,) = runs_of(("grpo", "", start))
    finish([start, after], gpus=1, limit=60)
    assert start.exit_code == 3 and after.process is None


def test_the_limit_ends_what_still_runs(runs_of):
    (run,) = runs_of(("grpo", "import time; time.sleep(60)", None))
    started = time.monotonic()
    finish([run], gpus=1, limit=1)
    assert run.process.poll() is not None and time.monotonic() - started < 20
