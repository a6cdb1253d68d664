"""A model of 64 M parameters learns word problems: from nothing by SFT, then by GRPO, ours and TRL's, over some seeds.

    python tests/bench/learning.py [--seeds 0 1 2] [--gpus 4] [--stages sft grpo trl] [--limit 560] [--tiny]
        [--rows 128] [--stop-at-loss 0.045] [-- --num-steps 100 ...]

configs/word_problems_sft.py makes a start for each seed, from which configs/word_problems.py is trained by
train_grpo.py and by TRL's GRPOTrainer (trl_grpo.py: the same prompts in the same order, rewards, loss and rates;
float32 weights under bfloat16 autocast, `--rows` completions at once, no gradient checkpointing, as ours has none).
Flags behind `--` go to both, `--stop-at-loss` to SFT. One run on one GPU each, as many at once as there are GPUs, and
one after the other on a CPU (`--gpus 0`). What does not end within `--limit` seconds of the whole is stopped, and
counts with what it reached.

Runs leave `runs/learning/STAGE-SEED`; a stage that is not asked for is taken from there. After each run learning.json,
learning.svg (accuracy over steps and over seconds) and the ends of the logs are written to $OUT. Seconds are those
since the launch, with all that it takes to start and to compile, without imports and evaluations; those of the steps
alone are a column of their own. What starts first on a machine also fills the caches of vLLM and torch.compile, so let
GRPO and TRL run for a few steps before (`--stages grpo trl --seeds 0 --name warm -- --num-steps 3`). `--tiny` is a look
on a CPU: a small model, few steps, TRL without vLLM.
"""

import argparse
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from curve import draw
from speed import ROOT, end_all, launch, report, visible_gpus
from toy_runs import records

RUNS = ROOT / "runs" / "learning"
METHODS = {"grpo": "ours", "trl": "TRL"}
BENCH = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
CPU = ["--model.dtype", "float32", "--trainer.no-compile", "--trainer.micro-batch-tokens", "2048"]


