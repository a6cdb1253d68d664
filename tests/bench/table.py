"""Print the figures of a run's steps, without its first ones and the last, from its metrics.jsonl.

python tests/bench/table.py RUN_DIR [FIRST_STEP]
"""

import pathlib
import sys

from speed import records, spread

SHOWN = ("time/", "tokens_per_second", "memory/peak_gib", "mismatch/", "loss", "kl", "grad_norm")


def main(run_dir: str, first_step: int = 3) -> None:
    """Print median, lowest and highest of each figure over the steps from `first_step` on, without the last."""
    steps = [line for line in records(pathlib.Path(run_dir)) if "time/step" in line]
    print(f"{len(steps)} steps; time/step of each: {[round(step['time/step'], 2) for step in steps]}")
    steps = [step for step in steps[:-1] if step["step"] >= first_step]
    for name in steps[0]:
        values = [step[name] for step in steps if step.get(name) is not None]
        if values and name.startswith(SHOWN):
            print(f"{name:28} {spread(values)}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
