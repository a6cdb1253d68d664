"""What a run achieved, on one screen, and the rollouts of one of its steps: `python -m grpo.look RUN_DIR`.

    python -m grpo.look RUN_DIR [RUN_DIR ...]                accuracy, reward or losses, a curve, answers
    python -m grpo.look RUN_DIR --step 40 [--worst]          that step's completions, sorted by reward
    python -m grpo.look RUN_DIR --turns                      conversations turn by turn
    python -m grpo.look RUN_DIR --evaluation                 held-out ones, of the latest step
    python -m grpo.look RUN_DIR --html [--step 40]           all of it as a page, RUN_DIR/look.html

The first reads metrics.jsonl and shows several runs side by side; the others read completions.jsonl, which a run writes
every `metrics.samples_interval` steps, and evaluation.jsonl. Texts are whole; what would act on a terminal is shown as
an escape (`\\x1b`).
"""

import argparse
import ast
import contextlib
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

from grpo.folder.run_folder import read_marker
from grpo.report.page import write_page
from grpo.report.samples import describe
from grpo.text import compact_number, one_line, printable, shorten

METRICS, COMPLETIONS, EVALUATION = "metrics.jsonl", "completions.jsonl", "evaluation.jsonl"
# What is read of each line of the last two
OF_A_ROLLOUT = ("step", "row", "prompt", "columns", "completion", "rewards", "reward", "advantage", "mismatch")
OF_A_ROLLOUT += ("finish_reason", "num_tokens", "failures")
Record = dict[str, Any]  # a line of a .jsonl file
Curve = list[tuple[int, float]]  # steps and values, at least one
MARKS = "─•×+o#"  # what draws the curve of each run; the first one's is a line
# The table has the mean of these metrics over the last so many steps that have them.
LATE_METRICS = ("kl", "entropy", "completion/length_mean", "grad_norm", "tokens_per_second", "time/step")
LATE_STEPS = 10
CELL_CHARACTERS = 40
# Held-out questions whose answers before and after are shown, and how much of each text
NUM_ANSWERS, ANSWER_CHARACTERS = 3, 200


