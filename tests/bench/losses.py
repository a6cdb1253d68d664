"""Learning runs on the toy task, through the real stack on a CPU: every loss over some seeds, and the table of results.

    python tests/bench/losses.py [--losses grpo dapo ...] [--seeds 0 1 2] [--jobs 2] [-- --num-steps 60 ...]

Needs `runs/toy_sft/model` (`bash launch/quickstart.sh` leaves it). One process per run, colocated on one core; what is
behind `--` goes to every run. Each run leaves `runs/losses/LOSS-SEED`; one that is finished there is not run again.
Every step makes two updates, so that the policy leaves the one that sampled, and the losses differ.
"""

import argparse
import concurrent.futures
import pathlib
import statistics

from toy_runs import ALONE, ROOT, accuracies, is_finished, records, train

LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce", "configs/examples/my_method.py:gentle"]
FLAGS = [*ALONE, "--algorithm.kl-coef", "0", "--algorithm.num-mini-batches", "2"]
FLAGS += ["--num-steps", "100", "--evaluation.interval", "10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=LOSSES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    # seed after seed, so that an interrupted bench has something of every loss
    runs = [(loss, seed) for seed in options.seeds for loss in options.losses]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda chosen: run(*chosen, options.flags), runs))
    print(table(options.losses, options.seeds))


def folder_of(loss: str, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "losses" / f"{loss.rpartition(':')[2]}-{seed}"


def run(loss: str, seed: int, flags: list[str]) -> None:
    arguments = ["configs/toy_arithmetic.py", *FLAGS, "--algorithm.loss", loss, "--seed", str(seed), *flags]
    train(folder_of(loss, seed), arguments)


def table(losses: list[str], seeds: list[int]) -> str:
    rows = ["| loss | start | end | best | end, mean (std) | last reward/mean |", "|---|---|---|---|---|---|"]
    for loss in losses:
        starts, ends, bests, rewards = [], [], [], []
        for seed in seeds:
            if not is_finished(folder_of(loss, seed)):
                continue
            curve = list(accuracies(folder_of(loss, seed)).values())
            starts, ends, bests = [*starts, curve[0]], [*ends, curve[-1]], [*bests, max(curve)]
            logged = records(folder_of(loss, seed))
            rewards.append([line["reward/mean"] for line in logged if "reward/mean" in line][-1])
        if ends:
            columns = [" ".join(f"{x:.3f}" for x in values) for values in (starts, ends, bests)]
            spread = f"{statistics.mean(ends):.3f} ({statistics.stdev(ends) if len(ends) > 1 else 0:.3f})"
            name = loss.rpartition("/")[2]
            rows.append(f"| {name} | {' | '.join(columns)} | {spread} | {statistics.mean(rewards):.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
