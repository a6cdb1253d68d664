"""What a run achieved, on one screen, and the rollouts of one of its steps: `python -m grpo.look RUN_DIR`.

    python -m grpo.look RUN_DIR [RUN_DIR ...]                accuracy, reward or losses, a curve, answers
    python -m grpo.look RUN_DIR --step 40 [--worst]          that step's completions, sorted by reward
    python -m grpo.look RUN_DIR --turns                      conversations turn by turn
    python -m grpo.look RUN_DIR --evaluation                 held-out ones, of the latest step
    python -m grpo.look RUN_DIR [RUN_DIR ...] --html         all of it as a page, RUN_DIR/look.html

A folder of `grpo.replay --methods` shows its methods side by side, as if each were a run.

The first reads metrics.jsonl and shows several runs side by side; the others read completions.jsonl, which a run writes
every `metrics.samples_interval` steps, and evaluation.jsonl. Texts are whole; what would act on a terminal is shown as
an escape (`\\x1b`).
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import Positional

from grpo.folder.run_folder import read_marker
from grpo.report.rollout_metrics import reward_parts
from grpo.report.samples import describe, is_number, number_text, ranked_by_reward
from grpo.text import aligned, compact_number, one_line, printable, shorten
from grpo.tools.page import PageRun, write_page
from grpo.types import Record
from grpo.watch.failures import refuse_bad_input, run_rank

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATION = "evaluation.jsonl"
# Fields that each line of the last two must have, and their types; numbers are shown as they are, whatever they are
ROLLOUT_FIELDS = {
    "step": int,
    "row": object,
    "prompt": str,
    "columns": dict,
    "completion": str,
    "rewards": dict,
    "reward": object,
    "advantage": object,
    "mismatch": object,
    "finish_reason": object,
    "num_tokens": object,
    "failures": dict,
}
Curve = list[tuple[int, float]]  # steps and values, at least one
MARKS = "•×+o#*@%&="  # of the runs' curves, or the methods'
OF_METHOD = "/grad_norm"  # ends a metric of each method that was compared
# The table has the mean of these metrics, and of the reward's parts, over the last LATE_STEPS steps that have them.
LATE_METRICS = [
    "kl",
    "entropy",
    "completion/length_mean",
    "grad_norm",
    "tokens_per_second",
    "time/step",
]
LATE_STEPS = 10
CELL_CHARACTERS = 40
NUM_ANSWERS = 3  # held-out questions whose answers before and after training are shown
ANSWER_CHARACTERS = 200


@dataclass(frozen=True)
class Options:
    """The command line."""

    run_dirs: Positional[tuple[Path, ...]]
    step: str = ""
    """Show the rollouts after this number of steps, or of the `latest` one."""
    num: int = 10
    """The number of rollouts that are shown; 0 shows all."""
    worst: bool = False
    """The lowest rewards first."""
    prompt: str = ""
    """Only rollouts whose prompt has this text."""
    turns: bool = False
    """Conversations turn by turn."""
    evaluation: bool = False
    """Held-out completions."""
    html: bool = False
    """Write a page: curves, rollouts (of `--step`), tokens."""


def main(arguments: list[str] | None = None) -> None:
    """Print the summary, or the chosen rollouts, or write the page."""
    options = tyro.cli(Options, prog="python -m grpo.look", description=__doc__, args=arguments)
    chooses_rollouts = options.step or options.worst or options.prompt or options.turns or options.evaluation
    with refuse_bad_input():
        if not options.run_dirs:
            raise ValueError("name the folder of a run")
        if len(options.run_dirs) > 1 and chooses_rollouts:
            raise ValueError("rollouts are shown of one run; name one folder")
        if options.html:
            text = page_text(options)
        elif chooses_rollouts:
            text = rollouts_text(options)
        else:
            text = summarize(options.run_dirs)

    sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, not a traceback
    print(printable(text))  # another's files may contain what acts on a terminal


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def summarize(run_dirs: Sequence[Path]) -> str:
    """Return what runs achieved: a table with the config fields that differ, a plot, answers, and their files.

    Raises ValueError if a run has no metrics.jsonl, or there are more runs than MARKS.
    """
    if len(run_dirs) > len(MARKS):
        raise ValueError(f"{len(run_dirs)} runs are too many for one plot; name up to {len(MARKS)}")
    methods = lines_of(run_dirs[0])
    if len(methods) > len(run_dirs):
        return compare_methods(methods)
    runs = [read_metrics(run_dir) for run_dir in run_dirs]
    curves = [curves_of(records) for records in runs]
    lines = aligned(table_of(run_dirs, runs, curves))
    for label in curves[0]:
        shared = [of_run[label] for of_run in curves if label in of_run]
        if len(shared) == len(curves):
            lines += ["", f"{label}:"]
            lines += map("{} {}".format, MARKS, run_dirs)
            lines += ["", terminal_curves(shared)]
            break
    if len(run_dirs) == 1:
        lines += answers_before_and_after(run_dirs[0])

    lines.append("")
    for run_dir in run_dirs:
        for name in ("tensorboard", "model"):
            path = run_dir / name
            if path.exists():
                lines.append(str(path))
    return "\n".join(lines)


def compare_methods(methods: dict[str, list[Record]]) -> str:
    """Return a table of each metric's mean over the steps, and a chart of it with the marks of the table's head."""
    rows = [["mean", *map("{} {}".format, MARKS, methods)]]
    charts = []
    for name in dict.fromkeys(itertools.chain(*itertools.chain(*methods.values()))):
        curves = [curve_of(records, name) for records in methods.values()]
        if name != "step" and any(curves):
            rows.append([name, *(mean_text([value for _, value in curve]) for curve in curves)])
            charts += ["", f"{name}:", terminal_curves(curves)]
    return "\n".join(aligned(rows) + charts)


def mean_text(values: list[float]) -> str:
    """Return the mean for a table, or `-` if there are no values."""
    return compact_number(statistics.fmean(values)) if values else "-"


def table_of(
    run_dirs: Sequence[Path],
    runs: list[list[Record]],
    curves: list[dict[str, Curve]],
) -> list[list[str]]:
    """Return the rows of the summary's table. A row is a name and a text for each run."""
    rows = [["", *map(str, run_dirs)]]
    for label in dict.fromkeys(itertools.chain(*curves)):
        cells = [first_to_last(of_run.get(label, [])) for of_run in curves]
        rows.append([label, *cells])
    num_steps = []
    minutes = []
    for records in runs:
        seconds = values_of(records, "time/step")
        num_steps.append(str(len(seconds)))
        minutes.append(f"{sum(seconds) / 60:.1f}")
    rows.append(["steps", *num_steps])
    rows.append(["minutes, start-up not counted", *minutes])
    parts = reward_parts(dict.fromkeys(itertools.chain(*itertools.chain(*runs))))
    of_parts = [f"reward/{part}" for part in parts] if len(parts) > 1 else []
    for name in of_parts + LATE_METRICS:
        means = [mean_text(values_of(records, name)[-LATE_STEPS:]) for records in runs]
        if set(means) != {"-"}:
            rows.append([f"{name}, mean of the last {LATE_STEPS} steps", *means])
    return rows + differing_fields(run_dirs)