def main(arguments: list[str] | None = None) -> None:
    """Print the summary, or the chosen rollouts. Raises SystemExit with the reason if there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.look", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=pathlib.Path, metavar="RUN_DIR", nargs="+")
    parser.add_argument("--step", default="", metavar="N", help="show rollouts: those after so many steps, or latest")
    parser.add_argument("--num", type=int, default=10, metavar="N", help="show so many (10); 0 shows all")
    parser.add_argument("--worst", action="store_true", help="the lowest rewards first")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only prompts that have this text")
    parser.add_argument("--turns", action="store_true", help="conversations turn by turn")
    parser.add_argument("--evaluation", action="store_true", help="held-out completions instead")
    parser.add_argument("--html", action="store_true", help="write a page: curves, rollouts (of --step), tokens")
    given = parser.parse_args(arguments)
    asks = given.step or given.worst or given.prompt or given.turns or given.evaluation
    try:
        if len(given.run_dirs) > 1 and (asks or given.html):
            raise ValueError("rollouts are shown of one run; name one folder")
        if given.html:
            text = page_text(given)
        elif asks:
            text = rollouts_text(given)
        else:
            text = summarize(given.run_dirs)
    except (ValueError, OSError) as error:
        raise SystemExit(printable(str(error))) from error
    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    try:
        print(printable(text), flush=True)  # files of others may hold what acts on a terminal
    except BrokenPipeError:  # of `| head`; Python would flush, and complain, once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def summarize(run_dirs: list[pathlib.Path]) -> str:
    """What runs achieved in a table, with the fields in which their configs differ, in one plot, and their files.

    Raises ValueError if a run has no metrics.jsonl, or there are more runs than MARKS.
    """
    if len(run_dirs) > len(MARKS):
        raise ValueError(f"{len(run_dirs)} runs are too many for one plot; name up to {len(MARKS)}")
    runs = [read_metrics(run_dir) for run_dir in run_dirs]
    found = [curves(records) for records in runs]
    rows = [["", *map(str, run_dirs)]]
    for label in dict.fromkeys(itertools.chain(*found)):
        ends = [dict.fromkeys(compact_number(run[label][i][1]) for i in (0, -1) if label in run) for run in found]
        rows.append([label, *(" to ".join(values) or "-" for values in ends)])
    seconds = [values_of(records, "time/step") for records in runs]
    rows.append(["steps", *(str(len(of_run)) for of_run in seconds)])
    rows.append(["minutes, start-up not counted", *(f"{sum(of_run) / 60:.1f}" for of_run in seconds)])
    for name in LATE_METRICS:
        late = [values_of(records, name)[-LATE_STEPS:] for records in runs]
        if any(late):
            means = (compact_number(statistics.fmean(values)) if values else "-" for values in late)
            rows.append([f"{name}, mean of the last {LATE_STEPS} steps", *means])
    rows += differing_fields(run_dirs)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if label := next((label for label in found[0] if all(label in run for run in found)), ""):
        lines += ["", f"{label}:", *map("{} {}".format, MARKS, run_dirs)]
        lines += ["", terminal_curves([run[label] for run in found])]
    if len(run_dirs) == 1:
        lines += answers_before_and_after(run_dirs[0])
    files = (run_dir / name for run_dir in run_dirs for name in ("tensorboard", "samples.txt", "model"))
    return "\n".join([*lines, "", *(str(path) for path in files if path.exists())])


def answers_before_and_after(run_dir: pathlib.Path) -> list[str]:
    """Show the first held-out questions with the model's greedy answers in the first and the last evaluation.

    Returns lines for a terminal; none if there were not two evaluations.
    """
    path = run_dir / EVALUATION
    if not path.is_file():
        return []
    first: dict[Any, Record] = {}
    last: dict[Any, Record] = {}
    for record in read_lines(path, ""):
        if record.get("kind") != "greedy":
            continue
        row = record.get("source"), record["row"]
        first.setdefault(row, record)
        last[row] = record
    rows = [row for row in first if last[row]["step"] > first[row]["step"]]
    lines = []
    for row in rows[:NUM_ANSWERS]:
        lines += ["", f"held out   {one_line(question_of(first[row]))}"]
        for name, record in ("before", first[row]), ("after", last[row]):
            answer = shorten(one_line(record["completion"]), ANSWER_CHARACTERS)
            reward = "none" if record["reward"] is None else compact_number(record["reward"])
            lines.append(f"  {name:<8} {answer}   (reward {reward})")
    return lines


def question_of(record: Record) -> str:
    """Return the text of a column that stands in the prompt, the longest if several do, else the end of the prompt."""
    prompt = record["prompt"]
    in_prompt = [text for text in record["columns"].values() if isinstance(text, str) and text and text in prompt]
    return max(in_prompt, key=len, default=prompt[-ANSWER_CHARACTERS:])


def curves(records: list[Record]) -> dict[str, Curve]:
    """What a run is judged by: accuracy on held-out prompts, reward, and without rewards (SFT) losses.

    The most telling comes first, among those that have more than one value.
    """
    names = dict.fromkeys(itertools.chain(*records))
    # of several held-out sets (`eval/SET/accuracy`) the first
    accuracy = next((n for n in names if n.startswith("eval/") and n.endswith("accuracy")), "eval/accuracy")
    held_out_set = "".join(f" of {part}" for part in accuracy.split("/")[1:-1])
    if any(values_of(records, accuracy)):
        labels = {accuracy: f"accuracy on held-out prompts{held_out_set} (greedy)"}
    else:  # a graded reward, of which none reached `reward.pass_value`
        labels = {f"{accuracy.removesuffix('accuracy')}reward_mean": f"mean reward on held-out prompts{held_out_set}"}
    if "reward/mean" in names:
        labels["reward/mean"] = "mean reward of the sampled completions"
    else:
        labels |= {"validation/loss": "loss on held-out examples", "loss": "loss on training examples"}
    found = {label: [(r["step"], r[n]) for r in records if r.get(n) is not None] for n, label in labels.items()}
    return {label: found[label] for label in sorted(found, key=lambda label: len(found[label]) < 2) if found[label]}


def values_of(records: list[Record], name: str) -> list[float]:
    """A metric's values, where it has one."""
    return [record[name] for record in records if record.get(name) is not None]


