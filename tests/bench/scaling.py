"""Weak scaling: the same work for each GPU on 1, 2, 4, 8 of them; tokens per second over those of one GPU.

    python tests/bench/scaling.py [--gpus 1 2 4 8] [--layouts colocated split] [--shape qwen3-1.7b] [--prompts 32]
        [--tokens 256] [--steps 8] [-- --field value ..]
    python tests/bench/scaling.py --gpus 1 2 --shape tiny --prompts 4 --tokens 8 --steps 5 --cpu -- \
        --model.dtype float32                                                                            (a CPU)

tests/bench/colocated.py with `--prompts` x 8 completions of `--tokens` tokens for each GPU. colocated: every role on
every GPU, trainers sharded (FSDP); split: half of the GPUs train and half sample, a step ahead. Cases for which there
are free GPUs (of the machine, or of CUDA_VISIBLE_DEVICES) run beside each other. In the table are medians (lowest to
highest) of the steps after the first two and before the last, the driver's seconds of each phase, and `over one`:
tokens per second over those of one GPU.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from speed import ROOT, checkpoint, end, launch, report, spread, visible_gpus

FIRST_STEP = 3
PHASES = ("generate", "train", "sync", "other")
POLL_SECONDS = 0.5


@dataclass
class Case:
    """A layout on so many GPUs."""

    num_gpus: int
    layout: str
    gpus: tuple[int, ...] = ()
    process: subprocess.Popen | None = None
    deadline: float = 0.0
    outcome: str = "not begun"

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.num_gpus}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layouts", nargs="+", default=["colocated", "split"], choices=["colocated", "split"])
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--prompts", type=int, default=32, help="for each GPU and step, of 8 completions each")
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, default=240, help="seconds of one case")
    parser.add_argument("--cpu", action="store_true", help="one case after the other, without GPUs")
    parser.add_argument("--name", default="scaling", help="of the JSON file")
    parser.add_argument("flags", nargs="*", help="behind --: for every case")
    options = parser.parse_args()
    checkpoint(options.shape)
    # the largest first, so that small ones fill up what is left
    cases = [Case(n, layout) for n in sorted(options.gpus, reverse=True) for layout in options.layouts]
    cases = [case for case in cases if case.num_gpus > 1 or case.layout == "colocated"]
    try:
        run_all(cases, options)
    finally:
        for case in cases:
            if case.process and case.process.poll() is None:
                end(case.process)
    rows = table_of(sorted(cases, key=lambda case: (case.num_gpus, case.layout)), options)
    report(options.name, rows, shape=options.shape, prompts=options.prompts, tokens=options.tokens)


def run_all(cases: list[Case], options: argparse.Namespace) -> None:
    """Run each case as soon as there are GPUs for it."""
    free = gpus = list(range(max(options.gpus))) if options.cpu else visible_gpus(max(options.gpus))
    while any(case.outcome in ("not begun", "runs") for case in cases):
        for case in cases:
            if case.outcome == "not begun" and len(free) >= case.num_gpus:
                case.gpus = tuple(free[: case.num_gpus])
                free = [] if options.cpu else free[case.num_gpus :]
                begin(case, options)
            elif case.outcome == "runs" and (case.process.poll() is not None or time.monotonic() > case.deadline):
                case.outcome = f"exit code {case.process.poll()}" if case.process.poll() is not None else "too long"
                end(case.process)
                free = gpus if options.cpu else sorted({*free, *case.gpus})
                print(f"{case.name}: {case.outcome}", flush=True)
        time.sleep(POLL_SECONDS)


def begin(case: Case, options: argparse.Namespace) -> None:
    folder = folder_of(case, options)
    model = checkpoint(options.shape)
    shutil.rmtree(folder, ignore_errors=True)
    half = case.num_gpus // 2
    roles = ["--roles.num-trainers", case.num_gpus]
    if case.layout == "split":
        roles = ["--roles.no-colocated", "--roles.num-trainers", half, "--roles.num-generators", case.num_gpus - half]
        roles += ["--overlap-steps", "1", "--generator.gpu-memory-utilization", "0.85"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.num_gpus}"]
    command += ["train_grpo.py", "tests/bench/colocated.py", "--model.path", model, "--run-dir", folder]
    command += ["--data.path", model / "prompts.jsonl", "--prompts-per-step", options.prompts * case.num_gpus]
    command += ["--generator.max-completion-tokens", options.tokens, "--num-steps", options.steps]
    command += ["--sync-check-interval", "0", "--checkpoint.no-export", *roles, *options.flags]
    visible = {} if options.cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, case.gpus))}
    case.process = launch(command, folder.with_suffix(".log"), **visible)
    case.deadline = time.monotonic() + options.limit
    case.outcome = "runs"


def folder_of(case: Case, options: argparse.Namespace) -> Any:
    return ROOT / "runs" / "bench" / f"{options.name}-{options.shape}-{case.name}"


def table_of(cases: list[Case], options: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each case."""
    steps = {case.name: steps_of(case, options) for case in cases}
    rates = {name: [step["tokens_per_second"] for step in its_steps] for name, its_steps in steps.items() if its_steps}
    ones = [statistics.median(rates[case.name]) for case in cases if case.num_gpus == 1 and case.name in rates]
    rows = []
    for case in cases:
        row: dict[str, object] = {"GPUs": case.num_gpus, "layout": case.layout}
        if case.name not in rates:
            rows.append(row | {"failed": case.outcome})
            continue
        row["tokens/s"] = spread(rates[case.name])
        if ones:
            row["over one"] = statistics.median(rates[case.name]) / max(ones)
        its_steps = steps[case.name]
        row["step s"] = spread([step["time/step"] for step in its_steps])
        for phase in PHASES:
            row[f"{phase} s"] = statistics.median(step.get(f"time/{phase}", 0.0) for step in its_steps)
        rows.append(row)
    return rows


def steps_of(case: Case, options: argparse.Namespace) -> list[dict[str, float]]:
    path = folder_of(case, options) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if FIRST_STEP <= line["step"] < options.steps and "time/step" in line]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    main()
