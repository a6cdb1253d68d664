"""LoRA beside full training on additions: held-out accuracy of GRPO with adapters of some ranks, over some seeds.

    python tests/bench/lora.py [--methods full rank1 rank8] [--seeds 0 1 2] [-- --num-steps 60 ...]

Needs what `configs/toy_sft.py` leaves: every run starts from runs/toy_sft/model. One process per run, colocated
on one core, 256 completions per step; the learning rate is the recipe's, and 10 times that with adapters (Schulman et
al. 2025, "LoRA Without Regret"). What is behind `--` goes to every run. Each run leaves `runs/lora/METHOD-SEED`; one
that is finished there is not run again.
"""

import argparse
import pathlib

from speed import ROOT
from toy_runs import ALONE, accuracies, is_finished, records, train

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
            flags = ["configs/toy_arithmetic.py", *ALONE, *METHODS[method], "--seed", str(seed)]
            train(folder_of(method, seed), [*flags, *options.flags])
    print(table(options.methods, options.seeds))


def folder_of(method: str, seed: int) -> pathlib.Path:
    return ROOT / "runs" / "lora" / f"{method}-{seed}"


def row(method: str, seed: int) -> list[str]:
    """Return accuracy at the start, at the end and its best; seconds of all steps; KiB of the last checkpoint."""
    folder = folder_of(method, seed)
    start, *_, end = curve = list(accuracies(folder).values())
    seconds = sum(line.get("time/step", 0) for line in records(folder))
    newest = max((folder / "checkpoints").iterdir())
    kib = sum(file.stat().st_size for file in newest.glob("*.distcp")) / 2**10
    ends = [f"{accuracy:.3f}" for accuracy in (start, end, max(curve))]
    return [method, str(seed), *ends, f"{seconds:.0f}", f"{kib:.0f}"]


def table(methods: list[str], seeds: list[int]) -> str:
    """Return a Markdown table with a row for each finished run."""
    header = ["method", "seed", "start", "end", "best", "seconds", "checkpoint (KiB)"]
    rows = [header, ["---"] * len(header)]
    rows += [row(m, s) for m in methods for s in seeds if is_finished(folder_of(m, s))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    main()
