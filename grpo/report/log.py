"""The log of a run: JSON lines, TensorBoard, the console. Rank 0 (the driver) only.

A `step` is always the number of finished optimizer steps: 0 is before the first one, `num_steps` after the last.
"""

import collections
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch.utils.tensorboard import SummaryWriter

from grpo.config import MetricsConfig
from grpo.data.recorded import drop_batches_after
from grpo.report.rollout_metrics import reward_parts
from grpo.report.samples import completion_records, finite_or_none
from grpo.report.warnings import CurveReader
from grpo.text import compact_duration, compact_number, naming
from grpo.types import Record, Rollout, Scalars

# How the console line shows metrics, padded so that numbers of successive lines mostly line up
CONSOLE_COLUMNS = {
    "reward/mean": "reward {:<6}",
    "distill/reverse_kl": "teacher kl {:<6}",
    "loss": "loss {:<6}",
    "kl": "kl {:<6}",
    "entropy": "ent {:<6}",
    "completion/length_mean": "len {:<6}",
    "grad_norm": "grad {:<6}",
    "mismatch/mean": "mismatch {:<6}",
    "tokens_per_second": "{} tok/s",
    "time/step": "{} s",
}
ETA_STEPS = 20  # over which the time left is averaged: smooth, and soon free of the slow first steps, which compile


