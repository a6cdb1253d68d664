"""What a run shows and writes: the step-time ledger, TensorBoard, JSON lines, the console line, tables of completions.

Layer 3, used on the driver (rank 0) only. Left out: live displays (runs go to log files), other trackers, alerts.
A `step` is here always the number of optimizer steps finished: 0 is before the first one, `num_steps` after the last.
"""

import collections
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from grpo.algorithm.advantages import zero_variance_groups
from grpo.config import MetricsConfig
from grpo.run.failures import set_place
from grpo.text import one_line, shorten
from grpo.types import Rollout

# Metric, its label on the console line, its unit there. The rest is in metrics.jsonl and TensorBoard.
CONSOLE_COLUMNS = (
    ("reward/mean", "reward", ""),
    ("loss", "loss", ""),
    ("kl", "kl", ""),
    ("entropy", "ent", ""),
    ("completion/length_mean", "len", ""),
    ("grad_norm", "grad", ""),
    ("mismatch/mean", "diff", ""),
    ("tokens_per_second", "", "tok/s"),
    ("time/step", "", "s"),
)
# The time left is reckoned from this many steps: enough to smooth, few enough to forget compilation in the first ones.
ETA_STEPS = 20
# In samples, prompts and their columns (an answer, test cases, ...) are cut to this many characters.
SAMPLE_CHARACTERS = 600
# What is told about a failed reward function is one line, so it quotes less.
QUOTED_CHARACTERS = 200
# Characters that mean something in a Markdown table or in HTML, as entities: `<think>`, `a|b` and `*` stay as they are.
ENTITIES = {ord(character): f"&#{ord(character)};" for character in "&<>|\\`*_~[]"}
TABLE_HEADER = ("prompt", "completion", "rewards", "advantage", "log-prob difference", "finish reason")


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
        # not reached if the block raised: what failed, failed in this phase
        set_place(phase=self.open_phases[-1] if self.open_phases else "other")

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
    """Everything a run tells: files in the run folder and the console.

    The files: `metrics.jsonl`, `completions.jsonl` (completions trained on), `evaluation.jsonl` (held-out ones),
    `samples.txt` (a few, to read) and `tensorboard/`. Opened with `start_step` above 0 it continues a run: what an
    aborted part had written beyond that step is dropped from the .jsonl files and hidden in TensorBoard, so that no
    step counts twice. Opened with 0 it starts them afresh. samples.txt is only ever appended to.
    """

    def __init__(self, config: MetricsConfig, run_dir: str, num_steps: int, start_step: int = 0) -> None:
        os.makedirs(run_dir, exist_ok=True)
        self.config = config
        self.num_steps = num_steps
        self.run_dir = run_dir
        self.step_seconds = collections.deque(maxlen=ETA_STEPS)
        # No highlighting or markup: names and numbers are printed as they are. rich colours a terminal, never a file.
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        for name in ("metrics.jsonl", "completions.jsonl", "evaluation.jsonl"):
            if os.path.exists(os.path.join(run_dir, name)):
                drop_steps_after(os.path.join(run_dir, name), start_step)
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

    def completions(self, step: int, rollouts: list[Rollout], prompts: list[str]) -> None:
        """Record a step's completions: all in completions.jsonl, `num_samples` to read in samples.txt and TensorBoard.

        prompts[i] is the text of rollouts[i]'s prompt. To read are the best, the worst and some evenly between; those
        without a reward count as worst. The caller decides at which steps (`samples_interval`).

        Raises:
            ValueError: there are not as many prompts as rollouts.
        """
        records = completion_records(rollouts, prompts)
        self._append("completions.jsonl", "".join(_json_line({"step": step, **record}) for record in records))
        chosen = spread_by_reward([r.reward for r in rollouts], self.config.num_samples)
        if not chosen:
            return
        text = "\n\n".join(describe_rollout(rollouts[i], prompts[i]) for i in chosen)
        self._append("samples.txt", f"{f'===== step {step} '.ljust(120, '=')}\n{text}\n\n")
        if self.tensorboard:
            table = markdown_table([rollouts[i] for i in chosen], [prompts[i] for i in chosen])
            self.tensorboard.add_text("samples", table, step)
            self.tensorboard.flush()

    def evaluation_completions(
        self, step: int, kind: Literal["greedy", "sample"], rollouts: list[Rollout], prompts: list[str]
    ) -> None:
        """Record completions of held-out prompts in evaluation.jsonl; the arguments are those of `completions`."""
        records = completion_records(rollouts, prompts)
        lines = [_json_line({"step": step, "kind": kind, **record}) for record in records]
        self._append("evaluation.jsonl", "".join(lines))

    def close(self) -> None:
        """Flush and close TensorBoard's file; the others are closed after every call."""
        if self.tensorboard:
            self.tensorboard.close()

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON line and the TensorBoard scalars, both flushed: a run that dies has told all it knew."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: _finite_or_none(value) for name, value in values.items()}
        self._append("metrics.jsonl", _json_line({"step": step, "time": time.time(), **finite}))
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()

    def _append(self, name: str, text: str) -> None:
        with open(os.path.join(self.run_dir, name), "a", encoding="utf-8") as file:
            file.write(text)

    def _progress(self, step: int) -> str:
        if not self.num_steps:  # an evaluation alone
            return ""
        width = len(str(self.num_steps))
        return f"{step:>{width}}/{self.num_steps} {step / self.num_steps:4.0%}"

    def _print(self, line: Text) -> None:
        self.console.print(line)
        self.console.file.flush()