def curves_of(records: list[Record]) -> dict[str, Curve]:
    """Return what a run is judged by: held-out accuracy, reward and a teacher's KL, or losses without rewards (SFT).

    Curves with more than one value come first, the most important of them at the front.
    """
    names = dict.fromkeys(itertools.chain(*records))
    accuracies = [name for name in names if name.startswith("eval/") and name.endswith("accuracy")]
    accuracy = "eval/accuracy"
    held_out = "held-out prompts"
    if accuracies:
        accuracy = accuracies[0]  # of several held-out sets (`eval/SET/accuracy`) the first
        for held_out_set in accuracy.split("/")[1:-1]:
            held_out += f" of {held_out_set}"
    labels = {}
    if any(values_of(records, accuracy)):
        labels[accuracy] = f"accuracy on {held_out} (greedy)"
    else:  # no graded reward reached `reward.pass_value`
        mean_reward = accuracy.removesuffix("accuracy") + "reward_mean"
        labels[mean_reward] = f"mean reward on {held_out}"
    if "reward/mean" in names:
        labels["reward/mean"] = "mean reward of the sampled completions"
    else:
        labels["validation/loss"] = "loss on held-out examples"
        labels["loss"] = "loss on training examples"
    if "distill/reverse_kl" in names:
        labels["distill/reverse_kl"] = "KL from the policy to its teacher"
        if not any(values_of(records, "reward/mean")):  # reward functions of weight 0 only measure
            del labels["reward/mean"]

    long_curves = {}
    short_curves = {}
    for name, label in labels.items():
        curve = curve_of(records, name)
        if len(curve) > 1:
            long_curves[label] = curve
        elif curve:
            short_curves[label] = curve
    return long_curves | short_curves


