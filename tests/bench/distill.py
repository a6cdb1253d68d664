"""On-policy distillation beside GRPO on additions: held-out accuracy of both, over some seeds, and steps to reach it.

    python tests/bench/distill.py [--methods grpo distill mixed] [--seeds 0 1 2] [-- --num-steps 60 ...]

Needs what `bash launch/quickstart.sh` leaves: both start from runs/toy_sft/model, the teacher is
runs/toy_arithmetic/model. One process per run, colocated on one core, 256 completions per step; what is behind `--`
goes to every run. Each run leaves `runs/distill/METHOD-SEED`; one that is finished there is not run again.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
COMMON = ["--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0", "--overwrite"]
COMMON += ["--evaluation.interval", "10", "--checkpoint.no-export"]
MIXED = ["--reward.functions", "math_reward", "1", "thinking_reward", "0.1", "--prompts-per-step", "32"]
MIXED += ["--group-size", "8"]
METHODS = {
    "grpo": ["configs/toy_arithmetic.py"],
    "distill": ["configs/toy_distill.py"],
    "mixed": ["configs/toy_distill.py", *MIXED],
}
TEACHER = ROOT / "runs" / "toy_arithmetic"
LEVELS = (0.75, 0.8, 0.85, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["grpo", "distill"], choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    for seed in options.seeds:  # seed after seed, so that an interrupted bench has something of every method
        for method in options.methods:
            train(method, seed, options.flags)
    print(table(options.methods, options.seeds))


def folder_of(method: str, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "distill" / f"{method}-{seed}"


def train(method: str, seed: int, flags: list[str]) -> None:
    folder = folder_of(method, seed)
    if (folder / "finished").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    command += [*METHODS[method], *COMMON, "--seed", str(seed), "--run-dir", str(folder), *flags]
    with open(folder / "log.txt", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode
    print(f"{method} seed {seed}: {'done' if code == 0 else f'FAILED, see {folder}/log.txt'}", flush=True)
    if code == 0:
        (folder / "finished").touch()


def curve_of(folder: pathlib.Path) -> list[tuple[int, float]]:
    """(step, accuracy) of each evaluation of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]


def table(methods: list[str], seeds: list[int]) -> str:
    """Markdown: one row per run; the first step at which an evaluation reached each level, or - if none did."""
    teacher = curve_of(TEACHER)[-1][1]
    levels = (*LEVELS, teacher)
    header = ["method", "seed", "start", "end", "best", *(f"to {level:.3g}" for level in LEVELS)]
    header.append(f"to the teacher's {teacher:.3f}")
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for method in methods:
        for seed in seeds:
            if not (folder_of(method, seed) / "finished").exists():
                continue
            curve = curve_of(folder_of(method, seed))
            accuracies = [accuracy for _, accuracy in curve]
            reached = [next((str(step) for step, a in curve if a >= level), "-") for level in levels]
            ends = [f"{a:.3f}" for a in (accuracies[0], accuracies[-1], max(accuracies))]
            lines.append(f"| {' | '.join([method, str(seed), *ends, *reached])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