def drop_steps_after(path: str, step: int) -> None:
    """Rewrite a JSON-lines file with only the lines up to `step`, atomically; with step 0 nothing stays.

    A last line cut short by a dying process is dropped too.
    """
    with open(path, encoding="utf-8") as old, open(path + ".tmp", "w", encoding="utf-8") as new:
        for line in old if step else []:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(path + ".tmp", path)


def rollout_metrics(rollouts: list[Rollout], group_size: int) -> dict[str, float]:
    """What the completions of one step earned and how long they were.

    Rollouts lie group by group. Statistics of rewards are over the completions that have one and NaN if none has;
    `reward/std` is the population's, lengths are in tokens. `reward/NAME` is the unweighted mean of a reward function.
    `reward/none_count` counts all completions without a reward, `reward/failed_count` those with a failed function.

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
        "reward/failed_count": sum(bool(r.failures) for r in rollouts),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_frac": _mean([r.completion.truncated for r in rollouts]),
        "prompt/length_mean": _mean([len(r.prompt.ids) for r in rollouts]),
        "groups/zero_variance_frac": zero_variance_groups(rewards_S, group_size) / (len(rollouts) // group_size),
    }
    for function, name in function_names(functions).items():
        values = [r.rewards.get(function) for r in rollouts]
        metrics[f"reward/{name}"] = _mean([value for value in values if value is not None])
    return metrics


def function_names(functions: list[str]) -> dict[str, str]:
    """Metric name of each reward function: `path/file.py:function` becomes `function`, unless that is ambiguous."""
    short = {function: function.rsplit(":", 1)[-1] for function in functions}
    taken = [*short.values(), "mean", "std", "none_count", "failed_count", "kl_penalty"]
    return {function: name if taken.count(name) == 1 else function for function, name in short.items()}


def failure_lines(rollouts: list[Rollout], limit: int = 3) -> list[str]:
    """A line for each reward function that failed: how often, its `limit` most frequent reasons, where first."""
    lines = []
    for function in dict.fromkeys(name for r in rollouts for name in r.failures):
        failed = [r for r in rollouts if function in r.failures]
        reasons = collections.Counter(
            shorten(one_line(r.failures[function]), QUOTED_CHARACTERS) for r in failed
        ).most_common()
        shown = [f"{reason} ({count})" for reason, count in reasons[:limit]]
        if len(reasons) > limit:
            shown.append(f"other reasons ({sum(count for _, count in reasons[limit:])})")
        lines.append(
            f"reward function {function} failed for {len(failed)} of {len(rollouts)} completions: {', '.join(shown)}; "
            f"first completion: {shorten(failed[0].text, QUOTED_CHARACTERS)!r}"
        )
    return lines


def completion_records(rollouts: list[Rollout], prompts: list[str]) -> list[dict[str, Any]]:
    """What the .jsonl files tell about each completion, but for step and kind; None where there is no finite number.

    Raises:
        ValueError: there are not as many prompts as rollouts.
    """
    if len(prompts) != len(rollouts):
        raise ValueError(f"{len(prompts)} prompt texts for {len(rollouts)} rollouts; pass one for each rollout")
    return [
        {
            "row": rollout.prompt.row,
            "prompt": prompt,
            "completion": rollout.text,
            "rewards": {name: _finite_or_none(value) for name, value in rollout.rewards.items()},
            "reward": _finite_or_none(rollout.reward),
            "advantage": _finite_or_none(rollout.advantage),
            "mismatch": _finite_or_none(rollout.mismatch),
            "finish_reason": _finish_reason(rollout),
            "num_tokens": len(rollout.completion.ids),
            "failures": rollout.failures,
        }
        for rollout, prompt in zip(rollouts, prompts, strict=True)
    ]


def spread_by_reward(rewards: list[float | None], count: int) -> list[int]:
    """At most `count` positions at even distances in the ranking by reward, best first, worst (or None) last."""
    ranked = sorted(range(len(rewards)), key=lambda i: -math.inf if rewards[i] is None else rewards[i], reverse=True)
    if count >= len(ranked):
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def describe_rollout(rollout: Rollout, prompt: str) -> str:
    """A rollout as readable text: a line of numbers, failures, the prompt, its other columns, the completion."""
    numbers = [
        *_reward_texts(rollout),
        f"advantage {compact_number(rollout.advantage)}",
        f"log-prob difference {_number_or_none(rollout.mismatch)}",
        f"{len(rollout.completion.ids)} tokens, finish reason {_finish_reason(rollout)}",
    ]
    # The first column is the text that the prompt was made from.
    columns = [
        f"{name}: {shorten(str(value), SAMPLE_CHARACTERS)}" for name, value in list(rollout.prompt.columns.items())[1:]
    ]
    lines = [
        f"--- {' | '.join(numbers)}",
        *_failure_texts(rollout),
        f"prompt: {shorten(prompt, SAMPLE_CHARACTERS)}",
        *columns,
    ]
    return "\n".join([*lines, f"completion: {rollout.text}"])


def markdown_table(rollouts: list[Rollout], prompts: list[str]) -> str:
    """Rollouts as a Markdown table, one line each; texts keep their tags, bars, stars and line breaks."""
    lines = [f"| {' | '.join(TABLE_HEADER)} |", f"|{' --- |' * len(TABLE_HEADER)}"]
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        cells = [
            shorten(prompt, SAMPLE_CHARACTERS),
            rollout.text,
            "\n".join([*_reward_texts(rollout), *_failure_texts(rollout)]),
            compact_number(rollout.advantage),
            _number_or_none(rollout.mismatch),
            _finish_reason(rollout),
        ]
        lines.append(f"| {' | '.join('<br>'.join(cell.translate(ENTITIES).splitlines()) for cell in cells)} |")
    return "\n".join(lines)


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


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _finish_reason(rollout: Rollout) -> str:
    return "length" if rollout.completion.truncated else "stop"


def _reward_texts(rollout: Rollout) -> list[str]:
    rewards = [f"{name} {_number_or_none(value)}" for name, value in rollout.rewards.items()]
    return [f"reward {_number_or_none(rollout.reward)}", *rewards]


def _failure_texts(rollout: Rollout) -> list[str]:
    return [
        f"{name} failed: {shorten(one_line(reason), QUOTED_CHARACTERS)}" for name, reason in rollout.failures.items()
    ]
