"""GRPO steps of ours beside TRL's GRPOTrainer, in turns on one GPU: 32 x 8 completions of 128 + 256 tokens, one update.

    python tests/bench/peer.py [--shapes qwen3-0.6b] [--methods ours trl/32] [--rounds 2] [--steps 8] [--limit 300]
        [--prompts 16] [--group-size 8] [--prompt-tokens 128] [--tokens 4096] [--median-tokens 700]
        [--trl-steps 4] [-- --trainer.activation-checkpointing none ...]

Both run tests/bench/colocated.py: the same prompts, no reference, a coin as reward, bfloat16; TRL as trl_grpo.py says,
with bfloat16 weights, where ours are float32 in the optimizer. Behind `trl/` stand its completions in one forward;
`trl-nogc/32` is without its gradient checkpointing. Random weights hardly ever end a completion early: see
`tokens/step`. With `--median-tokens` completions end at long-tailed lengths, for both the same (lengths.py). What is
behind `--` goes to ours alone. Figures are over all rounds, median (lowest to highest) of the steps after the first
`--warm-steps`, one number for ours and one for TRL; `ratio` is TRL's median step over ours. Every step is printed, the
first ones too.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import sys
from typing import Any

from speed import ROOT, checkpoint, records, report, run_limited, spread

RUNS = ROOT / "runs" / "peer"
BENCH = pathlib.Path(__file__).parent
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=1"
PHASES = ("generate", "train", "sync", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--methods", nargs="+", default=["ours", "trl/32"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl-steps", type=int, help="default: as many as ours")
    parser.add_argument("--warm-steps", type=int, nargs=2, default=[2, 2], help="left out of ours and of TRL's")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--median-tokens", type=int, help="of long-tailed lengths; default: all as long as they may")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one run")
    parser.add_argument("flags", nargs="*", help="behind --: for ours")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL without a launcher refuses to see several
    rows = []
    for shape in options.shapes:
        folder = checkpoint(shape, options.prompt_tokens)
        steps: dict[str, list[dict[str, float]]] = {method: [] for method in options.methods}
        failed: dict[str, str] = {}
        for number in range(options.rounds):
            for method in options.methods:
                name = f"{shape}-{method}-{number}".replace("/", "-")
                new_steps, problem = run(method, folder, name, options)
                steps[method] += new_steps
                if problem:
                    failed[method] = problem
                done = [row(shape, name, steps[name], steps.get("ours", []), failed) for name in options.methods]
                report("peer", rows + done, show=False, flags=options.flags)
        rows += done
    lengths = {name: getattr(options, name) for name in ("prompts", "group_size", "tokens", "median_tokens")}
    report("peer", rows, flags=options.flags, **lengths)


def run(method: str, folder: pathlib.Path, name: str, options: argparse.Namespace) -> tuple[list[dict], str]:
    """Run a method once. Returns the metrics of the steps after the warm ones, and what went wrong ("" if nothing)."""
    run_dir = RUNS / name
    is_ours = method == "ours"
    shutil.rmtree(run_dir, ignore_errors=True)
    num_steps = options.steps
    num_warm = options.warm_steps[0]
    if not is_ours:
        num_steps = options.trl_steps or options.steps
        num_warm = options.warm_steps[1]
    recipe = (
        f"tests/bench/colocated.py --model.path {folder} --data.path {folder}/prompts.jsonl "
        f"--prompts-per-step {options.prompts} --group-size {options.group_size} --num-steps {num_steps} "
        f"--data.max-prompt-tokens {options.prompt_tokens} --generator.max-completion-tokens {options.tokens} "
        f"--run-dir {run_dir}"
    )
    lengths = ""  # a program that runs the rest of the command
    if options.median_tokens:
        lengths = f"{BENCH}/lengths.py {options.median_tokens} {options.tokens}"
    if is_ours:
        command = f"{TORCHRUN} {lengths} train_grpo.py {recipe}"
    else:
        kind, _, rows = method.partition("/")
        command = f"{lengths} {BENCH}/trl_grpo.py {recipe} --rows {rows or 32}"
        if kind == "trl-nogc":
            command += " --no-gradient-checkpointing"
    log = RUNS / f"{name}.log"
    flags = options.flags if is_ours else []
    code = run_limited([sys.executable, *command.split(), *flags], log, options.limit)
    out = os.environ.get("OUT")
    if out and code != 0:
        (pathlib.Path(out) / "peer.log").write_text(log.read_text()[-100_000:])  # of the last that failed
    lines = records(run_dir)
    steps = [line for line in lines if "time/step" in line]
    print(f"{name}: every step took {[round(step['time/step'], 2) for step in steps]} s", flush=True)
    return steps[num_warm:], "" if code == 0 else f"{code}, see {log}"


def row(shape: str, method: str, steps: list[dict], ours: list[dict], failed: dict[str, str]) -> dict[str, Any]:
    """Return the row of a method in the table."""
    cells: dict[str, Any] = {"shape": shape, "method": method}
    if steps:
        seconds = [step["time/step"] for step in steps]
        cells |= {"steps": len(steps), "s/step": spread(seconds)}
        cells["tokens/s"] = spread([step["tokens_per_second"] for step in steps])
        cells["tokens/step"] = statistics.median(step["tokens_per_second"] * step["time/step"] for step in steps)
        if method != "ours" and ours:
            cells["ratio"] = statistics.median(seconds) / statistics.median(step["time/step"] for step in ours)
        for phase in PHASES:
            if f"time/{phase}" in steps[0]:
                cells[phase] = statistics.median(step.get(f"time/{phase}", 0.0) for step in steps)
    if method in failed:
        cells["failed"] = failed[method]
    return cells


if __name__ == "__main__":
    main()
