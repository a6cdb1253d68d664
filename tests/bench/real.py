"""A real model learns: runs from recipes, alone or side by side, with what they reached so far on disk at any time.

    python3 tests/bench/real.py NAME[:SEED] [NAME[:SEED] ...] [--model FOLDER] [--model-1-5b FOLDER] [--teacher FOLDER]
        [--data FOLDER] [--seed 0] [--steps N] [--seconds S] [--out PATH] [--gpu-gib GIB] [--apart S] [--tiny]
        [-- --field value ...]
    python3 tests/bench/real.py gsm8k --model /root/qwen05 --data /root/gsm8k --out $OUT/gsm8k_0.jsonl
    python3 tests/bench/real.py gsm8k_tool programs sft after_sft gsm8k:1 --model /root/qwen05 --data /root/gsm8k
        --seconds 1500 --out $OUT

A run is the command that the recipe's docstring names, with a folder of the model in place of the hub's and a folder of
rows (the files that `Run.data` names). Flags behind `--` go to every run. `--tiny` is a look on a CPU: two steps of two
prompts.

**One name.** `--out` gets a JSON line for each evaluation and for every ten steps (their means), with the seconds since
the launch. Each line is on disk at once, so a run that is cut off leaves what it had. The run's own output lies beside
it as .log. The last line says whether the accuracies are in the ranges of RUNS; the exit code is 1 if one is not.

**Several names** share one GPU. Each is started, in the order of the command line, as soon as

- its GiB (`Run.gib`) are free, and a tenth of the GPU, for which vLLM asks at its start;
- the run before it has left a first line of metrics, or `--apart` seconds have passed (150): engines that start
  together take a host's cores from each other;
- the run whose model it starts from has ended (`after_sft` waits for `sft`);
- 120 s of `--seconds` are left, which a start takes.

A run for which there is no room lets later ones pass. On a GPU every run gets SIDE_BY_SIDE, which leaves what a step
computes as it is. Whoever fails ends alone. After `--seconds` all are stopped (SIGTERM, and 40 s later SIGKILL), exit
code 124, and count as they are. `--out` is a folder then: for each run NAME-SEED.jsonl as above, its log and the files
*.jsonl of its folder, each at most its first and last 2 MB, and table.txt, renewed every minute. The exit code is 1 if
a run failed or an accuracy is outside its range.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from speed import ROOT, end_all, launch, spread, table

RUNS_DIR = ROOT / "runs" / "real"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
GSM8K = "--data.path {data}/train.jsonl --evaluation.path {data}/test.jsonl"
# Rows that come up six times within 100 steps
FEW_ROWS = "--data.path {data}/train.jsonl:train[:1000] --evaluation.path {data}/test.jsonl"
# Behind the run `sft`, whose model is --model
AFTER_SFT = "--data.system-prompt= --reward.answer-format hashes --generator.max-completion-tokens 256"
SIDE_BY_SIDE = "--trainer.micro-batch-tokens 4096 --trainer.logprob-chunk-tokens 1024 --checkpoint.interval 0"
SIDE_BY_SIDE += " --trainer.activation-checkpointing selective --generator.gpu-memory-utilization 0.1"
SIDE_BY_SIDE += " --generator.engine max_num_seqs 512 kv_cache_memory_bytes {cache_bytes}"
ENGINE_FRAC = 0.1  # vLLM refuses to start if less than this (`gpu-memory-utilization`) is free
LEAST_START_SECONDS = 120
STOPPED = 124  # in place of the exit code of a run whose seconds were over
INTERVAL = 10  # steps in one line
MEANS = ("reward/mean", "completion/length_mean", "completion/truncated_frac", "entropy", "mismatch/mean", "grad_norm")
MEANS += ("loss", "environment/turns", "environment/calls", "environment/unread_calls", "environment/bad_calls")
MEANS += ("time/step", "time/generate", "time/train", "time/sync", "time/evaluate", "memory/peak_gib")
MOST_BYTES = 4_000_000  # of a file in --out
TINY = "--model.dtype float32 --trainer.no-compile --trainer.micro-batch-tokens 2048"
TINY += " --evaluation.interval 1 --evaluation.num-prompts 4 --generator.max-completion-tokens 32"
TINY_GRPO = " --prompts-per-step 2 --group-size 2"
TINY_SFT = " --sequences-per-step 4 --validation.interval 1 --validation.num-examples 4"


@dataclass(frozen=True)
class Run:
    """A command, the held-out accuracy that is expected of it, and what it takes of a GPU beside others."""

    recipe: str
    flags: str = ""
    data: str = GSM8K
    """Flags for local rows; {data} is their folder. Empty: the recipe's own rows, from a package."""
    expected: dict[int, tuple[float, float] | None] = field(default_factory=dict)
    """Step -> lowest and highest accuracy after it; None: not measured yet."""
    script: str = "train_grpo.py"
    is_1_5b: bool = False
    """The recipe's model is the one of 1.5B, which --model-1-5b replaces."""
    has_teacher: bool = False
    """The recipe has a teacher, which --teacher replaces, or --model-1-5b."""
    starts_from: str = ""
    """Name of the run whose exported model it starts from."""
    gib: float = 23
    """GiB that were measured with SIDE_BY_SIDE; of `sft` estimated."""
    cache_bytes: int = 2_800_000_000
    """The engine's KV cache in SIDE_BY_SIDE."""


