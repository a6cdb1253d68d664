"""What a run achieved, on one screen, and the rollouts of one of its steps: `python -m grpo.look RUN_DIR`.

    python -m grpo.look RUN_DIR                              accuracy or mean reward, its curve, the files
    python -m grpo.look RUN_DIR --step 40 [--worst]          that step's completions, sorted by reward
    python -m grpo.look RUN_DIR --turns                      conversations turn by turn
    python -m grpo.look RUN_DIR --evaluation                 held-out ones, of the latest step

The first reads metrics.jsonl, the others completions.jsonl, which a run writes every `metrics.samples_interval` steps,
and evaluation.jsonl. Texts are whole; what would act on a terminal is shown as an escape (`\\x1b`).
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from grpo.report.samples import describe
from grpo.text import compact_number

# Steps and values, at least one.
Curve = list[tuple[int, float]]


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
    parser.add_argument("--turns", action="store_true", help="conversations turn by turn")
    parser.add_argument("--evaluation", action="store_true", help="held-out completions instead")
    given = parser.parse_args(arguments)
    try:
        asks = given.step or given.worst or given.prompt or given.turns or given.evaluation
        text = rollouts_text(given) if asks else summarize(given.run_dir)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`; Python would flush, and complain, once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def summarize(run_dir: pathlib.Path) -> str:
    """The summary as text. Raises ValueError if the run has no metrics.jsonl."""
    records = list(read_lines(run_dir / "metrics.jsonl", "train first, or name another run folder"))
    seconds, found = [record["time/step"] for record in records if "time/step" in record], curves(records)
    lines = [f"{run_dir}: {len(seconds)} steps in {sum(seconds) / 60:.1f} minutes, start-up not counted"]
    for label, curve in found.items():
        ends = dict.fromkeys([curve[0], curve[-1]])
        lines.append(f"{label}: {', '.join(f'{compact_number(value)} after step {step}' for step, value in ends)}")
    for curve in list(found.values())[:1]:
        lines += ["", terminal_curve([value for _, value in curve])]
    places = {"TensorBoard": "tensorboard", "completions to read": "samples.txt", "trained model": "model"}
    lines += ["", *(f"{what}: {run_dir / where}" for what, where in places.items() if (run_dir / where).exists())]
    return "\n".join(lines)


def curves(records: list[dict[str, Any]]) -> dict[str, Curve]:
    """What a run is judged by: accuracy on held-out prompts, reward, and without rewards (SFT) losses.

    The most telling comes first, among those that have more than one value.
    """
    names = dict.fromkeys(name for record in records for name in record)
    # of several held-out sets (`eval/SET/accuracy`) the first
    accuracy = next((n for n in names if n.startswith("eval/") and n.endswith("accuracy")), "eval/accuracy")
    held_out_set = "".join(f" of {part}" for part in accuracy.split("/")[1:-1])
    labels = {accuracy: f"accuracy on held-out prompts{held_out_set} (greedy)"}
    if "reward/mean" in names:
        labels["reward/mean"] = "mean reward of the sampled completions"
    else:
        labels |= {"validation/loss": "loss on held-out examples", "loss": "loss on training examples"}
    found = {label: [(r["step"], r[n]) for r in records if r.get(n) is not None] for n, label in labels.items()}
    return {label: found[label] for label in sorted(found, key=lambda label: len(found[label]) < 2) if found[label]}


def terminal_curve(values: list[float], width: int = 60, height: int = 8) -> str:
    """A line chart of `height` text lines, `width` columns wide, with y labels at the left.

    Few values are joined by straight lines, many are averaged per column.
    """
    if len(values) > width:
        columns = [statistics.fmean(part) for part in np.array_split(values, width)]
    else:
        columns = np.interp(np.linspace(0, len(values) - 1, width), range(len(values)), values).tolist()
    low, unit = min(columns), (max(columns) - min(columns)) / (height - 1) or 1.0
    rows = [round((value - low) / unit) for value in columns]  # 0 is the lowest line

    def mark(line: int, before: int, now: int) -> str:  # a column enters at the previous height, leaves at the new one
        if not min(before, now) <= line <= max(before, now):
            return " "
        if before == now:
            return "─"
        if line == now:
            return "╭" if now > before else "╰"
        return ("╯" if now > before else "╮") if line == before else "│"

    # Rounded, because a sum like -0.3 + 3 * 0.1 is not quite 0.
    labels = [compact_number(round(low / unit + line, 6) * unit) for line in range(height)]
    lines = []
    for line in reversed(range(height)):
        marks = "".join(mark(line, *pair) for pair in itertools.pairwise([rows[0], *rows]))
        lines.append(f"{labels[line]:>{max(map(len, labels))}} ┤{marks}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


def rollouts_text(given: argparse.Namespace) -> str:
    """The rollouts that the command line chooses, as text. Raises ValueError if there are none."""
    file = "evaluation.jsonl" if given.evaluation else "completions.jsonl"
    step, records = read_step(given.run_dir / file, given.step or "latest")
    chosen = choose(records, given.prompt, given.worst, given.num)
    title = f"{given.run_dir} after step {step}: {len(chosen)} of {len(records)} completions"
    title += f", {'lowest' if given.worst else 'highest'} reward first"
    return "\n\n".join([title, *(describe(record, turns=given.turns) for record in chosen)])


def read_step(path: pathlib.Path, step: str) -> tuple[int, list[dict[str, Any]]]:
    """(step, its records) of one of the .jsonl files; `step` is a number or `latest`.

    Raises ValueError if there is no such file or step.
    """
    if step != "latest" and not step.isdecimal():
        raise ValueError(f"--step {step}: give a number, or latest")
    there, found = [], None
    records = read_lines(path, "name the folder of a run that writes it (see metrics.samples_interval)")
    for number, of_step in itertools.groupby(records, lambda record: record["step"]):
        there.append(str(number))
        if step in ("latest", str(number)):  # a file of a long run is large; one step of it is kept
            found = number, list(of_step)
    if not found:
        raise ValueError(f"{path} has no completions of step {step}; there are those of: {', '.join(there) or 'none'}")
    return found


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


def read_lines(path: pathlib.Path, way_out: str) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file; a last line that is still being written is left out."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {way_out}")
    with open(path, encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))


if __name__ == "__main__":
    main()
