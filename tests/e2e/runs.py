"""What the end-to-end tests read out of a run folder."""

import json
import pathlib
from types import SimpleNamespace

CLOCKS = ("time", "tokens_per_second", "memory/")
RANK_0 = SimpleNamespace(is_driver=True)  # the roles of a session that only reads
TINY = str(pathlib.Path(__file__).parent / "tiny.py")


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_completions(run_dir: pathlib.Path) -> list[dict]:
    """The lines of completions.jsonl."""
    return [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]


def without_clocks(metrics: dict) -> dict:
    """One step's metrics without what differs between two runs of the same thing."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}


def steps_of(run_dir: pathlib.Path) -> list[dict]:
    """The metrics of steps, without those of evaluations and without clocks."""
    return [without_clocks(m) for m in read_metrics(run_dir) if "loss" in m]


def assert_same_run(one: pathlib.Path, other: pathlib.Path, only_steps: bool = False) -> None:
    """Two runs have the same metrics, completions and weights, to the last digit, and no two steps are alike.

    only_steps: one of them has no evaluations.
    """
    before, after = ([without_clocks(m) for m in read_metrics(run_dir)] for run_dir in (one, other))
    assert after == before or only_steps
    assert steps_of(one) == steps_of(other)
    norms = [m["grad_norm"] for m in steps_of(one)]
    assert len(norms) == len(set(norms)) > 1
    if all((run_dir / "completions.jsonl").exists() for run_dir in (one, other)):
        assert read_completions(other) == read_completions(one)
    weights = [(run_dir / "model/model.safetensors").read_bytes() for run_dir in (one, other)]
    assert weights[0] == weights[1]