def method(flags: str) -> Run:
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
        gib=25,
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
        is_1_5b=True,
        gib=55,
        cache_bytes=6_000_000_000,
    ),
    "gsm8k_1_5b_lora": Run(
        "qwen2_5_coder_1_5b_gsm8k.py",
        "--trainer.lora-rank 16 --trainer.learning-rate 3e-5",
        expected={0: (0.53, 0.61), 25: (0.57, 0.66), 50: (0.65, 0.75), 75: (0.65, 0.75)},
        is_1_5b=True,
        gib=16,
        cache_bytes=5_000_000_000,
    ),
    "sft": Run(
        "qwen2_5_coder_0_5b_sft_gsm8k.py",
        data=f"{GSM8K} --validation.path {{data}}/test.jsonl",
        expected={117: (0.25, 0.37), 234: (0.28, 0.40)},
        script="train_sft.py",
        gib=21,
    ),
    "after_sft": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        AFTER_SFT,
        expected={0: (0.29, 0.38), 25: (0.31, 0.40), 50: (0.32, 0.41), 75: (0.33, 0.42), 100: (0.32, 0.41)},
        starts_from="sft",
    ),
    "distill": Run(
        "qwen2_5_coder_0_5b_distill.py",
        expected={0: START, 25: (0.28, 0.36), 50: (0.29, 0.37)},
        has_teacher=True,
        gib=27,
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
    "grpo": method(""),
    "dr_grpo": method("--algorithm.loss dr_grpo"),
    "dapo": method("--algorithm.loss dapo"),
    "gspo": method("--algorithm.loss gspo"),
    "cispo": method("--algorithm.loss cispo"),
    "maxrl": method(
        "--algorithm.advantages configs/examples/methods/maxrl.py:maxrl --algorithm.aggregation token_mean"
    ),
    "dppo": method(
        "--algorithm.loss configs/examples/methods/dppo.py:dppo --algorithm.advantages group_mean "
        "--algorithm.aggregation fixed_horizon --algorithm.old-logprobs generator"
    ),
}


def main() -> None:
    options = read_options(sys.argv[1:])
    if len(options.jobs) == 1:
        sys.exit(run_alone(options.jobs[0], options))
    sys.exit(run_side_by_side(options.jobs, options))


# ---- Command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all that stands before --."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME[:SEED]", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--model", help="a folder in place of the recipe's model")
    parser.add_argument("--model-1-5b", help="the same for recipes of the model of 1.5B; default: --model")
    parser.add_argument("--teacher", help="a folder in place of the recipe's teacher; default: --model-1-5b")
    parser.add_argument("--data", help="a folder in place of the recipe's data")
    parser.add_argument("--seed", type=int, default=0, help="of names without one")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", "--limit", type=float, help="after which all is stopped, and counts as it is")
    parser.add_argument("--out", type=pathlib.Path, help="a .jsonl file; of several runs a folder")
    parser.add_argument("--apart", type=float, default=150, help="most seconds from one start to the next")
    parser.add_argument("--gpu-gib", type=float, help="that several runs may take together; default: all of the GPU")
    parser.add_argument("--tiny", action="store_true")
    return parser


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line. `jobs` are its runs; `flags`, which stand behind --, go to each of them."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    options.jobs = []
    for text in options.names:
        name, _, seed = text.partition(":")
        if name not in RUNS or not (seed.isdigit() or text == name):
            parser.error(f"{text} is not NAME or NAME:SEED with a name of {', '.join(RUNS)}")
        job = Job(name, int(seed or options.seed))
        if any(job.label == other.label for other in options.jobs):
            parser.error(f"{job.label} is there twice; other seeds are {name}:{job.seed + 1} and so on")
        options.jobs.append(job)
    return options


