"""Learning runs on the toy task with and without overlap: does a step's lag of the generators cost accuracy?

    python tests/bench/lag.py [--seeds 0 1 2] [--jobs 1] [-- --num-steps 60 ...]

Needs `runs/toy_sft/model` (`bash launch/quickstart.sh` leaves it). Every run is split, 1 trainer + 1 generator rank;
what is behind `--` goes to every run. Each leaves `runs/lag/OVERLAP_STEPS-SEED`; one that is finished there is not run
again. Both have the importance correction that overlap requires, here the default (truncate).
"""

import argparse
import concurrent.futures
import pathlib
import statistics

from toy_runs import ROOT, accuracies, is_finished, records, train

OVERLAP_STEPS = (0, 1)
FLAGS = ["--roles.num-trainers", "1", "--roles.num-references", "0", "--roles.num-generators", "1", "--overwrite"]
FLAGS += ["--checkpoint.no-export", "--algorithm.kl-coef", "0", "--num-steps", "60", "--evaluation.interval", "10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    # seed after seed, so that an interrupted bench compares what it has
    runs = [(overlap_steps, seed) for seed in options.seeds for overlap_steps in OVERLAP_STEPS]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda chosen: run(*chosen, options.flags), runs))
    print(table(options.seeds))


def folder_of(overlap_steps: int, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "lag" / f"{overlap_steps}-{seed}"


def run(overlap_steps: int, seed: int, flags: list[str]) -> None:
    arguments = ["configs/toy_arithmetic.py", *FLAGS, "--overlap-steps", str(overlap_steps), "--seed", str(seed)]
    train(folder_of(overlap_steps, seed), [*arguments, *flags], num_ranks=2)


def table(seeds: list[int]) -> str:
    rows = ["| overlap_steps | start | end | best | end, mean (std) | last reward/mean | mismatch/ess, lowest |"]
    rows.append("|---|---|---|---|---|---|---|")
    for overlap_steps in OVERLAP_STEPS:
        folders = [folder_of(overlap_steps, seed) for seed in seeds if is_finished(folder_of(overlap_steps, seed))]
        if not folders:
            continue
        curves = [list(accuracies(folder).values()) for folder in folders]
        steps = [[line for line in records(folder) if "reward/mean" in line] for folder in folders]
        columns = [[curve[0] for curve in curves], [curve[-1] for curve in curves], [max(curve) for curve in curves]]
        spread = statistics.stdev(columns[1]) if len(folders) > 1 else 0
        cells = [" ".join(f"{x:.3f}" for x in values) for values in columns]
        cells.append(f"{statistics.mean(columns[1]):.3f} ({spread:.3f})")
        cells.append(f"{statistics.mean(lines[-1]['reward/mean'] for lines in steps):.2f}")
        cells.append(" ".join(f"{min(line['mismatch/ess'] for line in lines):.2f}" for lines in steps))
        rows.append(f"| {overlap_steps} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
