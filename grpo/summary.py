"""What a finished run achieved, on one screen: `python -m grpo.summary RUN_DIR`.

Reads `metrics.jsonl` and shows held-out accuracy (without evaluations, the mean reward) before and after, its curve,
the minutes taken, and where the run's files are.
"""

import json
import math
import pathlib
import statistics
import sys

import numpy as np

from grpo.text import compact_number

USAGE = "usage: python -m grpo.summary RUN_DIR"


def main(arguments: list[str]) -> None:
    """Print the summary of the run folder named by the one argument. Raises SystemExit if there is no such run."""
    if arguments in (["--help"], ["-h"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(USAGE)
    run_dir = pathlib.Path(arguments[0])
    if not (run_dir / "metrics.jsonl").is_file():
        raise SystemExit(f"{run_dir}/metrics.jsonl does not exist; train first, or name another run folder")
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as file:
        print(summarize([json.loads(line) for line in file], run_dir))


def summarize(records: list[dict], run_dir: pathlib.Path) -> str:
    """The summary as text. `records` are the lines of metrics.jsonl in their order."""
    steps = [record for record in records if "time/step" in record]
    # of several held-out sets (`eval/SET/accuracy`) the first
    names = [name for record in records for name in record]
    accuracies = [name for name in names if name.startswith("eval/") and name.endswith("accuracy")]
    accuracy = accuracies[0] if accuracies else "eval/accuracy"
    evaluated = [record for record in records if record.get(accuracy) is not None]
    rewarded = [record for record in records if record.get("reward/mean") is not None]
    curve, name, label = rewarded, "reward/mean", "mean reward of the sampled completions"
    if len(evaluated) > 1:
        held_out_set = accuracy.removeprefix("eval/").removesuffix("accuracy").rstrip("/")
        where = f"held-out prompts of {held_out_set}" if held_out_set else "held-out prompts"
        curve, name, label = evaluated, accuracy, f"accuracy on {where} (greedy)"
    minutes = sum(record["time/step"] for record in steps) / 60
    lines = [f"{run_dir}: {len(steps)} steps in {minutes:.1f} minutes, start-up not counted"]
    if curve:
        first, last = (f"{compact_number(r[name])} after step {r['step']}" for r in (curve[0], curve[-1]))
        lines += [f"{label}: {first}, {last}", "", terminal_curve([record[name] for record in curve])]
    places = {"TensorBoard": "tensorboard", "completions to read": "samples.txt", "trained model": "model"}
    lines += ["", *(f"{what}: {run_dir / where}" for what, where in places.items() if (run_dir / where).exists())]
    return "\n".join(lines)


def terminal_curve(values: list[float], width: int = 60, height: int = 8) -> str:
    """A line chart of `height` text lines, `width` columns wide, with y labels at the left.

    Few values are joined by straight lines, many are averaged per column. NaN values are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "(no values)"
    if len(finite) > width:
        columns = [statistics.fmean(part) for part in np.array_split(finite, width)]
    else:
        columns = np.interp(np.linspace(0, len(finite) - 1, width), range(len(finite)), finite).tolist()
    low, high = min(columns), max(columns)
    unit = (high - low) / (height - 1)
    if high <= low:  # a constant lies in the middle, on a line that has its value as label
        unit = 1 / height
        low -= unit * (height // 2)
    rows = [round((value - low) / unit) for value in columns]  # 0 is the lowest line
    canvas = [[" "] * len(rows) for _ in range(height)]
    for x, row in enumerate(rows):
        previous = rows[max(x - 1, 0)]
        if row == previous:
            canvas[row][x] = "─"
            continue
        # Enter at the previous height, leave at the new one.
        canvas[previous][x], canvas[row][x] = ("╯", "╭") if row > previous else ("╮", "╰")
        for between in range(min(row, previous) + 1, max(row, previous)):
            canvas[between][x] = "│"
    # Rounded, because a sum like -0.3 + 3 * 0.1 is not quite 0.
    labels = [compact_number(round((low + row * unit) / unit, 6) * unit) for row in range(height)]
    label_width = max(map(len, labels))
    lines = [f"{label:>{label_width}} ┤{''.join(row)}".rstrip() for label, row in zip(labels, canvas, strict=True)]
    return "\n".join(reversed(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
