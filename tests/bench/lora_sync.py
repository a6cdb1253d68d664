"""LoRA's syncs, merged and with adapters alone, in turns: what syncing and sampling take in whole steps of a recipe.

    python tests/bench/lora_sync.py [--recipe FILE] [--rank 16] [--rounds 2] [--steps 8] [--limit S] [--out FOLDER]
        [-- --field ...]

By default on two CPU cores, with the model that `launch/quickstart.sh` gets. On one GPU, with folders of a model and of
rows of GSM8K, also with an engine that sleeps:

    python tests/bench/lora_sync.py --recipe configs/qwen2_5_coder_0_5b_gsm8k.py --out runs/lora_sync_gpu \
        -- --model.path MODEL --data.path ROWS.jsonl
    python tests/bench/lora_sync.py --recipe configs/qwen2_5_coder_1_5b_gsm8k.py --out runs/lora_sync_sleep \
        -- --model.path MODEL --data.path ROWS.jsonl --generator.sleep

Every run has one rank with every role. Each leaves `OUT/SYNC-ROUND`; one that is finished there is not run again. The
first two steps, which compile, do not count. Prints a markdown table after each run, and writes it to OUT/table.md:
median, lowest and highest of all counted steps, also of runs that were stopped after `--limit` seconds. The exit code
is 1 if a run did not finish.
"""

import argparse
import pathlib
import statistics
import sys

from speed import ROOT
from toy_runs import ALONE, is_finished, records, train

SYNCS = ("merged", "adapters")
FLAGS = [*ALONE, "--evaluation.interval", "0"]
NUM_SKIPPED = 2  # first steps; the second has the sync check
COLUMNS = {  # metric -> its header
    "time/sync": "sync, s",
    "time/generate": "sample, s",
    "completion/length_mean": "tokens of a completion",
    "time/train": "train, s",
    "mismatch/mean": "mismatch, nats",
    "memory/peak_gib": "peak, GiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="configs/smollm2_smallest.py")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, help="seconds of one run")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "lora_sync")
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    folders = {sync: [options.out / f"{sync}-{number}" for number in range(options.rounds)] for sync in SYNCS}
    for number in range(options.rounds):
        for sync in SYNCS:
            flags = [*FLAGS, "--num-steps", str(options.steps), "--trainer.lora-rank", str(options.rank)]
            flags += ["--trainer.lora-sync", sync]
            train(folders[sync][number], [options.recipe, *flags, *options.flags], limit=options.limit)
            (options.out / "table.md").write_text(table(folders) + "\n")
            print(table(folders), flush=True)
    sys.exit(not all(is_finished(folder) for runs in folders.values() for folder in runs))


def table(folders: dict[str, list[pathlib.Path]]) -> str:
    """Return a Markdown table with a row for each kind of sync, over what its runs have measured so far."""
    rows = [["sync", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for sync, runs in folders.items():
        steps = [line for run in runs for line in records(run) if line["step"] > NUM_SKIPPED]
        rows.append([sync, *(spread([line[name] for line in steps if name in line]) for name in COLUMNS)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def spread(values: list[float]) -> str:
    """Return median (lowest to highest); "" for no values."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
