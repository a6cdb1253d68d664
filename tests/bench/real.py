"""A real model learns: one of the runs below, from a recipe, with what it reached so far on disk at any time.

    python3 tests/bench/real.py NAME [--model FOLDER] [--data FOLDER] [--teacher FOLDER] [--seed 0] [--steps N]
        [--out FILE.jsonl] [--limit SECONDS] [--tiny] [-- --field value ...]
    python3 tests/bench/real.py gsm8k --model /root/qwen05 --data /root/gsm8k --seed 0 --out $OUT/gsm8k_0.jsonl

It runs the command that the recipe's docstring names, with a folder of the model in place of the hub's and a folder of
rows (the files that `Run.data` names). Flags behind `--` go to the run.

`--out` gets a JSON line for each evaluation and for every ten steps (their means), with the seconds since the launch.
Each line is on disk at once, so a run that is cut off leaves what it had. The run's own output lies beside it as .log.
The last line says whether the accuracies are in the ranges of RUNS; the exit code is 1
if one is not. `--tiny` is a look on a CPU: two steps of two prompts.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from speed import ROOT, end, launch
from toy_runs import records

RUNS_DIR = ROOT / "runs" / "real"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
GSM8K = "--data.path {data}/train.jsonl --evaluation.path {data}/test.jsonl"
# Behind the run `sft`, whose model is --model
AFTER_SFT = "--data.system-prompt= --reward.answer-format hashes --generator.max-completion-tokens 256"
INTERVAL = 10  # steps in one line
MEANS = ("reward/mean", "completion/length_mean", "completion/truncated_frac", "entropy", "mismatch/mean", "grad_norm")
MEANS += ("loss", "environment/turns", "environment/calls", "environment/unread_calls", "environment/bad_calls")
MEANS += ("time/step", "time/generate", "time/train", "time/sync", "time/evaluate", "memory/peak_gib")
TINY = "--model.dtype float32 --trainer.no-compile --trainer.micro-batch-tokens 2048"
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
    expected: dict[int, tuple[float, float] | None] = field(default_factory=dict)
    """Step -> lowest and highest accuracy after it; None: not measured yet."""
    script: str = "train_grpo.py"


def method(flags: str) -> Run:
    """The first 50 steps of the first recipe with another algorithm."""
    return Run("qwen2_5_coder_0_5b_gsm8k.py", f"--num-steps 50 {flags}", expected={0: START, 25: None, 50: None})


# Of 1,319 questions: 0.259 was seen, 0.262 and 0.268 of 512. 3 standard errors are 0.04.
START = (0.22, 0.31)
RUNS = {
    "gsm8k": Run(
        "qwen2_5_coder_0_5b_gsm8k.py",
        expected={0: START, 25: (0.28, 0.38), 50: (0.34, 0.43), 75: (0.35, 0.44), 100: (0.36, 0.44)},
    ),
    "gsm8k_tool": Run("qwen2_5_coder_0_5b_gsm8k_tool.py", expected={0: (0.04, 0.10), 100: None}),
    "programs": Run("qwen2_5_coder_0_5b_programs.py", data="", expected={0: (0.40, 0.75), 60: None}),
    "reasoning_gym": Run(
        "qwen2_5_coder_0_5b_reasoning_gym.py",
        data="",
        expected={0: (0.05, 0.12), 100: None},
    ),
    "gsm8k_1_5b": Run("qwen2_5_coder_1_5b_gsm8k.py", expected={0: (0.53, 0.61), 100: None}),
    "gsm8k_1_5b_lora": Run(
        "qwen2_5_coder_1_5b_gsm8k.py",
        "--trainer.lora-rank 16 --trainer.learning-rate 3e-5",
        expected={0: (0.53, 0.61), 100: None},
    ),
    "sft": Run(
        "qwen2_5_coder_0_5b_sft_gsm8k.py",
        data=f"{GSM8K} --validation.path {{data}}/test.jsonl",
        expected={117: (0.25, 0.37), 234: (0.28, 0.40)},
        script="train_sft.py",
    ),
    "after_sft": Run("qwen2_5_coder_0_5b_gsm8k.py", AFTER_SFT, expected={0: (0.30, 0.38), 100: None}),
    "distill": Run("qwen2_5_coder_0_5b_distill.py", expected={0: START, 100: None}),
    "grpo": method(""),
    "dr_grpo": method("--algorithm.loss dr_grpo"),
    "dapo": method("--algorithm.loss dapo"),
    "gspo": method("--algorithm.loss gspo"),
    "cispo": method("--algorithm.loss cispo"),
    "maxrl": method("--algorithm.advantages maxrl --algorithm.aggregation token_mean"),
    "dppo": method("--algorithm.loss dppo"),
}


def main() -> None:
    options = read_options(sys.argv[1:])
    out = options.out or RUNS_DIR / f"{options.name}_{options.seed}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w") as file:
        sys.exit(run(options, out.absolute(), file))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("name", choices=RUNS)
    words.add_argument("--model", help="a folder in place of the recipe's model")
    words.add_argument("--data", help="a folder in place of the recipe's data")
    words.add_argument("--teacher", help="a folder in place of the recipe's teacher")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--steps", type=int)
    words.add_argument("--out", type=pathlib.Path)
    words.add_argument("--limit", type=float, help="seconds after which the run is stopped, and counts as it is")
    words.add_argument("--tiny", action="store_true")
    return words


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line. `flags` becomes what stands behind --, which goes to the run."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:at])
    options.flags = arguments[at + 1 :]
    return options


def run(options: argparse.Namespace, out: pathlib.Path, file: TextIO) -> int:
    """Train and judge. Returns the exit code."""
    chosen, run_dir = RUNS[options.name], RUNS_DIR / f"{options.name}-{options.seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    recipe = f"configs/{chosen.recipe}"
    given = given_flags(chosen, options)
    command = [sys.executable, *TORCHRUN, chosen.script, recipe, *given, "--run-dir", run_dir]
    write(file, command=" ".join(map(str, command[1:])))
    code = follow(command, run_dir, out.with_suffix(".log"), file, options.limit)
    lines = records(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    accuracies = {line["step"]: accuracy_of(line) for line in lines if accuracy_of(line) is not None}
    verdicts = {step: verdict(accuracies, step, chosen.expected) for step in chosen.expected}
    write(file, exit_code=code, verdict=verdicts)
    return code or int(any(text.startswith("OUTSIDE") for text in verdicts.values()))


def given_flags(chosen: Run, options: argparse.Namespace) -> list[str]:
    """What is added to the recipe."""
    flags = [*chosen.flags.split(), "--seed", str(options.seed)]
    for flag, folder in (("--model.path", options.model), ("--model.reference-path", options.teacher)):
        flags += [flag, str(pathlib.Path(folder).absolute())] if folder else []
    if options.data:
        flags += chosen.data.format(data=pathlib.Path(options.data).absolute()).split()
    if options.tiny:
        flags += (TINY + (TINY_SFT if chosen.script == "train_sft.py" else TINY_GRPO)).split()
    steps = options.steps or (2 if options.tiny else None)
    return flags + (["--num-steps", str(steps)] if steps else []) + options.flags


def follow(command: list[Any], folder: pathlib.Path, log: pathlib.Path, file: TextIO, limit: float | None) -> int:
    """Run a program and write what appears in its metrics.jsonl. Returns its exit code, 124 if the limit ended it."""
    threads = {} if "--trainer.no-compile" not in command else {"OMP_NUM_THREADS": "1"}
    started, number, recent = time.time(), 0, []
    process = launch(command, log, **threads)
    try:
        while True:
            code = process.poll()
            lines = records(folder) if (folder / "metrics.jsonl").exists() else []
            for line in lines[number:]:
                recent = tell(line, recent, started, file)
            number = len(lines)
            if code is not None:
                break
            if limit and time.time() - started > limit:
                code = 124
                break
            time.sleep(1)
    finally:
        end(process)
    if code:
        print("".join(log.read_text().splitlines(keepends=True)[-40:]), flush=True)
    return code


def tell(line: dict, recent: list[dict], started: float, file: TextIO) -> list[dict]:
    """Write a line of metrics if it is an evaluation, or the mean of ten steps. Returns the steps not written yet."""
    facts = {"step": line["step"], "seconds": round(line["time"] - started, 1)}
    held_out = {name: value for name, value in line.items() if name.startswith(("eval/", "validation/"))}
    if held_out:
        write(file, **facts, **held_out)
        return recent
    recent = [*recent, line]
    if line["step"] % INTERVAL and line["step"] > 2:  # the first two show what the start costs
        return recent
    means = {name: statistics.fmean(values) for name in MEANS if (values := values_of(name, recent))}
    write(file, **facts, steps=len(recent), **means)
    return []


def values_of(name: str, lines: list[dict]) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def accuracy_of(line: dict) -> float | None:
    """The mean over held-out sets; None in a line without any."""
    found = [value for name, value in line.items() if name.startswith("eval/") and name.endswith("/accuracy")]
    return statistics.fmean(found) if found else None


def verdict(accuracies: dict[int, float], step: int, expected: dict[int, tuple[float, float] | None]) -> str:
    """What was reached after `step` steps, beside what is expected."""
    if step not in accuracies:
        return "not reached"
    reached = f"{accuracies[step]:.3f}"
    if expected[step] is None:
        return f"{reached}; nothing was measured before"
    lowest, highest = expected[step]
    where = "within" if lowest <= accuracies[step] <= highest else "OUTSIDE"
    return f"{where} {lowest} to {highest}: {reached}"


def write(file: TextIO, **figures: Any) -> None:
    """One JSON line, on the console too."""
    text = json.dumps(figures)
    print(text, flush=True)
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())


if __name__ == "__main__":
    main()
