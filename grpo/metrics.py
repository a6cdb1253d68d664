"""What a run shows and writes: the step-time ledger, TensorBoard, JSON lines, the console line, readable samples.

Layer 3, used on the driver (rank 0) only. Left out: live displays (runs go to log files), other trackers, alerts.
A `step` is here always the number of optimizer steps finished: 0 is before the first one, `num_steps` after the last.
"""

import collections
import contextlib
import json
import math
import os
import statistics
import textwrap
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from grpo.advantages import zero_variance_groups
from grpo.config import MetricsConfig
from grpo.types import Rollout
from grpo.watchdog import set_place

# Metric, its label on the console line, its unit there. The rest is in metrics.jsonl and TensorBoard.
CONSOLE_COLUMNS = (
    ("reward/mean", "reward", ""),
    ("loss", "loss", ""),
    ("kl", "kl", ""),
    ("entropy", "ent", ""),
    ("completion/length_mean", "len", ""),
    ("grad_norm", "grad", ""),
    ("logprob_diff/mean", "diff", ""),
    ("tokens_per_second", "", "tok/s"),
    ("time/step", "", "s"),
)
# The time left is reckoned from this many steps: enough to smooth, few enough to forget compilation in the first ones.
ETA_STEPS = 20
# Columns of a prompt (a question, test cases, ...) are cut to this many characters in samples.
MAX_COLUMN_CHARACTERS = 600


class Ledger:
    """Where the wall time of one step goes, in seconds. A phase inside another pauses it, so no second counts twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open_phases: list[str] = []
        self.step_start = self.last_change = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the `with` block to phase `name` (generate, reward, reference, train, sync, ...).

        Raises:
            ValueError: the name is one that `close_step` computes.
        """
        if name in ("other", "step"):
            raise ValueError(f"time/{name} is computed by close_step; give the phase another name")
        self._book()
        self.open_phases.append(name)
        set_place(phase=name)
        try:
            yield
        finally:
            self._book()
            self.open_phases.pop()

    def close_step(self) -> dict[str, float]:
        """Seconds since the last call: `time/PHASE` of each phase that ran, `time/other`, `time/step`.

        `time/step` is the sum of all others. The next step starts here.

        Raises:
            ValueError: a phase is still open.
        """
        if self.open_phases:
            raise ValueError(f"the step closes inside phase {self.open_phases[-1]}; end the phase first")
        now = time.perf_counter()
        step = now - self.step_start
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times |= {"time/other": step - sum(self.seconds.values()), "time/step": step}
        self.seconds, self.step_start = {}, now
        return times

    def _book(self) -> None:
        """Give the time since the last change to the phase that is open, if any."""
        now = time.perf_counter()
        if self.open_phases:
            name = self.open_phases[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last_change
        self.last_change = now


class RunLog:
    """Everything a run tells: `metrics.jsonl`, `samples.txt` and `tensorboard/` in the run folder, and the console.

    Opened with `start_step` above 0 it continues a run: what an aborted part had written beyond that step is dropped
    from metrics.jsonl and hidden in TensorBoard, so that no step counts twice. Opened with 0 it starts both afresh.
    samples.txt is only ever appended to.
    """

    def __init__(self, config: MetricsConfig, run_dir: str, num_steps: int, start_step: int = 0) -> None:
        os.makedirs(run_dir, exist_ok=True)
        self.config = config
        self.num_steps = num_steps
        self.samples_path = os.path.join(run_dir, "samples.txt")
        self.step_seconds = collections.deque(maxlen=ETA_STEPS)
        # No highlighting or markup: names and numbers are printed as they are. rich colours a terminal, never a file.
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        json_path = os.path.join(run_dir, "metrics.jsonl")
        if os.path.exists(json_path):
            drop_steps_after(json_path, start_step)
        self.json_file = open(json_path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        # TensorBoard hides what was written before at this step or later; before a fresh start that is everything.
        first_step = start_step + 1 if start_step else 0
        folder = os.path.join(run_dir, "tensorboard")
        self.tensorboard = SummaryWriter(folder, purge_step=first_step) if config.tensorboard else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one finished step everywhere; one call per step."""
        self._write(step, metrics)
        if "time/step" in metrics:
            self.step_seconds.append(metrics["time/step"])
        line = Text.assemble((f"step {self._progress(step)}", "dim"))
        for name, label, unit in CONSOLE_COLUMNS:
            if name in metrics:
                number = compact_number(metrics[name])
                # Padded to the usual width, numbers of successive lines mostly stand below one another.
                text = f"{number} {unit}" if unit else f"{label} {number:<6}"
                line.append(f"  {text}", style="bold" if name == "reward/mean" else "")
        if self.step_seconds:
            seconds_left = statistics.mean(self.step_seconds) * (self.num_steps - step)
            line.append(f"  eta {compact_duration(seconds_left)}", style="dim")
        self._print(line)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation of the weights after `step` steps; `accuracy` is written as `eval/accuracy`."""
        metrics = {f"eval/{name.removeprefix('eval/')}": value for name, value in metrics.items()}
        self._write(step, metrics)
        numbers = [f"{name.removeprefix('eval/')} {compact_number(value)}" for name, value in metrics.items()]
        self._print(Text("  ".join([f"eval {self._progress(step)}", *numbers]), style="cyan"))

    def samples(self, step: int, rollouts: list[Rollout]) -> None:
        """Append `num_samples` rollouts as text: the best, the worst and some evenly between.

        The caller decides at which steps (`samples_interval`). Rollouts without a reward count as worst.
        """
        chosen = spread_by_reward(rollouts, self.config.num_samples)
        if not chosen:
            return
        text = "\n\n".join(describe_rollout(rollout) for rollout in chosen)
        with open(self.samples_path, "a", encoding="utf-8") as file:
            file.write(f"{f'===== step {step} '.ljust(120, '=')}\n{text}\n\n")
        if self.tensorboard:
            # TensorBoard renders Markdown; indented by four it shows tags and line breaks as they are.
            self.tensorboard.add_text("samples", textwrap.indent(text, "    ", lambda line: True), step)
            self.tensorboard.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self.json_file.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON line and the TensorBoard scalars, both flushed: a run that dies has told all it knew."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.json_file.write(json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n")
        self.json_file.flush()
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()

    def _progress(self, step: int) -> str:
        width = len(str(self.num_steps))
        return f"{step:>{width}}/{self.num_steps} {step / self.num_steps:4.0%}"

    def _print(self, line: Text) -> None:
        self.console.print(line)
        self.console.file.flush()


def drop_steps_after(path: str, step: int) -> None:
    """Rewrite a JSON-lines file with only the lines up to `step`, atomically; with step 0 nothing stays.

    A last line cut short by a dying process is dropped too.
    """
    kept = []
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    for line in lines if step else []:
        if not line.endswith("\n"):
            break
        if json.loads(line)["step"] <= step:
            kept.append(line)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """What the completions of one step earned and how long they were.

    Rollouts lie group by group. Statistics of rewards are over the completions that have one and NaN if none has;
    `reward/std` is the population's, lengths are in tokens. `reward/NAME` is the unweighted mean of a reward function.

    Raises:
        ValueError: there are no rollouts, or they are not whole groups.
    """
    if not rollouts or len(rollouts) % group_size:
        raise ValueError(f"{len(rollouts)} rollouts are not whole groups of {group_size}; pass all those of the step")
    rewards = [r.reward for r in rollouts if r.reward is not None]
    rewards_S = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts], dtype=torch.float32)
    functions = list(dict.fromkeys(name for r in rollouts for name in r.rewards))
    lengths = [len(r.completion.ids) for r in rollouts]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward/none_count": len(rollouts) - len(rewards),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_share": _mean([r.completion.truncated for r in rollouts]),
        "prompt/length_mean": _mean([len(r.prompt.ids) for r in rollouts]),
        "groups/zero_variance_share": zero_variance_groups(rewards_S, group_size) / (len(rollouts) // group_size),
    }
    for function, name in function_names(functions).items():
        values = [r.rewards.get(function) for r in rollouts]
        metrics[f"reward/{name}"] = _mean([value for value in values if value is not None])
    return metrics