def differing_fields(run_dirs: list[pathlib.Path]) -> list[list[str]]:
    """[field, its value in each run] for each field that differs, except the folder; none if one has no run.json."""
    markers = [read_marker(run_dir) for run_dir in run_dirs]
    if not all(markers):
        return []
    configs = [marker["config"] for marker in markers]
    names = [name for name in dict.fromkeys(itertools.chain(*configs)) if name != "run_dir"]
    rows = [[name, *(shorten(one_line(str(c.get(name, "-"))), CELL_CHARACTERS) for c in configs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def terminal_curves(curves: list[Curve], width: int = 60, height: int = 8) -> str:
    """A chart of `height` text lines and `width` columns, with y labels at the left, from the first step to the last.

    The first curve is a line, each further one dots, see MARKS. The values of a column are averaged, and between the
    columns that have any a curve is straight.
    """
    steps = [step for curve in curves for step, _ in curve]
    columns = [_columns(curve, min(steps), max(steps), width) for curve in curves]
    low, unit = np.nanmin(columns), (np.nanmax(columns) - np.nanmin(columns)) / (height - 1) or 1.0
    grid = [[" "] * width for _ in range(height)]  # from the lowest line up
    for values, mark in zip(columns, MARKS, strict=False):
        rows = [None if math.isnan(value) else round((value - low) / unit) for value in values]
        for x, (before, now) in enumerate(itertools.pairwise([rows[0], *rows])):
            if now is None:
                continue
            if mark != MARKS[0] or before in (None, now):
                grid[now][x] = mark
                continue
            for line in range(min(before, now), max(before, now)):
                grid[line][x] = "│"
            grid[before][x], grid[now][x] = "╯╭" if now > before else "╮╰"
    # Rounded, because a sum like -0.3 + 3 * 0.1 is not quite 0.
    labels = [compact_number(round(low / unit + line, 6) * unit) for line in range(height)]
    margin = max(map(len, labels))
    lines = (f"{label:>{margin}} ┤{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True))
    return "\n".join(reversed([*lines]))


def _columns(curve: Curve, first_step: int, last_step: int, width: int) -> np.ndarray:
    """The curve's value in each of `width` columns, NaN before its first step and after its last."""
    steps, values = np.array(curve, dtype=float).T
    places = ((steps - first_step) / max(last_step - first_step, 1) * (width - 1)).round()
    known = np.unique(places)
    means = [values[places == place].mean() for place in known]
    return np.interp(range(width), known, means, left=math.nan, right=math.nan)


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


def rollouts_text(given: argparse.Namespace) -> str:
    """The rollouts that the command line chooses, as text; one without a reward counts as lowest.

    Those of equal reward stay in their order. Raises ValueError if there are none.
    """
    file = EVALUATION if given.evaluation else COMPLETIONS
    step, records = read_step(given.run_dirs[0] / file, given.step or "latest")
    found = [record for record in records if given.prompt in record["prompt"]]
    if not found:
        raise ValueError(f"no prompt of the step has the text {given.prompt!r}")
    sign, first = (1, "lowest") if given.worst else (-1, "highest")
    found.sort(key=lambda record: sign * (-math.inf if record["reward"] is None else record["reward"]))
    chosen = found[: given.num or None]
    title = f"{given.run_dirs[0]} after step {step}: {len(chosen)} of {len(records)} completions, {first} reward first"
    return "\n\n".join([title, *(describe(record, turns=given.turns) for record in chosen)])


def read_step(path: pathlib.Path, step: str) -> tuple[int, list[Record]]:
    """(step, its records) of a .jsonl file; `step` is a number or `latest`. Raises ValueError if it is not there."""
    there, found = [], None
    records = read_lines(path, "name the folder of a run that writes it (see metrics.samples_interval)")
    for number, of_step in itertools.groupby(records, lambda record: record["step"]):
        there.append(str(number))
        if step in ("latest", str(number)):  # a file of a long run is large; one step of it is kept
            found = number, list(of_step)
    if not found:
        raise ValueError(
            f"{path} has no completions of step {step}; there are: {', '.join(there) or 'none'} (or latest)"
        )
    return found


def page_text(given: argparse.Namespace) -> str:
    """Write the page, with the rollouts of all steps unless one is asked for, and tell where it is and how large."""
    run_dir = given.run_dirs[0]
    if given.step:
        _, rollouts = read_step(run_dir / (EVALUATION if given.evaluation else COMPLETIONS), given.step)
    else:
        paths = [path for name in (COMPLETIONS, EVALUATION) if (path := run_dir / name).is_file()]
        rollouts = itertools.chain.from_iterable(read_lines(path, "") for path in paths)
    models = [str(run_dir / "model"), str(run_dir / "initial_model")]
    if marker := read_marker(run_dir):
        with contextlib.suppress(ValueError, SyntaxError):  # of a foreign file
            models.append(str(ast.literal_eval(str(marker["config"].get("model.path")))))
    path = write_page(run_dir, read_metrics(run_dir), rollouts, models)
    return f"{path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser; it needs no other file"


def read_metrics(run_dir: pathlib.Path) -> list[Record]:
    """What a run logged, a record per step and per evaluation. Raises ValueError if there is no such file."""
    return list(read_lines(run_dir / METRICS, "train first, or name another run folder"))


def read_lines(path: pathlib.Path, way_out: str) -> Iterator[Record]:
    """Read the records of a .jsonl file. A last line that is still being written is left out.

    Raises ValueError with the line's number for one that is damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {way_out}")
    needed = ("step",) if path.name == METRICS else OF_A_ROLLOUT
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); remove that line") from error
            missing = [name for name in needed if name not in record] if isinstance(record, dict) else needed
            if missing:
                raise ValueError(f"{path}, line {number}: no {', '.join(missing)}; remove that line")
            yield record


if __name__ == "__main__":
    main()
