"""What a run achieved, on one screen, and the rollouts of one of its steps: `python -m grpo.look RUN_DIR`.

    python -m grpo.look RUN_DIR [RUN_DIR ...]                accuracy, reward or losses, answers
    python -m grpo.look RUN_DIR --step 40 [--worst]          that step's completions, sorted by reward
    python -m grpo.look RUN_DIR --turns                      conversations turn by turn
    python -m grpo.look RUN_DIR --evaluation                 held-out ones, of the latest step
    python -m grpo.look RUN_DIR [RUN_DIR ...] --html         all of it with curves as a page, RUN_DIR/look.html

A folder of `grpo.replay --methods` shows its methods side by side, as if each were a run.

The first reads metrics.jsonl and shows several runs side by side; the others read completions.jsonl, which a run writes
every `metrics.samples_interval` steps, and evaluation.jsonl. Texts are whole; what would act on a terminal is shown as
an escape (`\\x1b`).
"""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

from grpo.folder.run_folder import read_marker
from grpo.report.rollout_metrics import reward_parts
from grpo.report.samples import is_number
from grpo.text import aligned, compact_number, one_line, printable, shorten
from grpo.tools.describe import describe, number_text, ranked_by_reward
from grpo.tools.page import PageRun, write_page
from grpo.types import Record
from grpo.watch.failures import refuse_bad_input, run_rank

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATION = "evaluation.jsonl"
# What each line of the last two must have
ROLLOUT_FIELDS = {
    "step",
    "row",
    "prompt",
    "columns",
    "completion",
    "rewards",
    "reward",
    "advantage",
    "mismatch",
    "finish_reason",
    "num_tokens",
    "failures",
}
OF_METHOD = "/grad_norm"  # ends a metric of each method that was compared
# What a run is judged by: endings of metrics' names, and which value is the best
JUDGED = {
    "accuracy": max,
    "reward_mean": max,
    "reward/mean": max,
    "loss": min,
    "distill/reverse_kl": min,
}
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
    options = tyro.cli(
        Options,
        prog="python -m grpo.look",
        description=__doc__,
        args=arguments,
    )
    lists_rollouts = options.num != Options.num or options.worst or options.prompt or options.turns
    chooses_rollouts = lists_rollouts or options.step or options.evaluation
    with refuse_bad_input():
        if not options.run_dirs:
            raise ValueError("name the folder of a run")
        if len(options.run_dirs) > 1 and chooses_rollouts:
            raise ValueError("rollouts are shown of one run; name one folder")
        if options.html and lists_rollouts:
            raise ValueError("the page has all rollouts of --step; leave out --num, --worst, --prompt and --turns")
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
    """Return what runs achieved: a table with the config fields that differ, answers, and their files.

    Raises ValueError if a run has no metrics.jsonl.
    """
    methods = lines_of(run_dirs[0])
    if len(methods) > len(run_dirs):
        return compare_methods(methods)
    lines = aligned(table_of(run_dirs, [read_metrics(run_dir) for run_dir in run_dirs]))
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
    """Return a table of each metric's mean over the steps."""
    rows = [["mean", *methods]]
    for name in names_in(methods.values()):
        means = [mean_text(values_of(records, name)) for records in methods.values()]
        if name != "step" and set(means) != {"-"}:
            rows.append([name, *means])
    return "\n".join(aligned(rows))


def names_in(runs: Iterable[list[Record]]) -> list[str]:
    """List the names in all records of runs, in the order in which they come."""
    return list(dict.fromkeys(itertools.chain(*itertools.chain(*runs))))


def mean_text(values: list[float]) -> str:
    """Return the mean for a table, or `-` if there are no values."""
    return compact_number(statistics.fmean(values)) if values else "-"


def table_of(run_dirs: Sequence[Path], runs: list[list[Record]]) -> list[list[str]]:
    """Return the rows of the summary's table. A row is a name and a text for each run."""
    rows = [["", *map(str, run_dirs)]]
    names = names_in(runs)
    judged = [name for name in names if name != "loss" or "reward/mean" not in names]  # a policy's loss judges nothing
    for name in judged:
        for ending, best in JUDGED.items():
            if name.endswith(ending):
                rows.append([name, *(first_to_last(values_of(records, name), best) for records in runs)])
    num_steps = []
    minutes = []
    for records in runs:
        seconds = values_of(records, "time/step")
        num_steps.append(str(len(seconds)))
        minutes.append(f"{sum(seconds) / 60:.1f}")
    rows.append(["steps", *num_steps])
    rows.append(["minutes, start-up not counted", *minutes])
    parts = reward_parts(dict.fromkeys(names))
    of_parts = [f"reward/{part}" for part in parts] if len(parts) > 1 else []
    for name in of_parts + LATE_METRICS:
        means = [mean_text(values_of(records, name)[-LATE_STEPS:]) for records in runs]
        if set(means) != {"-"}:
            rows.append([f"{name}, mean of the last {LATE_STEPS} steps", *means])
    return rows + differing_fields(run_dirs)


def values_of(records: list[Record], name: str) -> list[float]:
    """Return a metric's values, without records that lack it or have no number."""
    return [record[name] for record in records if is_number(record.get(name))]


def first_to_last(values: list[float], best: Callable[[list[float]], float]) -> str:
    """Return `0.25 to 0.75, best 0.8`, or `-` without values."""
    if not values:
        return "-"
    ends = map(compact_number, (values[0], values[-1], best(values)))
    return "{} to {}, best {}".format(*ends)


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
        prompt = first[row]["prompt"]
        columns = first[row]["columns"].items()
        texts = [text for name, text in columns if isinstance(text, str) and text in prompt and name != "answer"]
        question = max(texts, key=len, default=prompt)
        lines += ["", f"held out   {shorten(one_line(question), ANSWER_CHARACTERS)}"]
        for name, record in {"before": first[row], "after": last[row]}.items():
            answer = shorten(one_line(record["completion"]), ANSWER_CHARACTERS)
            lines.append(f"  {name:<8} {answer}   (reward {number_text(record['reward'])})")
    return lines


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
    shown = ranked_by_reward(matching, options.worst)[: max(0, options.num) or None]
    order = "lowest" if options.worst else "highest"
    title = f"{run_dir} after step {step}: {len(shown)} of {len(records)} completions, {order} reward first"
    texts = [describe(record, turns=options.turns) for record in shown]
    return "\n\n".join([title, *texts])


def rollouts_of_step(options: Options, step: str) -> tuple[int, list[Record]]:
    """Return (step, its records); `step` is a number or `latest`. Raises ValueError if there is no such step."""
    name = EVALUATION if options.evaluation else COMPLETIONS
    path = options.run_dirs[0] / name
    records = read_lines(path, "name a run that writes it (see metrics.samples_interval, evaluation.interval)")
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
    needed = {"step"} if path.name == METRICS else ROLLOUT_FIELDS
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line, parse_constant=str)
                lacking = needed - record.keys()
            except (ValueError, RecursionError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: no record ({error}); remove that line") from error
            if lacking:
                raise ValueError(f"{path}, line {number}: it lacks {', '.join(lacking)}; remove that line")
            yield record


if __name__ == "__main__":
    run_rank(main)
