"""Is the layout that `python -m grpo.layout` chooses the fastest? All layouts of as many ranks, one after another.

    python tests/bench/layouts.py --ranks 4 [--shape qwen3-1.7b] [--steps 8] [-- --field value ..]        (4 GPUs)
    python tests/bench/layouts.py --ranks 2 --shape tiny --steps 6 --tokens 8 --limit 600 -- \
        --model.dtype float32 --prompts-per-step 4 --group-size 4                                         (a CPU)

tests/bench/colocated.py with 512 completions of `--tokens` tokens each, and overlap where a layout has it. Measured is
the median step without the first two, which compile, and the last; predicted is what grpo.layout says.
"""

import argparse
import json
import shutil
import sys
from typing import Any

from speed import ROOT, checkpoint, report, run_limited, spread

FIRST_STEP = 3
FLAGS = ["--prompts-per-step", "64", "--overlap-steps", "1", "--roles.no-colocated", "--checkpoint.no-export"]
# of a split layout's engine; the colocated one takes its part of it
FLAGS += ["--generator.gpu-memory-utilization", "0.85"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--tokens", type=int, default=512, help="of each completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, default=280, help="seconds of one run")
    parser.add_argument("--name", default="layouts", help="of the JSON file")
    parser.add_argument("flags", nargs="*", help="behind --: for every run")
    options = parser.parse_args()
    checkpoint(options.shape)
    folder = ROOT / "runs" / "bench" / options.name
    shutil.rmtree(folder, ignore_errors=True)
    code = run("measured", ["-m", "grpo.layout"], [], options)
    if code != 0:
        print(f"grpo.layout: {code}, see {folder}/measured.log")
        return
    measured = json.loads((folder / "measured-layout.json").read_text())
    print((folder / "measured.log").read_text()[-2000:], flush=True)
    rows = []
    for number, layout in enumerate(measured["compared"]):
        rows.append(row(f"layout-{number}", layout, layout["changes"] == measured["changes"], options))
        print(rows[-1], flush=True)
    report(options.name, rows, shape=options.shape, ranks=options.ranks, times=measured["times"])


def row(name: str, layout: dict[str, Any], chosen: bool, options: argparse.Namespace) -> dict[str, object]:
    """One layout's run."""
    changes = layout["changes"]
    roles = {field: changes[f"roles.{field}"] for field in ("num_trainers", "num_generators", "colocated")}
    described = f"{roles['num_trainers']} + {roles['num_generators']}"
    cells = {"trainers + generators": "colocated" if roles["colocated"] else described, "chosen": "yes" * chosen}
    code = run(name, ["train_grpo.py"], flags_of(changes), options)
    path = ROOT / "runs" / "bench" / options.name / name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines[:-1] if line["step"] >= FIRST_STEP]
    if code != 0 or not steps:
        return cells | {"predicted step s": layout["step"], "failed": str(code)}
    phases = {
        f"{phase} s": spread([step[f"time/{phase}"] for step in steps]) for phase in ("generate", "train", "sync")
    }
    return cells | {"predicted step s": layout["step"], "step s": spread([s["time/step"] for s in steps])} | phases


def flags_of(changes: dict[str, Any]) -> list[str]:
    """`roles.num_trainers` 2 -> --roles.num-trainers 2, `roles.colocated` False -> --roles.no-colocated."""
    flags = []
    for field, value in changes.items():
        *section, name = field.replace("_", "-").split(".")
        if isinstance(value, bool):
            flags.append(f"--{'.'.join([*section, name if value else f'no-{name}'])}")
        else:
            flags += [f"--{'.'.join([*section, name])}", str(value)]
    return flags


def run(name: str, program: list[str], flags: list[str], options: argparse.Namespace) -> int | str:
    """Exit code of one torchrun, or why it has none."""
    folder, model = ROOT / "runs" / "bench" / options.name / name, checkpoint(options.shape)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    command += [*program, "tests/bench/colocated.py", "--model.path", model, "--data.path", model / "prompts.jsonl"]
    lengths = ["--generator.max-completion-tokens", options.tokens]
    lengths += ["--generator.sampling", "min_tokens", options.tokens]
    command += ["--run-dir", folder, "--num-steps", options.steps, *FLAGS, *lengths, *options.flags, *flags]
    return run_limited(command, folder.with_suffix(".log"), options.limit)


if __name__ == "__main__":
    main()
