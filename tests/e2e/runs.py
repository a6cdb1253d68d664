"""What the end-to-end tests read out of a run folder."""

import json
import pathlib

CLOCKS = ("time", "tokens_per_second", "memory/")
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


def assert_same_run(one: pathlib.Path, other: pathlib.Path, has_completions: bool = True) -> None:
    """Two runs have the same metrics, completions and weights, to the last digit, and no two steps are alike."""
    before, after = ([without_clocks(m) for m in read_metrics(run_dir)] for run_dir in (one, other))
    assert after == before
    losses = [m["grad_norm"] for m in after if "loss" in m]
    assert len(losses) == len(set(losses)) > 1
    if has_completions:
        assert read_completions(other) == read_completions(one)
    weights = [(run_dir / "model/model.safetensors").read_bytes() for run_dir in (one, other)]
    assert weights[0] == weights[1]