def refuse_what_cannot_run(jobs: Sequence["Job"], options: argparse.Namespace, gpu_gib: float) -> None:
    """Raise SystemExit if a run would get a wrong model, or never the memory that it takes."""
    for job in jobs:
        run = job.run
        if run.gib > gpu_gib:
            raise SystemExit(f"{job.name} takes {run.gib} GiB, there are {gpu_gib:.0f}: leave it out")
        if run.starts_from and source_of(job, jobs) is None:
            raise SystemExit(f"{job.name} starts from what {run.starts_from} leaves: name that too, or it alone")
        if options.model and run.is_1_5b and not options.model_1_5b:
            raise SystemExit(f"{job.name} needs --model-1-5b beside --model, which is of other runs")
        if options.model and run.has_teacher and not (options.teacher or options.model_1_5b):
            raise SystemExit(f"{job.name} needs the folder of its teacher: --teacher or --model-1-5b")


def flags_of(job: "Job", options: argparse.Namespace) -> list[str]:
    """Return the flags that are added to the recipe."""
    run = job.run
    flags = [*run.flags.split(), "--seed", str(job.seed)]
    is_alone = len(options.jobs) == 1
    if not is_alone and not options.tiny:
        flags += SIDE_BY_SIDE.format(cache_bytes=run.cache_bytes).split()
    source = source_of(job, options.jobs)
    model = options.model
    if run.is_1_5b:
        model = options.model_1_5b or options.model
    if source is not None:
        model = source.exported
    if model:
        flags += ["--model.path", str(pathlib.Path(model).absolute())]
    teacher = options.teacher or options.model_1_5b
    if run.has_teacher and teacher:
        flags += ["--model.reference-path", str(pathlib.Path(teacher).absolute())]
    if options.data:
        flags += run.data.format(data=pathlib.Path(options.data).absolute()).split()
    if options.tiny:
        flags += (TINY + (TINY_SFT if run.script == "train_sft.py" else TINY_GRPO)).split()
    steps = options.steps or (2 if options.tiny else None)
    if steps:
        flags += ["--num-steps", str(steps)]
    return flags + options.flags


