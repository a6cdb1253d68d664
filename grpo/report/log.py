"""What a run shows and writes: TensorBoard, JSON lines, samples to read, the console. Rank 0 (the driver) only.

A `step` is here always the number of optimizer steps finished: 0 is before the first one, `num_steps` after the last.
"""

import collections
import json
import os
import statistics
import time
from typing import Any, Literal

from rich.console import Console
from rich.text import Text
from torch.utils.tensorboard import SummaryWriter

from grpo.config import MetricsConfig
from grpo.report.samples import (
    TABLE_HEADER,
    completion_records,
    describe_rollout,
    finite_or_none,
    markdown_table,
    spread_by_reward,
    table_rows,
)
from grpo.report.wandb_log import WandbLog
from grpo.report.warnings import Watch
from grpo.text import compact_duration, compact_number
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
# Completions to read in samples.txt, of each step that writes any.
NUM_SAMPLES = 4


class RunLog:
    """Everything a run tells: files in the run folder and the console.

    The files: `metrics.jsonl`, `completions.jsonl` (completions trained on), `evaluation.jsonl` (held-out ones),
    `samples.txt` (a few, to read) and `tensorboard/`. Opened with `start_step` above 0 it continues a run: what an
    aborted part had written beyond that step is dropped from the .jsonl files and hidden in TensorBoard, so that no
    step counts twice. Opened with 0 it starts them afresh. samples.txt is only ever appended to.
    """

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: str,
        num_steps: int,
        start_step: int = 0,
        whole_config: dict[str, Any] | None = None,
    ) -> None:
        """whole_config: the run's, for its page at Weights & Biases."""
        os.makedirs(run_dir, exist_ok=True)
        self.config = config
        self.num_steps = num_steps
        self.run_dir = run_dir
        self.step_seconds = collections.deque(maxlen=ETA_STEPS)
        self.watch = Watch()
        # No highlighting or markup: names and numbers are printed as they are. rich colours a terminal, never a file.
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        for name in ("metrics.jsonl", "completions.jsonl", "evaluation.jsonl"):
            if os.path.exists(os.path.join(run_dir, name)):
                drop_steps_after(os.path.join(run_dir, name), start_step)
        if start_step:
            self._remember()
        # TensorBoard hides what was written before at this step or later; before a fresh start that is everything.
        first_step = start_step + 1 if start_step else 0
        folder = os.path.join(run_dir, "tensorboard")
        self.tensorboard = SummaryWriter(folder, purge_step=first_step) if config.tensorboard else None
        project = config.wandb_project
        self.wandb = WandbLog(project, run_dir, start_step, whole_config) if project else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one finished step everywhere; one call per step."""
        self._write(step, metrics)
        if "time/step" in metrics:
            self.step_seconds.append(metrics["time/step"])
        line = Text.assemble((f"step {self._progress(step)}", "dim"))
        for name, label, unit in CONSOLE_COLUMNS:
            if name in metrics:
                number = compact_number(metrics[name])
                # Padded to the usual width, numbers of successive lines mostly line up.
                text = f"{number} {unit}" if unit else f"{label} {number:<6}"
                line.append(f"  {text}", style="bold" if name == "reward/mean" else "")
        if self.step_seconds:
            seconds_left = statistics.mean(self.step_seconds) * (self.num_steps - step)
            line.append(f"  eta {compact_duration(seconds_left)}", style="dim")
        self._print(line)
        self._warn(step, self.watch.look(metrics))

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation of the weights after `step` steps; `accuracy` is written as `eval/accuracy`.

        Of several held-out sets (`eval/SET/accuracy`), each has a line of its own on the console.
        """
        self._log_held_out(step, "eval", metrics)
        self._warn(step, self.watch.look_at_evaluation(metrics))

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """The same for the losses of held-out examples, `validation/loss` or `validation/SET/loss`."""
        self._log_held_out(step, "validation", metrics)

    def _log_held_out(self, step: int, group: str, metrics: dict[str, float]) -> None:
        metrics = {f"{group}/{name.removeprefix(f'{group}/')}": value for name, value in metrics.items()}
        self._write(step, metrics)
        lines: dict[str, list[str]] = {}
        for name, value in metrics.items():
            held_out_set, _, short = name.removeprefix(f"{group}/").rpartition("/")
            error = metrics.get(f"{name}_stderr")
            number = compact_number(value) + (f" ± {compact_number(error)}" if error is not None else "")
            if not name.endswith("_stderr"):
                lines.setdefault(held_out_set, []).append(f"{short} {number}")
        for held_out_set, numbers in lines.items():
            where = [held_out_set] if held_out_set else []
            self._print(Text("  ".join([f"{group} {self._progress(step)}", *where, *numbers]), style="cyan"))

    def completions(self, step: int, rollouts: list[Rollout], prompts: list[str]) -> None:
        """Record a step's completions: all in completions.jsonl, NUM_SAMPLES to read in samples.txt and TensorBoard.

        prompts[i] is the text of rollouts[i]'s prompt. To read are the best, the worst and some evenly between; those
        without a reward count as worst. The caller decides at which steps (`samples_interval`).
        """
        records = completion_records(rollouts, prompts)
        self._append_records("completions.jsonl", [{"step": step, **record} for record in records])
        chosen = spread_by_reward([r.reward for r in rollouts], NUM_SAMPLES)
        text = "\n\n".join(describe_rollout(rollouts[i], prompts[i]) for i in chosen)
        self._append("samples.txt", f"{f'===== step {step} '.ljust(120, '=')}\n{text}\n\n")
        rows = table_rows([rollouts[i] for i in chosen], [prompts[i] for i in chosen])
        if self.tensorboard:
            self.tensorboard.add_text("samples", markdown_table(rows), step)
            self.tensorboard.flush()
        if self.wandb:
            self.wandb.samples(step, TABLE_HEADER, rows)

    def evaluation_completions(
        self, step: int, kind: Literal["greedy", "sample"], rollouts: list[Rollout], prompts: list[str]
    ) -> None:
        """Record completions of held-out prompts in evaluation.jsonl; the arguments are those of `completions`."""
        records = completion_records(rollouts, prompts)
        self._append_records("evaluation.jsonl", [{"step": step, "kind": kind, **record} for record in records])

    def close(self) -> None:
        """Flush and close TensorBoard's file and the run at Weights & Biases; the other files are closed already."""
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.close()

    def _remember(self) -> None:
        """What the warnings know of the steps before a resume; what was said then is not said again."""
        path = os.path.join(self.run_dir, "metrics.jsonl")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for metrics in map(json.loads, file):
                    look = self.watch.look if "loss" in metrics else self.watch.look_at_evaluation
                    look(metrics)

    def _warn(self, step: int, texts: list[str]) -> None:
        for text in texts if self.config.warnings else ():
            self._print(Text(f"warning: step {step}: {text}", style="yellow"))

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        """One JSON line and the TensorBoard scalars, both flushed: a run that dies has told all it knew."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: finite_or_none(value) for name, value in values.items()}
        self._append_records("metrics.jsonl", [{"step": step, "time": time.time(), **finite}])
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        if self.wandb:
            self.wandb.log(step, values)

    def _append_records(self, name: str, records: list[dict[str, Any]]) -> None:
        self._append(name, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

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

    A last line cut short by a dying process is dropped too, and with a warning what else cannot be read: after a power
    loss a file may have NUL bytes, and a damaged log must not keep a run from going on.
    """
    damaged = []
    with (
        open(path, encoding="utf-8", errors="surrogateescape") as old,
        open(path + ".tmp", "w", encoding="utf-8") as new,
    ):
        for number, line in enumerate(old if step else [], start=1):
            if not line.endswith("\n"):
                continue
            if (of_line := _step_of_line(line)) is None:
                damaged.append(number)
            elif of_line <= step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(path + ".tmp", path)
    if damaged:
        print(
            f"warning: {len(damaged)} lines of {path} are damaged and left out, the first is line {damaged[0]}",
            flush=True,
        )


def _step_of_line(line: str) -> int | None:
    """The step of a line of a log; None if it is no such line."""
    try:
        record = json.loads(line)
        line.encode()  # bytes that are no UTF-8 stand in it as surrogates
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None
