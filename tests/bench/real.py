"""Real models learn: runs from recipes, one or several on one GPU, with what they reached so far on disk at any time.

    python3 tests/bench/real.py NAME[:SEED] [NAME[:SEED] ...] [--model FOLDER] [--teacher FOLDER] [--data FOLDER]
        [--steps N] [--seconds S] [--apart S] [--out FOLDER] [--tiny] [-- --field value ...]
    python3 tests/bench/real.py gsm8k --model /root/qwen05 --data /root/gsm8k
    python3 tests/bench/real.py gsm8k_tool programs gsm8k:1 --model /root/qwen05 --data /root/gsm8k --seconds 1500

A run is the command that the recipe's docstring names, with a folder of the model in place of the hub's and a folder of
rows (the files that `Run.data` names). Flags behind `--` go to every run. `--tiny` is a look on a CPU: two steps of two
prompts. `after_sft` takes the model that `sft` left before.

Several runs share a GPU of 141 GB: up to four of the model of 0.5B, started `--apart` seconds after each other, because
engines that start together take a host's cores from each other. They get SIDE_BY_SIDE, which leaves what a step
computes as it is. Whoever fails ends alone. After `--seconds` all are stopped and count as they are.

`--out` (runs/real) gets for each run NAME-SEED.jsonl, with a line for each evaluation and for every ten steps (their
means) with the seconds since the launch, and its log. Each line is on disk at once, so a machine that is taken away
loses nothing. The last line says whether the accuracies are in the ranges of RUNS; the exit code is 1 if a run failed
or one is not.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from speed import ROOT, end_all, launch, records

RUNS_DIR = ROOT / "runs" / "real"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
GSM8K = "--data.path {data}/train.jsonl --evaluation.path {data}/test.jsonl"
# Rows that come up six times within 100 steps
FEW_ROWS = "--data.path {data}/train.jsonl:train[:1000] --evaluation.path {data}/test.jsonl"
AFTER_SFT = "--data.system-prompt= --reward.answer-format hashes --generator.max-completion-tokens 256"
AFTER_SFT += f" --model.path {RUNS_DIR}/sft-0/model"
SIDE_BY_SIDE = "--trainer.micro-batch-tokens 4096 --trainer.logprob-chunk-tokens 1024 --checkpoint.interval 0"
SIDE_BY_SIDE += " --trainer.activation-checkpointing selective --generator.gpu-memory-utilization 0.1"
SIDE_BY_SIDE += " --generator.engine max_num_seqs 512 kv_cache_memory_bytes {cache_bytes}"
INTERVAL = 10  # steps in one line
MEANS = ("reward/mean", "completion/length_mean", "completion/truncated_frac", "entropy", "mismatch/mean", "grad_norm")
MEANS += ("loss", "environment/turns", "environment/calls", "environment/unread_calls", "environment/bad_calls")
MEANS += ("time/step", "time/generate", "time/train", "time/sync", "time/evaluate", "memory/peak_gib")
TINY = "--model.dtype float32 --trainer.no-compile --trainer.micro-batch-tokens 2048 --num-steps 2"
TINY += " --evaluation.interval 1 --evaluation.num-prompts 4 --generator.max-completion-tokens 32"
TINY_GRPO = " --prompts-per-step 2 --group-size 2"
TINY_SFT = " --sequences-per-step 4 --validation.interval 1 --validation.num-examples 4"


@dataclass(frozen=True)
class Run:
    """A command, and the held-out accuracy that is expected of it."""

    recipe: str
    flags: str = ""
    data: str = GSM8K
    """Flags for local rows; {data} is their folder. Empty: the recipe's own rows, from a package."""
    expected: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Step -> lowest and highest accuracy after it."""
    script: str = "train_grpo.py"
    has_teacher: bool = False
    """The recipe has a teacher, which --teacher replaces."""
    has_own_model: bool = False
    """It starts from what another run left, whatever --model says."""
    cache_bytes: int = 2_800_000_000
    """The engine's KV cache in SIDE_BY_SIDE."""


def with_method(flags: str) -> Run:
    """Return the first 60 steps of the first recipe with another algorithm."""
    expected = {0: START, 30: (0.28, 0.40), 60: (0.32, 0.44)}
    return Run("qwen2_5_coder_0_5b_gsm8k.py", f"--num-steps 60 --evaluation.interval 30 {flags}", expected=expected)


