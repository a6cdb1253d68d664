"""GRPO of a mixture of experts on one GPU, every role on it.

    python tests/bench/moe.py [--layers 8] [--steps 5] [--limit 540] [--tiny] [-- --trainer.moments bfloat16 ...]

The shape is that of Qwen3-30B-A3B with fewer layers and random weights: 8 layers are 5.3e9 parameters, which with
float32 moments and an engine that sleeps take about 110 GiB; `--layers 3` fits 80. Prompts, lengths and rewards are
those of colocated.py, and generator and trainer are compared in every step. What comes behind `--` goes to the run. The
first step, which compiles, is left out. A run that fails or is stopped at its limit counts as far as it came, and the
exit code is 1. `--tiny` is a look on a CPU.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

from speed import ROOT, report, run_limited, spread
from toy_runs import records

SHOWN = ("time/step", "time/generate", "time/train", "time/sync", "tokens_per_second", "memory/peak_gib")
SHOWN += ("mismatch/mean", "mismatch/kl", "mismatch/ess")
LIMIT = 540  # seconds of a run
REAL = ["--generator.sleep", "--trainer.activation-checkpointing", "full"]
TINY = ["--model.dtype", "float32", "--trainer.no-compile", "--generator.max-completion-tokens", "16"]
TINY += ["--prompts-per-step", "4", "--trainer.micro-batch-tokens", "1024"]
RUN_DIR = ROOT / "runs" / "moe"
GRPO = ("train_grpo.py", "tests/bench/colocated.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the run")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("flags", nargs="*", help="behind --")
    options = parser.parse_args()
    shape = "tiny-moe" if options.tiny else "qwen3-30b-a3b"
    folder = pathlib.Path(os.environ.get("BENCH_MODELS", "/tmp/bench_models")) / f"{shape}-{options.layers}"
    if not (folder / "prompts.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, ROOT / "tests/bench/random_checkpoint.py", shape, folder]
        subprocess.run([*command, "--num-layers", str(options.layers)], check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", *GRPO]
    command += ["--model.path", folder, "--data.path", folder / "prompts.jsonl", "--num-steps", options.steps]
    command += ["--run-dir", RUN_DIR, "--overwrite", *(TINY if options.tiny else REAL), *options.flags]
    log = RUN_DIR.with_suffix(".log")
    shutil.rmtree(RUN_DIR, ignore_errors=True)
    code = run_limited(command, log, options.limit)
    if code:
        print(log.read_text()[-3000:], flush=True)
    steps = [line for line in records(RUN_DIR) if line["step"] > 1]
    measured = {shown: [line[shown] for line in steps if shown in line] for shown in SHOWN}
    row = {"exit code": code, "steps": len(steps)} | {
        shown: spread(values) for shown, values in measured.items() if values
    }
    report("moe", [row], shape=shape, layers=options.layers, flags=options.flags)
    sys.exit(int(code != 0))


if __name__ == "__main__":
    main()
