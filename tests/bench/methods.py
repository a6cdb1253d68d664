"""Learning runs on the toy task, through the real stack on a CPU: methods as rows, over some seeds, and their table.

    python tests/bench/methods.py [--methods grpo dapo ...] [--seeds 0 1 2] [--jobs 2] [-- --num-steps 60 ...]

Needs `runs/toy_sft/model` (`configs/toy_sft.py` leaves it). What is behind `--` goes to every run. Each run
leaves `runs/methods/METHOD-SEED`; one that is finished there is not run again. Every step makes two updates, so that
the policy leaves the one that sampled, and the losses differ.
"""

import argparse
import concurrent.futures
import pathlib
import statistics

from speed import ROOT
from toy_runs import ALONE, accuracies, is_finished, records, train

FLAGS = ["--overwrite", "--checkpoint.no-export", "--algorithm.kl-coef", "0", "--algorithm.num-mini-batches", "2"]
FLAGS += ["--num-steps", "100", "--evaluation.interval", "10"]
LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce"]
FILES = "configs/examples/methods"
DPPO_FLAGS = ["--algorithm.advantages", "group_mean", "--algorithm.aggregation", "fixed_horizon"]
DPPO_FLAGS += ["--algorithm.old-logprobs", "generator"]
ROWS = ["--data.path", "configs/examples/toys.py:addition:train[:1024]"]
HOPELESS = ["--data.path", "tests/bench/hopeless.py:rows", "--reward.functions", "math_reward", "1"]
HOPELESS += ["--evaluation.path", "configs/examples/toys.py:addition:test"]
# Flags of each method; it runs in one process on one core
METHODS = {loss: ["--algorithm.loss", loss] for loss in LOSSES} | {
    "gentle": ["--algorithm.loss", "configs/examples/my_method.py:gentle"],
    "dppo": ["--algorithm.loss", f"{FILES}/dppo.py:dppo", *DPPO_FLAGS],
    "maxrl": ["--algorithm.advantages", f"{FILES}/maxrl.py:maxrl"],
    "fp8_cache": ["--generator.engine", "kv_cache_dtype", "fp8", "--sync-check-interval", "0"],  # it fails that check
    "vespo": ["--algorithm.loss", f"{FILES}/vespo.py:vespo", "--algorithm.aggregation", "token_mean"]
    + ["--algorithm.old-logprobs", "generator"],
    "gmpo": ["--algorithm.loss", f"{FILES}/gmpo.py:gmpo"],
    "luspo": ["--algorithm.loss", f"{FILES}/luspo.py:luspo"],
    "clip_cov": ["--algorithm.advantages", f"{FILES}/clip_cov.py:clip_cov", "--algorithm.aggregation", "token_mean"],
    "rows": ROWS,  # few, so that a curriculum meets each about three times
    "skip_solved": [*ROWS, "--data.curriculum", "configs/examples/curriculum.py:skip_solved"],
    "medium_first": [*ROWS, "--data.curriculum", "configs/examples/curriculum.py:medium_first"],
    "hopeless": HOPELESS,
    "hopeless_dynamic": [*HOPELESS, "--sampling.dynamic"],
    "hopeless_medium": [*HOPELESS, "--data.curriculum", "configs/examples/curriculum.py:medium_first"],
    "gdpo": ["--algorithm.advantages", f"{FILES}/gdpo.py:gdpo"],  # the recipe has two reward functions
}
# Loss, and by how many steps its generator is behind. 1 trainer and 1 generator, each on a core. grpo has the
# importance correction that overlap requires (by default truncate); dppo's ratio is to the sampler's log-probs anyway.
LAGS = {f"{loss}-lag{lag}": (loss, lag) for loss in ("grpo", "dppo") for lag in (0, 1)}
SPLIT = ["--roles.num-trainers", "1", "--roles.num-references", "0", "--roles.num-generators", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *LAGS], default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    # seed after seed, so that an interrupted bench has something of every method
    runs = [(method, seed) for seed in options.seeds for method in options.methods]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run, method, seed, options.flags) for method, seed in runs]
    for future in futures:
        future.result()  # raises what the run raised
    print(table(options.methods, options.seeds))


def folder_of(method: str, seed: int) -> pathlib.Path:
    """Return the folder of a run."""
    return ROOT / "runs" / "methods" / f"{method}-{seed}"


def run(method: str, seed: int, flags: list[str]) -> None:
    """Train by a method, unless that is done."""
    if method in LAGS:
        loss, lag = LAGS[method]
        own_flags = [*SPLIT, *METHODS[loss], "--overlap-steps", str(lag)]
        num_ranks = 2
    else:
        own_flags = [*ALONE, *METHODS[method]]
        num_ranks = 1
    arguments = ["configs/toy_arithmetic.py", *FLAGS, *own_flags, "--seed", str(seed), *flags]
    train(folder_of(method, seed), arguments, num_ranks)


def table(methods: list[str], seeds: list[int]) -> str:
    """Return a Markdown table with a row for each method that has a finished run."""
    rows = ["| method | start | end | best | end, mean (std) | last reward/mean | mismatch/ess, lowest |"]
    rows.append("|---|---|---|---|---|---|---|")
    for method in methods:
        folders = [folder_of(method, seed) for seed in seeds if is_finished(folder_of(method, seed))]
        if not folders:
            continue
        curves = [list(accuracies(folder).values()) for folder in folders]
        steps = [[line for line in records(folder) if "reward/mean" in line] for folder in folders]
        starts = [curve[0] for curve in curves]
        ends = [curve[-1] for curve in curves]
        bests = [max(curve) for curve in curves]
        deviation = statistics.stdev(ends) if len(folders) > 1 else 0
        cells = [" ".join(f"{accuracy:.3f}" for accuracy in values) for values in (starts, ends, bests)]
        cells.append(f"{statistics.mean(ends):.3f} ({deviation:.3f})")
        cells.append(f"{statistics.mean(lines[-1]['reward/mean'] for lines in steps):.2f}")
        cells.append(" ".join(f"{min(line['mismatch/ess'] for line in lines):.2f}" for lines in steps))
        rows.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