# Of 1,319 questions: 0.259 was seen, 0.262 and 0.268 of 512. 3 standard errors are 0.04.
START = (0.22, 0.31)
ON_FEW_ROWS = {0: START, 25: (0.28, 0.39), 50: (0.33, 0.43), 75: (0.35, 0.44), 100: (0.35, 0.45)}
RUNS = {
    "gsm8k": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        expected={0: START, 25: (0.28, 0.38), 50: (0.34, 0.43), 75: (0.35, 0.44), 100: (0.36, 0.44)},
    ),
    "gsm8k_tool": Run(
        "qwen2_5_coder_0_5b_gsm8k_tool.py",
        expected={0: (0.04, 0.10), 25: (0.20, 0.30), 50: (0.21, 0.32), 75: (0.24, 0.33), 100: (0.23, 0.33)},
        cache_bytes=4_500_000_000,
    ),
    "programs": Run("qwen2_5_coder_0_5b_programs.py", data="", expected={0: (0.40, 0.75), 60: (0.40, 0.72)}),
    "reasoning_gym": Run(
        "qwen2_5_coder_0_5b_reasoning_gym.py",
        data="",
        expected={0: (0.05, 0.12), 20: (0.42, 0.57), 40: (0.54, 0.70), 100: (0.52, 0.67)},
    ),
    "gsm8k_1_5b": Run(
        "qwen2_5_coder_1_5b_gsm8k.py",
        expected={0: (0.53, 0.62), 25: (0.62, 0.72), 50: (0.67, 0.76), 75: (0.68, 0.78)},
        cache_bytes=6_000_000_000,
    ),
    "gsm8k_1_5b_lora": Run(
        "qwen2_5_coder_1_5b_gsm8k.py",
        "--trainer.lora-rank 16 --trainer.learning-rate 3e-5",
        expected={0: (0.53, 0.61), 25: (0.57, 0.66), 50: (0.65, 0.75), 75: (0.65, 0.75)},
        cache_bytes=5_000_000_000,
    ),
    "sft": Run(
        "qwen2_5_coder_0_5b_sft_gsm8k.py",
        data=f"{GSM8K} --validation.path {{data}}/test.jsonl",
        expected={117: (0.25, 0.37), 234: (0.28, 0.40)},
        script="train_sft.py",
    ),
    "after_sft": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        AFTER_SFT,
        expected={0: (0.29, 0.38), 25: (0.31, 0.40), 50: (0.32, 0.41), 75: (0.33, 0.42), 100: (0.32, 0.41)},
        has_own_model=True,
    ),
    "distill": Run(
        "qwen2_5_coder_0_5b_distill.py",
        expected={0: START, 25: (0.28, 0.36), 50: (0.29, 0.37)},
        has_teacher=True,
    ),
    "top_p": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        "--generator.sampling top_p 0.9 --num-steps 25",
        expected={0: START, 25: (0.28, 0.38)},
    ),
    "few_rows": Run("qwen2_5_coder_0_5b_gsm8k.py", data=FEW_ROWS, expected=ON_FEW_ROWS),
    "medium_first": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        "--data.curriculum configs/examples/curriculum.py:medium_first",
        data=FEW_ROWS,
        expected=ON_FEW_ROWS,
    ),
    "grpo": with_method(""),
    "dr_grpo": with_method("--algorithm.loss dr_grpo"),
    "dapo": with_method("--algorithm.loss dapo"),
    "gspo": with_method("--algorithm.loss gspo"),
    "cispo": with_method("--algorithm.loss cispo"),
    "maxrl": with_method(
        "--algorithm.advantages configs/examples/methods/maxrl.py:maxrl --algorithm.aggregation token_mean"
    ),
    "dppo": with_method(
        "--algorithm.loss configs/examples/methods/dppo.py:dppo --algorithm.advantages group_mean "
        "--algorithm.aggregation fixed_horizon --algorithm.old-logprobs generator"
    ),
}