def function_names(functions: list[str]) -> dict[str, str]:
    """Metric name of each reward function: `path/file.py:function` becomes `function`, unless that is ambiguous."""
    short = {function: function.rsplit(":", 1)[-1] for function in functions}
    taken = [*short.values(), "mean", "std", "none_count"]
    return {function: name if taken.count(name) == 1 else function for function, name in short.items()}


def spread_by_reward(rollouts: list[Rollout], count: int) -> list[Rollout]:
    """At most `count` rollouts at even distances in the ranking by reward, best first, worst last."""
    ranked = sorted(rollouts, key=lambda r: -math.inf if r.reward is None else r.reward, reverse=True)
    if count >= len(ranked):
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def describe_rollout(rollout: Rollout) -> str:
    """A rollout as readable text: a line of numbers, the prompt's columns, the completion."""
    rewards = [f"{name} {_number_or_none(value)}" for name, value in rollout.rewards.items()]
    numbers = [f"reward {_number_or_none(rollout.reward)}", *rewards, f"advantage {compact_number(rollout.advantage)}"]
    numbers.append(f"{len(rollout.completion.ids)} tokens{' (truncated)' if rollout.completion.truncated else ''}")
    columns = [f"{name}: {_shorten(str(value))}" for name, value in rollout.prompt.columns.items()]
    return "\n".join([f"--- {' | '.join(numbers)}", *columns, f"completion: {rollout.text}"])


def terminal_curve(
    values: list[float], width: int = 60, height: int = 8, low: float | None = None, high: float | None = None
) -> str:
    """A line chart of `height` text lines, `width` columns wide, with y labels at the left.

    Few values are joined by straight lines, many are averaged per column. NaN values are left out. `low` and `high` fix
    the range of the y axis (values beyond are drawn at its edge); by default it is that of the values.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "(no values)"
    columns = _resample(finite, width)
    low = min(columns) if low is None else low
    high = max(columns) if high is None else high
    unit = (high - low) / (height - 1)
    if high <= low:  # a constant stands in the middle, on a line that has its value as label
        unit = 1 / height
        low -= unit * (height // 2)
    rows = [min(max(round((value - low) / unit), 0), height - 1) for value in columns]  # 0 is the lowest line
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


def compact_number(value: float) -> str:
    """About three significant digits in at most eight characters: 0.123, 12.3, 4.56k, 1.2e-05."""
    value = float(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.6 would round to 1e+03
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def compact_duration(seconds: float) -> str:
    """Seconds as 12s, 3m05s or 1h02m."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _resample(values: list[float], width: int) -> list[float]:
    """`width` values: means of neighbours if there are more, points on the straight lines between them if fewer."""
    if len(values) > width:
        edges = [column * len(values) // width for column in range(width + 1)]
        return [_mean(values[start:end]) for start, end in zip(edges[:-1], edges[1:], strict=True)]
    return np.interp(np.linspace(0, len(values) - 1, width), range(len(values)), values).tolist()


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _number_or_none(value: float | None) -> str:
    return "none" if value is None else compact_number(value)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_COLUMN_CHARACTERS else f"{text[:MAX_COLUMN_CHARACTERS]} [...]"
