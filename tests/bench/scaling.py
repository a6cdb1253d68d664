"""Weak scaling: the same work for each GPU on 1, 2, 4, 8 of them; tokens per second over those of one GPU.

    python tests/bench/scaling.py [--gpus 1 2 4 8] [--layouts colocated split] [--shape qwen3-1.7b] [--prompts 32]
        [--tokens 256] [--steps 8] [-- --field value ..]
    python tests/bench/scaling.py --gpus 1 2 --shape tiny --prompts 4 --tokens 8 --steps 5 -- --model.dtype float32 \
        --trainer.no-compile                                                                               (a CPU)

tests/bench/colocated.py with `--prompts` x 8 completions of `--tokens` tokens for each GPU, one case after the other.
colocated: every role on every GPU, trainers sharded (FSDP); split: half of the GPUs train and half sample, a step
ahead. In the table are medians (lowest to highest) of the steps after the first two and before the last, the driver's
seconds of each phase, and `over one`: tokens per second over those of one GPU.
"""

import argparse
import shutil
import statistics
import sys
from typing import Any

from speed import ROOT, checkpoint, records, report, run_limited, spread

FIRST_STEP = 3
PHASES = ("generate", "train", "sync", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layouts", nargs="+", default=["colocated", "split"], choices=["colocated", "split"])
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--prompts", type=int, default=32, help="for each GPU and step, of 8 completions each")
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, default=240, help="seconds of one case")
    parser.add_argument("flags", nargs="*", help="behind --: for every case")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for num_gpus in sorted(options.gpus):
        for layout in options.layouts:
            if num_gpus > 1 or layout == "colocated":
                rows.append(measure(num_gpus, layout, options, rows))
                report("scaling", rows, shape=options.shape, prompts=options.prompts, tokens=options.tokens)


def measure(num_gpus: int, layout: str, options: argparse.Namespace, before: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a layout on so many GPUs and return its row. before: rows of fewer GPUs, the first of one."""
    folder = ROOT / "runs" / "bench" / f"scaling-{options.shape}-{layout}-{num_gpus}"
    model = checkpoint(options.shape)
    shutil.rmtree(folder, ignore_errors=True)
    half = num_gpus // 2
    roles = f"--roles.num-trainers {num_gpus}"
    if layout == "split":
        roles = f"--roles.no-colocated --roles.num-trainers {half} --roles.num-generators {num_gpus - half}"
        roles += " --overlap-steps 1 --generator.gpu-memory-utilization 0.85"
    command = (
        f"-m torch.distributed.run --standalone --nproc_per_node={num_gpus} train_grpo.py tests/bench/colocated.py "
        f"--model.path {model} --data.path {model}/prompts.jsonl --run-dir {folder} --num-steps {options.steps} "
        f"--prompts-per-step {options.prompts * num_gpus} --generator.max-completion-tokens {options.tokens} "
        f"--sync-check-interval 0 --checkpoint.no-export {roles}"
    )
    code = run_limited([sys.executable, *command.split(), *options.flags], folder.with_suffix(".log"), options.limit)
    row: dict[str, Any] = {"GPUs": num_gpus, "layout": layout}
    steps = [line for line in records(folder) if "time/step" in line]
    steps = [step for step in steps if FIRST_STEP <= step["step"] < options.steps]
    if not steps:
        return row | {"failed": code}
    rates = [step["tokens_per_second"] for step in steps]
    row |= {"tokens/s": spread(rates), "rate": statistics.median(rates)}
    one = (before or [row])[0]
    if one["GPUs"] == 1 and "rate" in one:
        row["over one"] = row["rate"] / one["rate"]
    row["step s"] = spread([step["time/step"] for step in steps])
    for phase in PHASES:
        row[f"{phase} s"] = statistics.median(step.get(f"time/{phase}", 0.0) for step in steps)
    return row


if __name__ == "__main__":
    main()