# ---- One run ---------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run with its seed: how far it is, and what its metrics say so far."""

    name: str
    seed: int = 0
    state: str = "waits"
    """waits, starts (until there are metrics), runs, ended; or dropped: it was never started."""
    code: int | None = None
    """Exit code, or STOPPED."""
    lines: list[dict] = field(default_factory=list)
    """What is in its metrics.jsonl."""
    unwritten: list[dict] = field(default_factory=list)
    """Steps that wait for the line of their mean."""
    process: subprocess.Popen | None = None
    launched: float = 0.0
    """Time of the start, seconds since the epoch."""
    summary: pathlib.Path | None = None
    log: pathlib.Path | None = None
    on_console: bool = False
    """Print the summary too."""

    @property
    def run(self) -> Run:
        return RUNS[self.name]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.seed}"

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the run."""
        return RUNS_DIR / self.label

    @property
    def exported(self) -> pathlib.Path:
        """Folder of the model that the run leaves at its end."""
        return self.folder / "model"

    @property
    def is_live(self) -> bool:
        return self.state in ("starts", "runs")

    def command(self, options: argparse.Namespace) -> list[Any]:
        """Return the command of the run."""
        recipe = f"configs/{self.run.recipe}"
        flags = flags_of(self, options)
        return [sys.executable, *TORCHRUN, self.run.script, recipe, *flags, "--run-dir", self.folder]

    def start(self, command: Sequence[Any], summary: pathlib.Path, log: pathlib.Path, *, on_console: bool) -> None:
        """Start the command. The lines of `summary` are printed too if `on_console`."""
        shutil.rmtree(self.folder, ignore_errors=True)
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text("")
        self.summary = summary
        self.log = log
        self.on_console = on_console
        self.write(command=" ".join(map(str, command[1:])))
        self.launched = time.time()
        threads = {"OMP_NUM_THREADS": "1"} if "--trainer.no-compile" in command else {}
        self.process = launch(command, log, **threads)
        self.state = "starts"

    def look(self, most_start_seconds: float = math.inf) -> None:
        """Write down what is new in the metrics; notice a start that is over, and the end.

        most_start_seconds: without a line of metrics; then it counts as started.
        """
        code = self.process.poll()
        self.read_metrics()
        if self.lines or time.time() - self.launched > most_start_seconds:
            self.state = "runs"
        if code is not None:
            self.finish(code)

    def read_metrics(self) -> None:
        """Summarise the lines that were added to metrics.jsonl since the last call."""
        metrics = self.folder / "metrics.jsonl"
        text = metrics.read_text() if metrics.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        for line in map(json.loads, whole_lines[len(self.lines) :]):
            self.lines.append(line)
            self.summarise(line)

    def summarise(self, line: dict) -> None:
        """Write a line of metrics if it is an evaluation, or the mean of ten steps if it is the last of them."""
        place = {"step": line["step"], "seconds": round(line["time"] - self.launched, 1)}
        held_out = {name: value for name, value in line.items() if name.startswith(("eval/", "validation/"))}
        if held_out:
            self.write(**place, **held_out)
            return
        self.unwritten.append(line)
        if line["step"] % INTERVAL == 0 or line["step"] <= 2:  # the first two show what the start costs
            means = {name: mean_of(name, self.unwritten) for name in MEANS}
            means = {name: value for name, value in means.items() if value is not None}
            self.write(**place, steps=len(self.unwritten), **means)
            self.unwritten = []

    def finish(self, code: int) -> None:
        """Write down how the run ended and what it reached. If it failed, print the end of its log.

        code: its exit code, or STOPPED.
        """
        self.state = "ended"
        self.code = code
        self.write(exit_code=code, verdict=self.verdicts())
        if code not in (0, STOPPED):
            last_lines = self.log.read_text(errors="replace").splitlines()[-40:]
            print("\n".join([f"{self.label}: exit code {code}. Its last lines:", *last_lines]), flush=True)

    def verdicts(self) -> dict[int, str]:
        """Return for each step with an expected accuracy what was reached."""
        evaluations = [line for line in self.lines if accuracies_of(line)]  # a step has a line of its own beside it
        reached = {line["step"]: accuracy_of(line) for line in evaluations}
        return {step: verdict(reached, step, self.run.expected) for step in self.run.expected}

    def write(self, **figures: Any) -> None:
        """Write one JSON line, where a machine that is taken away cannot lose it."""
        text = json.dumps(figures)
        if self.on_console:
            print(text, flush=True)
        with open(self.summary, "a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_alone(job: Job, options: argparse.Namespace) -> int:
    """Train and judge. Returns the exit code."""
    summary = options.out or RUNS_DIR / f"{job.name}_{job.seed}.jsonl"
    summary = summary.absolute()
    job.start(job.command(options), summary, summary.with_suffix(".log"), on_console=True)
    follow(job, options.seconds)
    return job.code or int(is_outside(job))


def follow(job: Job, seconds: float | None) -> None:
    """Look at a started run until it ends, or stop it after `seconds`."""
    try:
        while job.is_live and not (seconds and time.time() - job.launched > seconds):
            time.sleep(1)
            job.look()
    finally:
        stop([job])


def stop(jobs: Sequence[Job]) -> None:
    """Stop the runs that are live, all at the same time; they count as they are."""
    live_jobs = [job for job in jobs if job.is_live]
    end_all([job.process for job in live_jobs])
    for job in live_jobs:
        job.read_metrics()
        job.finish(STOPPED)


def values_of(name: str, lines: Sequence[dict]) -> list[float]:
    """Return the values of a metric in the lines that have it."""
    return [line[name] for line in lines if line.get(name) is not None]


def mean_of(name: str, lines: Sequence[dict]) -> float | None:
    """Return the mean of a metric over the lines that have it; None if none has."""
    values = values_of(name, lines)
    return statistics.fmean(values) if values else None


def accuracies_of(line: dict) -> list[float]:
    """Return the accuracy on each held-out set; empty for a line without an evaluation."""
    return [value for name, value in line.items() if name.startswith("eval/") and name.endswith("/accuracy")]


def accuracy_of(line: dict) -> float | None:
    """Return the mean over held-out sets; None for a line without an evaluation."""
    accuracies = accuracies_of(line)
    return statistics.fmean(accuracies) if accuracies else None


def verdict(accuracies: dict[int, float], step: int, expected: dict[int, tuple[float, float] | None]) -> str:
    """Say what was reached after `step` steps, beside what is expected."""
    if step not in accuracies:
        return "not reached"
    reached = f"{accuracies[step]:.3f}"
    limits = expected[step]
    if limits is None:
        return f"{reached}; nothing was measured before"
    lowest, highest = limits
    where = "within" if lowest <= accuracies[step] <= highest else "OUTSIDE"
    return f"{where} {lowest} to {highest}: {reached}"


def is_outside(job: Job) -> bool:
    """Say whether an accuracy is outside the range that is expected of it."""
    return any(text.startswith("OUTSIDE") for text in job.verdicts().values())


# ---- Several runs on one GPU -----------------------------------------------------------------------------------------


def run_side_by_side(jobs: Sequence[Job], options: argparse.Namespace) -> int:
    """Run all as far as memory and seconds allow. Returns 1 if a run failed or an accuracy is not as expected."""
    gpu_gib = options.gpu_gib or gpu_memory_gib()
    refuse_what_cannot_run(jobs, options, gpu_gib)
    out = (options.out or RUNS_DIR / "side_by_side").absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + (options.seconds or math.inf)
    next_report = time.time() + 60
    try:
        while time.time() < deadline:
            for job in jobs:
                if job.is_live:
                    job.look(options.apart)
            chosen = next_to_start(jobs, gpu_gib, deadline - time.time())
            if chosen:
                start_beside_others(chosen, out, options)
            elif not any(job.is_live for job in jobs):
                break
            if time.time() >= next_report:
                next_report += 60
                report(jobs, out)
            time.sleep(1)
    finally:
        stop(jobs)
        for job in jobs:
            if job.state == "waits":
                job.state = "dropped"
        report(jobs, out)
        print((out / "table.txt").read_text(), flush=True)
    return int(any(job.code not in (0, STOPPED, None) or is_outside(job) for job in jobs))


def gpu_memory_gib() -> float:
    """Ask torch for the memory of the GPU, GiB, in another process: here its context would take some of that memory."""
    question = "import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit("torch sees no GPU; without one several runs need --gpu-gib and --tiny")
    return float(answer.stdout)


def next_to_start(jobs: Sequence[Job], gpu_gib: float, seconds_left: float) -> Job | None:
    """Choose the run that starts now, by the states of all: the first of those that wait which may. None: none may."""
    is_one_starting = any(job.state == "starts" for job in jobs)
    if is_one_starting or seconds_left < LEAST_START_SECONDS:
        return None
    free_gib = gpu_gib - sum(job.run.gib for job in jobs if job.state == "runs")
    for job in jobs:
        source = source_of(job, jobs)
        has_its_model = source is None or source.state == "ended"
        has_room = free_gib >= max(job.run.gib, ENGINE_FRAC * gpu_gib)
        if job.state == "waits" and has_its_model and has_room:
            return job
    return None


def source_of(job: Job, jobs: Sequence[Job]) -> Job | None:
    """Find the run whose model `job` starts from: the one with its seed, else the first. None: it is not there."""
    sources = [other for other in jobs if other.name == job.run.starts_from]
    of_its_seed = [other for other in sources if other.seed == job.seed]
    return next(iter(of_its_seed + sources), None)


def start_beside_others(job: Job, out: pathlib.Path, options: argparse.Namespace) -> None:
    """Start a run that writes into `out`, or drop it if the run before it left no model."""
    source = source_of(job, options.jobs)
    if source is not None and not (source.exported / "config.json").exists():
        job.state = "dropped"
        print(f"{job.label} is not started, because {source.label} left no model", flush=True)
        return
    print(f"{job.label} starts", flush=True)
    job.start(job.command(options), out / f"{job.label}.jsonl", RUNS_DIR / f"{job.label}.log", on_console=False)


def report(jobs: Sequence[Job], out: pathlib.Path) -> None:
    """Print a line for each run that is live, and renew the table and the copies of logs and .jsonl files in `out`."""
    (out / "table.txt").write_text(table([row(job) for job in jobs]) + "\n")
    for job in jobs:
        if job.is_live:
            print(console_line(job), flush=True)
        if job.state in ("waits", "dropped"):
            continue
        copy_ends(job.log, out / job.log.name)
        for file in job.folder.glob("*.jsonl"):
            copy_ends(file, out / f"{job.label}.{file.name}")


def copy_ends(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a file of lines; of a long one the first and the last MOST_BYTES / 2, without the lines that this cuts."""
    half = MOST_BYTES // 2
    with open(source, "rb") as file:
        content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            content = content[:half].rpartition(b"\n")[0] + b"\n"
            file.seek(-half, os.SEEK_END)
            file.readline()
            content += file.read()
    target.write_bytes(content)