@dataclass
class Job:
    """A run with its seed: what its metrics say so far."""

    name: str
    seed: int
    out: pathlib.Path
    process: subprocess.Popen | None = None
    launched: float = 0.0
    """Time of the start, seconds since the epoch."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """What is in its metrics.jsonl."""
    unwritten: list[dict[str, Any]] = field(default_factory=list)
    """Steps that wait for the line of their mean."""

    @property
    def run(self) -> Run:
        return RUNS[self.name]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.seed}"

    def start(self, command: list[Any]) -> None:
        """Start the command, whose run folder is the one of this job."""
        shutil.rmtree(RUNS_DIR / self.label, ignore_errors=True)
        (self.out / f"{self.label}.jsonl").write_text("")
        self.launched = time.time()
        self.process = launch(command, self.out / f"{self.label}.log")

    def look(self) -> None:
        """Write down what is new in the metrics: evaluations, and means of ten steps; the first two are alone."""
        for record in records(RUNS_DIR / self.label)[len(self.lines) :]:
            self.lines.append(record)
            place = {"step": record["step"], "seconds": round(record["time"] - self.launched, 1)}
            held_out = {name: value for name, value in record.items() if name.startswith(("eval/", "validation/"))}
            if held_out:
                self.write(**place, **held_out)
                continue
            self.unwritten.append(record)
            if record["step"] % INTERVAL == 0 or record["step"] <= 2:
                means = {}
                for name in MEANS:
                    values = [step[name] for step in self.unwritten if step.get(name) is not None]
                    if values:
                        means[name] = statistics.fmean(values)
                self.write(**place, steps=len(self.unwritten), **means)
                self.unwritten = []

    def verdicts(self) -> dict[int, str]:
        """Say for each step with an expected accuracy what was reached; of several held-out sets the mean counts."""
        reached = {}
        for line in self.lines:
            accuracies = [line[name] for name in line if name.startswith("eval/") and name.endswith("/accuracy")]
            if accuracies:
                reached[line["step"]] = statistics.fmean(accuracies)
        verdicts = dict.fromkeys(self.run.expected, "not reached")
        for step, (lowest, highest) in self.run.expected.items():
            if step in reached:
                where = "within" if lowest <= reached[step] <= highest else "OUTSIDE"
                verdicts[step] = f"{where} {lowest} to {highest}: {reached[step]:.3f}"
        return verdicts

    def write(self, **figures: Any) -> None:
        """Write and print one JSON line."""
        text = json.dumps(figures)
        print(f"{self.label}: {text}", flush=True)
        with open(self.out / f"{self.label}.jsonl", "a") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    options = read_options(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    commands = [command_of(job, options) for job in options.jobs]
    sys.exit(run_all(options.jobs, commands, options.apart, options.seconds))


def run_all(jobs: list[Job], commands: list[list[Any]], apart: float, seconds: float | None) -> int:
    """Run all, started `apart` seconds after each other. Returns 1 if one failed or an accuracy is not as expected."""
    began = time.time()
    try:
        while not seconds or time.time() - began < seconds:
            for place, job in enumerate(jobs):
                if job.process is None and time.time() - began >= place * apart:
                    job.start(commands[place])
                if job.process:
                    job.look()
            if all(job.process and job.process.poll() is not None for job in jobs):
                break
            time.sleep(1)
    finally:
        started = [job for job in jobs if job.process]
        codes = [job.process.poll() for job in started]
        end_all([job.process for job in started])
        for job, code in zip(started, codes, strict=True):
            job.look()
            job.write(exit_code=code, verdict=job.verdicts())
    is_outside = any("OUTSIDE" in text for job in jobs for text in job.verdicts().values())
    return int(is_outside or any(codes))


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line. `jobs` are its runs; `flags`, which stand behind --, go to each of them."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME[:SEED]", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--model", help="a folder in place of the recipe's model")
    parser.add_argument("--teacher", help="a folder in place of the recipe's teacher")
    parser.add_argument("--data", help="a folder in place of the recipe's data")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, help="after which all is stopped, and counts as it is")
    parser.add_argument("--apart", type=float, default=150, help="seconds from one start to the next")
    parser.add_argument("--out", type=pathlib.Path, default=RUNS_DIR)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    options.jobs = []
    for text in options.names:
        name, _, seed = text.partition(":")
        if name not in RUNS:
            parser.error(f"{name} is none of {', '.join(RUNS)}")
        options.jobs.append(Job(name, int(seed or 0), options.out.absolute()))
    return options


def command_of(job: Job, options: argparse.Namespace) -> list[Any]:
    """Return the command of a run: its recipe, and what replaces models and data."""
    run = job.run
    flags = [*run.flags.split(), "--seed", str(job.seed)]
    if len(options.jobs) > 1 and not options.tiny:
        flags += SIDE_BY_SIDE.format(cache_bytes=run.cache_bytes).split()
    if options.model and not run.has_own_model:
        flags += ["--model.path", str(pathlib.Path(options.model).absolute())]
    if options.teacher and run.has_teacher:
        flags += ["--model.reference-path", str(pathlib.Path(options.teacher).absolute())]
    if options.data:
        flags += run.data.format(data=pathlib.Path(options.data).absolute()).split()
    if options.tiny:
        flags += (TINY + (TINY_SFT if run.script == "train_sft.py" else TINY_GRPO)).split()
    if options.steps:
        flags += ["--num-steps", str(options.steps)]
    folder = RUNS_DIR / job.label
    recipe = f"configs/{run.recipe}"
    return [sys.executable, *TORCHRUN, run.script, recipe, *flags, *options.flags, "--run-dir", folder]


if __name__ == "__main__":
    main()
