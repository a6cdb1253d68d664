"""Learning runs on the toy task, through the real stack on a CPU: every loss over some seeds, and the table of results.

    python tests/bench/losses.py [--losses grpo dapo ...] [--seeds 0 1 2] [--jobs 2] [-- --num-steps 60 ...]

Needs `runs/toy_sft/model` (`bash launch/quickstart.sh` leaves it). One process per run, colocated on one core; what is
behind `--` goes to every run. Each run leaves `runs/losses/LOSS-SEED`; one that is finished there is not run again.
Every step makes two updates, so that the policy leaves the one that sampled, and the losses differ.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce", "configs/examples/my_loss.py:gentle"]
FLAGS = ["--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0", "--overwrite"]
FLAGS += ["--algorithm.kl-coef", "0", "--algorithm.num-mini-batches", "2", "--checkpoint.no-export"]
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
        list(pool.map(lambda run: train(*run, options.flags), runs))
    print(table(options.losses, options.seeds))


def folder_of(loss: str, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "losses" / f"{loss.rpartition(':')[2]}-{seed}"


def train(loss: str, seed: int, flags: list[str]) -> None:
    folder = folder_of(loss, seed)
    if (folder / "finished").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    log_file = folder.with_suffix(".log")  # beside the folder, which is the run's own
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    command += ["configs/toy_arithmetic.py", *FLAGS, "--algorithm.loss", loss, "--seed", str(seed)]
    command += ["--run-dir", str(folder), *flags]
    with open(log_file, "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode
    print(f"{loss} seed {seed}: {'done' if code == 0 else f'FAILED, see {log_file}'}", flush=True)
    if code == 0:
        (folder / "finished").touch()


def table(losses: list[str], seeds: list[int]) -> str:
    lines = ["| loss | start | end | best | end, mean (std) | last reward/mean |", "|---|---|---|---|---|---|"]
    for loss in losses:
        starts, ends, bests, rewards = [], [], [], []
        for seed in seeds:
            if not (folder_of(loss, seed) / "finished").exists():
                continue
            records = [json.loads(line) for line in (folder_of(loss, seed) / "metrics.jsonl").read_text().splitlines()]
            curve = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
            starts, ends, bests = [*starts, curve[0]], [*ends, curve[-1]], [*bests, max(curve)]
            rewards.append([record["reward/mean"] for record in records if "reward/mean" in record][-1])
        if ends:
            columns = [" ".join(f"{x:.3f}" for x in values) for values in (starts, ends, bests)]
            spread = f"{statistics.mean(ends):.3f} ({statistics.stdev(ends) if len(ends) > 1 else 0:.3f})"
            name = loss.rpartition("/")[2]
            lines.append(f"| {name} | {' | '.join(columns)} | {spread} | {statistics.mean(rewards):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