def curve_of(records: list[Record], name: str) -> Curve:
    """Return a metric's steps and values, without records that lack it or have no number."""
    return [(record["step"], record[name]) for record in records if is_number(record.get(name))]


def values_of(records: list[Record], name: str) -> list[float]:
    """Return a metric's values."""
    return [value for _, value in curve_of(records, name)]


def first_to_last(curve: Curve) -> str:
    """Return `0.25 to 0.75`, a single number if both are equal, or `-` for no curve."""
    if not curve:
        return "-"
    ends = dict.fromkeys(compact_number(value) for _, value in (curve[0], curve[-1]))
    return " to ".join(ends)


def differing_fields(run_dirs: Sequence[Path]) -> list[list[str]]:
    """Return rows of a config field and its value in each run, for fields that differ.

    The run folder is left out. Without a run.json in each folder there are none.
    """
    markers = [read_marker(run_dir) for run_dir in run_dirs]
    if not all(markers):
        return []
    configs = [marker["config"] for marker in markers]
    names = dict.fromkeys(itertools.chain(*configs))
    del names["run_dir"]
    rows = []
    for name in names:
        values = [one_line(str(config.get(name, "-"))) for config in configs]
        cells = [shorten(value, CELL_CHARACTERS) for value in values]
        if len(set(values)) > 1:
            rows.append([name, *cells])
    return rows


def terminal_curves(
    curves: list[Curve],
    width: int = 60,
    height: int = 8,
) -> str:
    """Draw curves over their steps as a chart of `height` text lines and `width` columns, with values at the left.

    Each curve has its own mark, see MARKS; one without values is not drawn. Values that share a column are averaged,
    and between columns with values a curve is straight. If all values are equal, the chart has one line.
    """
    steps = [step for curve in curves for step, _ in curve]
    first_to_last_step = (min(steps), max(steps))
    columns = []
    for curve in curves:
        if not curve:
            columns.append([math.nan] * width)
            continue
        steps, values = np.transpose(curve)
        counts, _ = np.histogram(steps, width, first_to_last_step)
        sums, _ = np.histogram(steps, width, first_to_last_step, weights=values)
        (filled,) = counts.nonzero()
        means = sums[filled] / counts[filled]
        column = np.interp(range(width), filled, means, left=math.nan, right=math.nan)
        columns.append(column)

    lowest = np.nanmin(columns)
    highest = np.nanmax(columns)
    if lowest == highest:
        height = 1
    unit = (highest - lowest) / max(1, height - 1) or 1.0
    grid = [[" "] * width for _ in range(height)]  # from the lowest line up
    for values, mark in zip(columns, MARKS, strict=False):
        for x in np.flatnonzero(np.isfinite(values)):
            y = round((values[x] - lowest) / unit)
            grid[y][x] = mark

    # Rounded, because a sum like -0.3 + 3 * 0.1 is not quite 0.
    values = [round(lowest / unit + y, 6) * unit for y in range(height)]
    labels = list(map(compact_number, values))
    margin = max(map(len, labels))
    lines = []
    for label, row in zip(labels, grid, strict=True):
        line = f"{label:>{margin}} ┤" + "".join(row)
        lines.append(line.rstrip())
    return "\n".join(reversed(lines))


def answers_before_and_after(run_dir: Path) -> list[str]:
    """Show the first held-out questions with the model's greedy answers in the first and the last evaluation.

    Returns lines for a terminal; none if there were not two evaluations.
    """
    path = run_dir / EVALUATION
    if not path.is_file():
        return []
    first = {}
    last = {}
    for record in read_lines(path, ""):
        if record.get("kind") == "greedy":
            row = (record.get("source"), record["row"])
            first.setdefault(row, record)
            last[row] = record
    lines = []
    answered_twice = [row for row in first if last[row]["step"] > first[row]["step"]]
    for row in answered_twice[:NUM_ANSWERS]:
        question = shorten(one_line(question_of(first[row])), ANSWER_CHARACTERS)
        lines += ["", f"held out   {question}"]
        for name, record in {"before": first[row], "after": last[row]}.items():
            answer = shorten(one_line(record["completion"]), ANSWER_CHARACTERS)
            lines.append(f"  {name:<8} {answer}   (reward {number_text(record['reward'])})")
    return lines


def question_of(record: Record) -> str:
    """Return the text in the columns that stands last in the prompt, such as a question or the last message.

    If there is none, it is the prompt.
    """
    prompt = record["prompt"]
    in_prompt = [text for text in texts_in(record["columns"]) if text and text in prompt]
    return max(in_prompt, key=lambda text: (prompt.rfind(text) + len(text), len(text)), default=prompt)


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


