"""Mean step of a run without its first steps, from its metrics.jsonl.

python tests/bench/table.py RUN_DIR [FIRST_STEP]
"""

import json
import pathlib
import statistics
import sys

SHOWN = (
    "time/startup",
    "time/step",
    "time/generate",
    "time/reward",
    "time/reference",
    "time/train",
    "time/sync",
    "time/save",
    "time/other",
)
SHOWN += (
    "tokens_per_second",
    "memory/peak_gib",
    "mismatch/mean",
    "mismatch/max",
    "mismatch/kl",
    "mismatch/ess",
    "loss/ratio_mean",
)
SHOWN += ("loss/ratio_max", "loss", "kl", "grad_norm")


def main(run_dir: str, first_step: int = 3) -> None:
    """Print median, lowest and highest of each figure over the steps from `first_step` on, without the last."""
    lines = [json.loads(line) for line in (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    print(f"{len(steps)} steps; time/step of each: {[round(step['time/step'], 2) for step in steps]}")
    steps = [step for step in steps[:-1] if step["step"] >= first_step]
    for name in SHOWN:
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            print(f"{name:20} {statistics.median(values):12.4g}   ({min(values):.4g} to {max(values):.4g})")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