def steps_of(job: Job) -> list[dict]:
    """Return the lines of its steps, without those of evaluations."""
    return [line for line in job.lines if "time/step" in line]


def progress(job: Job) -> str:
    """Say at which step of how many a run is; its folder has the config."""
    config = job.folder / "config.py"
    text = config.read_text() if config.exists() else ""
    num_steps = re.search(r"^ +num_steps=(\d+)", text, re.MULTILINE)
    last_step = max((line["step"] for line in job.lines), default=0)
    return f"{last_step} of {num_steps[1] if num_steps else '?'}"


def step_seconds(job: Job) -> list[float]:
    """Return the seconds of each step after the first two, which compile, without its evaluation."""
    phases = ("time/evaluate", "time/validate")
    return [line["time/step"] - sum(line.get(phase, 0) for phase in phases) for line in steps_of(job)[2:]]


def console_line(job: Job) -> str:
    """Say where a run is in one line."""
    parts = [f"{job.label}: {time.time() - job.launched:.0f} s, step {progress(job)}"]
    seconds = step_seconds(job)
    if seconds:
        parts.append(f"{statistics.median(seconds):.1f} s a step")
    rewards = values_of("reward/mean", job.lines)
    if rewards:
        parts.append(f"reward {rewards[-1]:.3f}")
    accuracies = [accuracies_of(line) for line in job.lines if accuracies_of(line)]
    if accuracies:
        parts.append(f"held out {in_words(accuracies[-1])}")
    return ", ".join(parts)