class RunLog:
    """The files that a run writes into its folder, and its lines on the console.

    The files are `metrics.jsonl`, `completions.jsonl` (completions trained on), `evaluation.jsonl` (held-out ones) and
    `tensorboard/`. With `start_step` 0 they start empty. Above 0 a run continues: what an aborted part wrote beyond
    that step is dropped from the .jsonl files and `batches/` and hidden in TensorBoard, so that no step counts twice.
    """

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: str,
        num_steps: int,
        start_step: int = 0,
        trackers: Sequence[Any] = (),
    ) -> None:
        """Open the files.

        trackers: what else gets metrics and samples, such as Weights & Biases.
        """
        self.trackers = trackers
        self.run_dir = Path(run_dir)
        self.num_steps = num_steps
        self.last_line = f"done; everything is in {run_dir}"  # of the run, printed when all is closed
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.step_seconds = collections.deque(maxlen=ETA_STEPS)
        self.curve_reader = CurveReader()
        drop_batches_after(run_dir, start_step)
        for name in ("metrics.jsonl", "completions.jsonl", "evaluation.jsonl"):
            path = self.run_dir / name
            if not path.exists():
                continue
            drop_steps_after(path, start_step)
            if name == "metrics.jsonl":  # earlier warnings are not repeated
                for line in path.read_text(encoding="utf-8").splitlines():
                    self.curve_reader.look(json.loads(line))

        self.tensorboard = None
        if config.tensorboard:
            # TensorBoard hides what it has from this step on; at a fresh start that is everything
            purge_step = start_step + 1 if start_step else 0
            folder = self.run_dir / "tensorboard"
            self.tensorboard = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Scalars) -> None:
        """Record one finished step everywhere; one call per step."""
        if "time/step" in metrics:
            self.step_seconds.append(metrics["time/step"])
        columns = [f"step {self._progress(step)}"]
        parts = reward_parts(metrics)
        for name, column in CONSOLE_COLUMNS.items():
            only_measured = name == "reward/mean" and not metrics.get(name) and "distill/reverse_kl" in metrics
            if name in metrics and not only_measured:
                number = compact_number(metrics[name])
                columns.append(column.format(number))
            if name == "reward/mean" and len(parts) > 1:
                columns += [f"{part} {compact_number(value):<6}" for part, value in parts.items()]
        if self.step_seconds:
            steps_left = self.num_steps - step
            seconds_left = statistics.mean(self.step_seconds) * steps_left
            columns.append(f"eta {compact_duration(seconds_left)}")
        line = "  ".join(columns)
        self._record(step, metrics, [line])

    def log_held_out(self, step: int, metrics: Scalars) -> None:
        """Record what the weights after `step` steps do on held-out data: `eval/accuracy`, `validation/loss`.

        If there are several held-out sets (`eval/SET/accuracy`), each has its own line on the console.
        """
        lines = {}
        for name, value in metrics.items():
            if name.endswith("_stderr"):
                continue
            group, *held_out_set, short_name = name.split("/")
            start = "  ".join([f"{group} {self._progress(step)}", *held_out_set])
            cell = f"  {short_name} {compact_number(value)}"
            error = metrics.get(f"{name}_stderr")
            if error is not None:
                cell += f" ± {compact_number(error)}"
            line = lines.get(start, start)
            lines[start] = line + cell
        self._record(step, metrics, list(lines.values()))

    def completions(
        self,
        step: int,
        rollouts: list[Rollout],
        prompts: list[str],
        held_out: Literal["", "greedy", "sample"] = "",
    ) -> None:
        """Record a step's completions in completions.jsonl, or held-out ones in evaluation.jsonl, for `grpo.look`.

        prompts[i] is the text of rollouts[i]'s prompt. The caller decides at which steps (`samples_interval`).
        """
        records = completion_records(rollouts, prompts)
        if held_out:
            self._append_records(
                "evaluation.jsonl",
                records,
                step=step,
                kind=held_out,
            )
            return
        self._append_records("completions.jsonl", records, step=step)
        for tracker in self.trackers:
            tracker.samples(step, records)

    def close(self) -> None:
        """Flush and close TensorBoard's file and the trackers; the other files are closed already."""
        if self.tensorboard:
            self.tensorboard.close()
        for tracker in self.trackers:
            tracker.close()

    def _record(
        self,
        step: int,
        metrics: Scalars,
        lines: list[str],
    ) -> None:
        """Write metrics and flush each file, so that a run that dies loses none; print lines and warnings."""
        values = {name: float(value) for name, value in metrics.items()}
        record = {name: finite_or_none(value) for name, value in values.items()}
        self._append_records(
            "metrics.jsonl",
            [record],
            step=step,
            time=time.time(),
        )
        if self.tensorboard:
            with naming(self.tensorboard.log_dir):
                for name, value in values.items():
                    self.tensorboard.add_scalar(name, value, step)
                self.tensorboard.flush()
        for tracker in self.trackers:
            tracker.log(step, values)
        for warning in self.curve_reader.look(metrics):
            lines.append(f"warning: step {step}: {warning}")
        print("\n".join(lines))

    def _append_records(self, name: str, records: list[Record], **facts: Any) -> None:
        """Append records to a .jsonl file. Each line begins with `facts`, such as the step."""
        path = self.run_dir / name
        lines = [json.dumps(facts | record, allow_nan=False) + "\n" for record in records]
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _progress(self, step: int) -> str:
        if not self.num_steps:  # an evaluation alone
            return ""
        width = len(str(self.num_steps))
        return f"{step:>{width}}/{self.num_steps} {step / self.num_steps:4.0%}"


def drop_steps_after(path: Path, step: int) -> None:
    """Rewrite a JSON-lines file with only the lines up to `step`, atomically; with step 0 nothing stays.

    A last line that a dying process cut short is dropped too, and, with a warning, every line that cannot be read, such
    as NUL bytes after a power loss: a damaged log must not keep a run from going on.
    """
    num_damaged = 0
    new_path = f"{path}.tmp"
    with naming(new_path), open(path, "rb") as old, open(new_path, "wb") as new:
        for line in old if step else ():
            try:
                is_whole = line.endswith(b"\n")
                if is_whole and json.loads(line)["step"] <= step:
                    new.write(line)
            except (ValueError, TypeError, LookupError, RecursionError):
                num_damaged += 1
        new.flush()
        os.fsync(new.fileno())
    os.replace(new_path, path)
    if num_damaged:
        print(f"warning: {num_damaged} lines of {path} are damaged and left out")
