"""LoRA beside full training on additions: held-out accuracy of GRPO with adapters of some ranks, over some seeds.

    python tests/bench/lora.py [--methods full rank1 rank8] [--seeds 0 1 2] [-- --num-steps 60 ...]

Needs what `bash launch/quickstart.sh` leaves: every run starts from runs/toy_sft/model. One process per run, colocated
on one core, 256 completions per step; the learning rate is the recipe's, and 10 times that with adapters (Schulman et
al. 2025, "LoRA Without Regret"). What is behind `--` goes to every run. Each run leaves `runs/lora/METHOD-SEED`; one
that is finished there is not run again.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
COMMON = ["configs/toy_arithmetic.py", "--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0"]
COMMON += ["--overwrite", "--checkpoint.no-export"]
ADAPTERS = ["--trainer.learning-rate", "2e-3", "--trainer.lora-rank"]
METHODS = {"full": [], "rank1": [*ADAPTERS, "1"], "rank8": [*ADAPTERS, "8"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    for seed in options.seeds:  # seed after seed, so that an interrupted bench has something of every method
        for method in options.methods:
            train(method, seed, options.flags)
    print(table(options.methods, options.seeds))


def folder_of(method: str, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "lora" / f"{method}-{seed}"


def train(method: str, seed: int, flags: list[str]) -> None:
    folder = folder_of(method, seed)
    if (folder / "finished").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train_grpo.py"]
    command += [*COMMON, *METHODS[method], "--seed", str(seed), "--run-dir", str(folder), *flags]
    if method != "full":
        command += ["--trainer.lora-seed", str(seed)]
    with open(folder.with_suffix(".log"), "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode
    print(f"{method} seed {seed}: {'done' if code == 0 else f'FAILED, see {log.name}'}", flush=True)
    if code == 0:
        (folder / "finished").touch()


def row(method: str, seed: int) -> list[str]:
    """Accuracy at the start, the end and its best; seconds of all steps; size of the last checkpoint in KiB."""
    folder = folder_of(method, seed)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    seconds = sum(line.get("time/step", 0) for line in lines)
    newest = max((folder / "checkpoints").iterdir())
    kib = sum(file.stat().st_size for file in newest.glob("*.distcp")) / 2**10
    ends = [f"{accuracy:.3f}" for accuracy in (accuracies[0], accuracies[-1], max(accuracies))]
    return [method, str(seed), *ends, f"{seconds:.0f}", f"{kib:.0f}"]


def table(methods: list[str], seeds: list[int]) -> str:
    """Markdown: one row per finished run."""
    header = ["method", "seed", "start", "end", "best", "seconds", "checkpoint (KiB)"]
    rows = [header, ["---"] * len(header)]
    rows += [row(m, s) for m in methods for s in seeds if (folder_of(m, s) / "finished").exists()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    main()