@dataclass
class Run:
    """A program, and the one whose model it starts from."""

    stage: str
    seed: int
    command: list[Any]
    after: "Run | None" = None
    gpu: int = -1
    process: subprocess.Popen | None = None
    exit_code: int | None = None
    started: float = 0.0
    seconds: float = 0.0
    """Seconds that it took, if it ended by itself."""

    @property
    def folder(self) -> pathlib.Path:
        return RUNS / f"{self.stage}-{self.seed}"

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix(".log")

    @property
    def is_ready(self) -> bool:
        return self.process is None and (self.after is None or self.after.exit_code == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--stages", nargs="+", default=["sft", "grpo", "trl"], choices=["sft", "grpo", "trl"])
    parser.add_argument("--limit", type=float, default=560, help="seconds of everything")
    parser.add_argument("--stop-at-loss", type=float, help="of SFT; the recipe's if not given")
    parser.add_argument("--rows", type=int, default=128, help="completions that TRL takes at once")
    parser.add_argument("--name", default="learning", help="of the files")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("flags", nargs="*", help="behind --: for GRPO, ours and TRL's")
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit
    planned = plan(options)
    try:
        work(planned, options, deadline)
    finally:
        end_all([run.process for run in planned if run.process and run.exit_code is None])
        write(planned, options, show=True)


def plan(options: argparse.Namespace) -> list[Run]:
    """List the runs in the order in which they get GPUs: what others wait for first, then ours, then TRL's."""
    python = sys.executable
    runs = []
    starts = {}
    tiny = [*CPU, "--num-steps", "3", *tiny_data()] if options.tiny else []
    if "sft" in options.stages:
        for seed in options.seeds:
            command = [python, *TORCHRUN, "train_sft.py", "configs/word_problems_sft.py", "--seed", seed, *tiny]
            command += ["--stop-at-loss", options.stop_at_loss] if options.stop_at_loss is not None else []
            command += ["--model.path", tiny_model(), "--sequences-per-step", "8"] if options.tiny else []
            starts[seed] = Run("sft", seed, command)
            runs.append(starts[seed])
    small = ["--prompts-per-step", "4", "--evaluation.num-prompts", "8", "--evaluation.interval", "2"]
    small += ["--generator.max-completion-tokens", "16", "--sync-check-interval", "0"]
    flags = [*tiny, *(small if options.tiny else []), *options.flags]
    for stage in ("grpo", "trl"):
        for seed in options.seeds if stage in options.stages else []:
            model = RUNS / f"sft-{seed}" / "model"
            recipe = ["configs/word_problems.py", "--seed", seed, "--model.path", model, *flags]
            if stage == "grpo":
                command = [python, *TORCHRUN, "train_grpo.py", *recipe, "--checkpoint.no-export"]
            else:
                rows = 16 if options.tiny else options.rows
                command = [python, BENCH / "trl_grpo.py", *recipe, "--rows", rows, "--weights", "float32"]
                command += ["--no-gradient-checkpointing", *(["--no-vllm"] if options.tiny else [])]
            runs.append(Run(stage, seed, command, starts.get(seed)))
    for run in runs:
        run.command += ["--run-dir", run.folder, "--overwrite"]
    return runs


def tiny_model() -> pathlib.Path:
    """Make a model of two layers from random weights. Returns its folder."""
    from configs.examples import toys, word_problem_rows

    return toys.make_model(RUNS / "tiny", word_problem_rows.tokenizer(), 0, {"num_hidden_layers": 2})


def tiny_data() -> list[Any]:
    """Write a few rows of the task, whose 40,000 take a while to read. Returns the flags for them."""
    from configs.examples import word_problem_rows

    file = RUNS / "tiny.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in word_problem_rows.word_problems("test")[:100]))
    return ["--data.path", file, "--evaluation.path", "configs/examples/word_problem_rows.py:word_problems"]


def work(runs: list[Run], options: argparse.Namespace, deadline: float) -> None:
    """Run them all, each as soon as what it starts from is there and a GPU is free, until the deadline."""
    free = visible_gpus(options.gpus)[: options.gpus] if options.gpus else [0]
    while time.monotonic() < deadline and any(run.process or run.is_ready for run in runs if run.exit_code is None):
        for run in runs:
            if run.process and run.exit_code is None and run.process.poll() is not None:
                run.exit_code = run.process.returncode
                run.seconds = time.monotonic() - run.started
                free.append(run.gpu)
                print(f"{run.stage}-{run.seed}: exit code {run.exit_code} after {run.seconds:.0f} s", flush=True)
                write(runs, options, show=False)
            elif run.is_ready and free:
                shutil.rmtree(run.folder, ignore_errors=True)
                run.gpu = free.pop(0)
                run.started = time.monotonic()
                visible = {"CUDA_VISIBLE_DEVICES": str(run.gpu)} if options.gpus else {}
                run.process = launch(run.command, run.log, **visible)
        time.sleep(0.5)


def lines_of(run: Run) -> list[dict[str, Any]]:
    """Read what a run has logged so far."""
    return records(run.folder)


def curve(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return (step, seconds since the launch, held-out accuracy) of each evaluation; step 0 is before the first."""
    step_seconds: dict[int, float] = {}
    for line in lines:
        seconds = line.get("time/startup", 0.0) + line.get("time/step", 0.0) - line.get("time/evaluate", 0.0)
        step_seconds[line["step"]] = step_seconds.get(line["step"], 0.0) + seconds
    after = dict(zip(step_seconds, itertools.accumulate(step_seconds.values()), strict=True))
    after[0] = sum(line.get("time/startup", 0.0) for line in lines if line["step"] <= 1)
    return [(line["step"], after[line["step"]], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]


def row(run: Run) -> dict[str, Any]:
    """Return a run's row of the table, finished or not; its `curve` is for the picture."""
    lines = lines_of(run)
    steps = [line for line in lines if "time/step" in line]
    cells = {"stage": run.stage, "seed": run.seed, "exit code": run.exit_code, "whole run s": run.seconds}
    cells["steps"] = len(steps)
    if run.stage == "sft":
        return cells | {"loss": steps[-1]["loss"] if steps else None}
    points = curve(lines)
    cells["method"] = METHODS[run.stage]
    if points and len(steps) > 2:
        seconds = [line["time/step"] - line.get("time/evaluate", 0.0) for line in steps]
        cells |= {"start": points[0][2], "end": points[-1][2], "best": max(point[2] for point in points)}
        cells |= {"since launch s": points[-1][1], "steps s": sum(seconds), "s/step": statistics.median(seconds[2:])}
    return cells | {"curve": points}


def write(runs: list[Run], options: argparse.Namespace, show: bool) -> None:
    """Write JSON, picture and the ends of the logs. `show` prints the table."""
    rows = [row(run) for run in runs if run.process]
    learners = [cells for cells in rows if cells.get("curve")]
    out = pathlib.Path(os.environ.get("OUT", ROOT / "runs" / "bench"))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{options.name}.svg").write_text(draw(learners))
    tails = [f"== {run.log.name}\n{run.log.read_text()[-20_000:]}\n" for run in runs if run.log.exists()]
    (out / f"{options.name}.log").write_text("".join(tails))
    ends = {}
    for method in METHODS.values():
        values = [cells["end"] for cells in learners if cells["method"] == method and "end" in cells]
        if values:
            ends[f"{method}: mean end"] = statistics.mean(values)
            ends[f"{method}: std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    report(options.name, rows, seeds=options.seeds, flags=options.flags, show=show, **ends)


if __name__ == "__main__":
    main()
