"""What the end-to-end tests read out of a run folder."""

import json
import pathlib
import re

TINY = str(pathlib.Path(__file__).parent / "tiny.py")


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_samples(run_dir: pathlib.Path) -> list[tuple[int, str]]:
    """(step, text of its samples) in the order they were written."""
    parts = re.split(r"^===== step (\d+) =+\n", (run_dir / "samples.txt").read_text(), flags=re.MULTILINE)
    return [(int(step), text) for step, text in zip(parts[1::2], parts[2::2], strict=True)]
