"""On-policy distillation beside GRPO on additions: held-out accuracy of both, over some seeds, and steps to reach it.

    python tests/bench/distill.py [--methods grpo distill mixed hint hint_policy] [--seeds 0 1 2] [-- --num-steps 60]

Needs what `configs/toy_sft.py` and `configs/toy_arithmetic.py` leave: both start from runs/toy_sft/model, the teacher
is runs/toy_arithmetic/model. One process per run, colocated on one core, 256 completions per step; what is behind `--`
goes to every run. Each run leaves `runs/distill/METHOD-SEED`; one that is finished there is not run again.

`hint` and `hint_policy` are self-distillation with the answer in the prompt of the teacher, which is the start or the
policy. That start cannot read such a prompt. One that can, for all methods (`-- --model.path runs/toy_hint/model`):

    python train_sft.py configs/toy_sft.py --num-trainers 1 --data.row tests/bench/hints.py:some_hinted
        --stop-at-loss 0.06 --run-dir runs/toy_hint
"""

import argparse
import pathlib

from speed import ROOT
from toy_runs import ALONE, accuracies, is_finished, train

COMMON = [*ALONE, "--evaluation.interval", "10"]
MIXED = ["--reward.functions", "math_reward", "1", "thinking_reward", "0.1", "--prompts-per-step", "32"]
MIXED += ["--group-size", "8"]
HINT = ["--model.reference-path", "", "--algorithm.teacher-template", "{answer};{question}"]
METHODS = {
    "grpo": ["configs/toy_arithmetic.py"],
    "distill": ["configs/toy_distill.py"],
    "mixed": ["configs/toy_distill.py", *MIXED],
    "hint": ["configs/toy_distill.py", *HINT],
    "hint_policy": ["configs/toy_distill.py", *HINT, "--algorithm.teacher", "policy"],
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
            flags = [*METHODS[method], *COMMON, "--seed", str(seed), *options.flags]
            train(folder_of(method, seed), flags)
    print(table(options.methods, options.seeds))


def folder_of(method: str, seed: int) -> pathlib.Path:
    """Return the folder of a run."""
    return ROOT / "runs" / "distill" / f"{method}-{seed}"


def table(methods: list[str], seeds: list[int]) -> str:
    """Return a Markdown table with a row for each run: the first step whose evaluation reached each level, else -."""
    teacher = list(accuracies(TEACHER).values())[-1]
    levels = (*LEVELS, teacher)
    header = ["method", "seed", "start", "end", "best", *(f"to {level:.3g}" for level in LEVELS)]
    header.append(f"to the teacher's {teacher:.3f}")
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for method in methods:
        for seed in seeds:
            if not is_finished(folder_of(method, seed)):
                continue
            curve = accuracies(folder_of(method, seed))
            start, *_, end = curve.values()
            reached = [next((str(step) for step, a in curve.items() if a >= level), "-") for level in levels]
            ends = [f"{a:.3f}" for a in (start, end, max(curve.values()))]
            lines.append(f"| {' | '.join([method, str(seed), *ends, *reached])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