def in_words(values: Sequence[float]) -> str:
    """Join the values of several held-out sets, or of several k."""
    return "/".join(f"{value:.3f}" for value in values)


def row(job: Job) -> dict[str, Any]:
    """Return a run's row of the table. A figure that its metrics do not have, or not yet, is -."""
    steps = steps_of(job)
    seconds = step_seconds(job)
    accuracies = [f"{line['step']}: {in_words(accuracies_of(line))}" for line in job.lines if accuracies_of(line)]
    passes = [f"{line['step']}: {passes_of(line)}" for line in job.lines if passes_of(line)]
    cells = {
        "name": job.name,
        "seed": job.seed,
        "steps": progress(job) if job.process else None,
        "step: accuracy": ", ".join(accuracies) or None,
        "step: pass@k": ", ".join(passes) or None,
        "reward, first 10": mean_of("reward/mean", steps[:10]),
        "reward, last 10": mean_of("reward/mean", steps[-10:]),
        "s/step": spread(seconds) if seconds else None,
        "turns, last 10": mean_of("environment/turns", steps[-10:]),
        "calls, last 10": mean_of("environment/calls", steps[-10:]),
        "exit code": job.state if job.code is None else job.code,
    }
    return {name: "-" if cell is None else cell for name, cell in cells.items()}


def passes_of(line: dict) -> str:
    """Return pass@k of each k in a line of metrics, "" if it has none; of several held-out sets one after the other."""
    passes = {name: value for name, value in line.items() if "/pass_at_" in name}
    return " ".join(f"@{name.rpartition('_')[2]} {value:.3f}" for name, value in passes.items())


if __name__ == "__main__":
    main()
