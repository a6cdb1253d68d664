"""What the end-to-end tests read out of a run folder."""

import json
import pathlib
import re

CLOCKS = ("time", "tokens_per_second", "memory/")
TINY = str(pathlib.Path(__file__).parent / "tiny.py")


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_samples(run_dir: pathlib.Path) -> list[tuple[int, str]]:
    """(step, text of its samples) in the order they were written."""
    parts = re.split(r"^===== step (\d+) =+\n", (run_dir / "samples.txt").read_text(), flags=re.MULTILINE)
    return [(int(step), text) for step, text in zip(parts[1::2], parts[2::2], strict=True)]


def read_completions(run_dir: pathlib.Path) -> list[dict]:
    """The lines of completions.jsonl."""
    return [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]


def without_clocks(metrics: dict) -> dict:
    """One step's metrics without what differs between two runs of the same thing."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}
