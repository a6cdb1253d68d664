"""What a run achieved, on one screen, and the rollouts of one of its steps: `python -m grpo.look RUN_DIR`.

    python -m grpo.look RUN_DIR                              accuracy or mean reward, its curve, the files
    python -m grpo.look RUN_DIR --step 40 [--worst]          that step's completions, sorted by reward
    python -m grpo.look RUN_DIR --evaluation                 held-out ones, of the latest step

The first reads metrics.jsonl, the others completions.jsonl, which a run writes every `metrics.samples_interval` steps,
and evaluation.jsonl. Texts are whole; what would act on a terminal is shown as an escape (`\\x1b`).
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from grpo.text import compact_number, number_or_none, printable

FILES = {False: "completions.jsonl", True: "evaluation.jsonl"}


def main(arguments: list[str] | None = None) -> None:
    """Print the summary, or the chosen rollouts. Raises SystemExit with the reason if there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.look", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    parser.add_argument("--step", default="", metavar="N", help="show rollouts: those after so many steps, or latest")
    parser.add_argument("--num", type=int, default=10, metavar="N", help="show so many (10); 0 shows all")
    parser.add_argument("--worst", action="store_true", help="the lowest rewards first")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only prompts that have this text")
    parser.add_argument("--evaluation", action="store_true", help="held-out completions instead")
    given = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    step = given.step or ("latest" if given.worst or given.prompt or given.evaluation else "")
    if not step:
        print(summarize(read_metrics(given.run_dir), given.run_dir))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        step, records = read_step(given.run_dir / FILES[given.evaluation], step)
        chosen = choose(records, given.prompt, given.worst, given.num)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    title = f"{given.run_dir} after step {step}: {len(chosen)} of {len(records)} completions"
    console.print(Text(f"{title}, {'lowest' if given.worst else 'highest'} reward first", "bold"))
    for record in chosen:
        console.print(Rule(style="dim"))
        console.print(describe(record))


def read_metrics(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl. Raises SystemExit if there is none."""
    if not (run_dir / "metrics.jsonl").is_file():
        raise SystemExit(f"{run_dir}/metrics.jsonl does not exist; train first, or name another run folder")
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


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


def read_step(path: pathlib.Path, step: str) -> tuple[int, list[dict[str, Any]]]:
    """(step, its records) of one of the .jsonl files; `step` is a number or `latest`.

    A last line that is still being written is left out. Raises ValueError if there is no such file or step.
    """
    if step != "latest" and not step.isdecimal():
        raise ValueError(f"--step {step}: give a number, or latest")
    if not path.is_file():
        way_out = "the run evaluated nothing" if path.name == FILES[True] else "see metrics.samples_interval"
        raise ValueError(f"{path} does not exist: name the folder of a run that writes it ({way_out})")
    found: dict[int, list[dict[str, Any]]] = {}
    with open(path, encoding="utf-8") as file:
        for record in (json.loads(line) for line in file if line.endswith("\n")):
            if record["step"] not in found and step == "latest":
                found.clear()  # a file of a long run is large; one step of it is kept
            keep = found.setdefault(record["step"], [])
            if step in ("latest", str(record["step"])):
                keep.append(record)
    wanted = max(found, default=None) if step == "latest" else int(step)
    if not found.get(wanted):
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ValueError(f"{path} has no completions of step {step}; there are those of: {there}")
    return wanted, found[wanted]


def choose(records: list[dict[str, Any]], prompt: str = "", worst: bool = False, num: int = 0) -> list[dict[str, Any]]:
    """The first `num` (0: all) by reward, highest first unless `worst`; one without a reward counts as lowest.

    Completions of equal reward stay in the order in which they were written. Raises ValueError if no prompt has the
    text `prompt`.
    """
    found = [record for record in records if prompt in record["prompt"]]
    if not found:
        raise ValueError(f"no prompt of the step has the text {prompt!r}")
    sign = 1 if worst else -1
    ranked = sorted(found, key=lambda record: sign * (-math.inf if record["reward"] is None else record["reward"]))
    return ranked[:num] if num else ranked


def describe(record: dict[str, Any]) -> Text:
    """Numbers in one line, then failures, prompt and completion; printable."""
    parts = [f"{name} {number_or_none(value)}" for name, value in record["rewards"].items()]
    numbers = [
        *([record["kind"]] if "kind" in record else []),
        *([f"source {record['source']}"] if "source" in record else []),
        f"row {record['row']}",
        *(f"{name} {number_or_none(record[name])}" for name in ("advantage", "mismatch") if record[name] is not None),
        f"{record['num_tokens']} tokens, finish reason {record['finish_reason']}",
    ]
    lines = [
        (f"reward {number_or_none(record['reward'])}", "bold"),
        (printable("".join(f" | {part}" for part in [*parts, *numbers])) + "\n", ""),
        *((printable(f"{name} failed: {why}\n"), "red") for name, why in record["failures"].items()),
        (printable(record["prompt"]).rstrip("\n") + "\n", "dim"),
        (printable(record["completion"]), ""),
    ]
    return Text.assemble(*lines)


if __name__ == "__main__":
    main()