def rollouts_text(options: Options) -> str:
    """Return the chosen rollouts of a step as text, sorted by reward. One without a reward counts as the lowest.

    Raises ValueError if there are none.
    """
    run_dir = options.run_dirs[0]
    step, records = rollouts_of_step(options, options.step or "latest")
    matching = [record for record in records if options.prompt in record["prompt"]]
    if not matching:
        raise ValueError(f"no prompt of the step has the text {options.prompt!r}")
    shown = ranked_by_reward(matching, options.worst)[: options.num or None]
    order = "lowest" if options.worst else "highest"
    title = f"{run_dir} after step {step}: {len(shown)} of {len(records)} completions, {order} reward first"
    texts = [describe(record, turns=options.turns) for record in shown]
    return "\n\n".join([title, *texts])


def rollouts_of_step(options: Options, step: str) -> tuple[int, list[Record]]:
    """Return (step, its records); `step` is a number or `latest`. Raises ValueError if there is no such step."""
    name = EVALUATION if options.evaluation else COMPLETIONS
    path = options.run_dirs[0] / name
    records = read_lines(path, "name the folder of a run that writes it (see metrics.samples_interval)")
    steps = []
    chosen = None
    for number, group in itertools.groupby(records, lambda record: record["step"]):
        steps.append(str(number))
        if step in ("latest", str(number)):  # only one step is kept: the file of a long run is large
            chosen = (number, list(group))
    if not chosen:
        existing = ", ".join(steps) or "none"
        raise ValueError(f"{path} has no completions of step {step}; there are: {existing} (or latest)")
    return chosen


def page_text(options: Options) -> str:
    """Write the page, with the rollouts of all steps unless one is chosen, and return where it is and how large."""
    runs = []
    for run_dir in options.run_dirs:
        if options.step:
            _, rollouts = rollouts_of_step(options, options.step)
        else:
            paths = [run_dir / COMPLETIONS, run_dir / EVALUATION]
            files = [read_lines(path, "") for path in paths if path.is_file()]
            rollouts = itertools.chain(*files)
        models = [str(run_dir / "model"), str(run_dir / "initial_model")]
        facts = []
        marker = read_marker(run_dir)
        if marker:
            trained_model = str(marker["config"].get("model.path")).strip("'")
            models.append(trained_model)
            command = map(str, marker.get("command", []))
            facts = [trained_model, " ".join([marker["script"], *command])]
        runs.append(PageRun(run_dir, facts, lines_of(run_dir), rollouts, models))
    path = write_page(runs)
    return f"{path}, {compact_number(path.stat().st_size)}B: open it in a browser; it needs no other file"


def lines_of(run_dir: Path) -> dict[str, list[Record]]:
    """Return a run's metrics under its name; of a comparison of methods those of each, `METHOD/NAME`, as NAME."""
    records = read_metrics(run_dir)
    names = dict.fromkeys(itertools.chain(*records))
    lines = {}
    for method in (name.removesuffix(OF_METHOD) for name in names if name.endswith(OF_METHOD)):
        prefix = f"{method}/"
        lines[method] = []
        for record in records:
            measured = {name.removeprefix(prefix): record[name] for name in record if name.startswith(prefix)}
            lines[method].append({"step": record["step"], **measured})
    return lines or {str(run_dir): records}


def read_metrics(run_dir: Path) -> list[Record]:
    """Return what a run logged, a record per step and per evaluation. Raises ValueError if there is no such file."""
    return list(read_lines(run_dir / METRICS, "train first, or name another run folder"))


def read_lines(path: Path, way_out: str) -> Iterator[Record]:
    """Read the records of a .jsonl file. A last line that is still being written is left out.

    Raises ValueError with the line's number if one is damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {way_out}")
    needed = {"step": int} if path.name == METRICS else ROLLOUT_FIELDS
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line, parse_constant=str, parse_float=finite_or_text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); remove that line") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not an object; remove that line")
            for name, kind in needed.items():
                if name not in record or not isinstance(record[name], kind):
                    raise ValueError(f"{path}, line {number}: no {name}, or of another type; remove that line")
            yield record


def finite_or_text(text: str) -> float | str:
    """Read a number of JSON. What is beyond the range of floats stays a text, as NaN does, which strict JSON lacks."""
    value = float(text)
    return value if math.isfinite(value) else text


if __name__ == "__main__":
    run_rank(main)
