"""GRPO runs on additions for the benches beside this file. A run that finished is not made again."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
# Every role on one rank, and no model at the end
ALONE = ["--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0", "--overwrite"]
ALONE += ["--checkpoint.no-export"]


def train(folder: pathlib.Path, arguments: list[str], num_ranks: int = 1) -> None:
    """Run `train_grpo.py ARGUMENTS --run-dir FOLDER`, unless it finished before. Its log lies beside the folder."""
    if is_finished(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["train_grpo.py", *arguments, "--run-dir", str(folder)]
    with open(folder.with_suffix(".log"), "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment).returncode
    if code:
        print(f"{folder.name}: FAILED, see {log.name}", flush=True)
        return
    print(f"{folder.name}: done", flush=True)
    (folder / "finished").touch()


def is_finished(folder: pathlib.Path) -> bool:
    """Say whether `train` has ended there without a failure."""
    return (folder / "finished").exists()


def records(folder: pathlib.Path) -> list[dict]:
    """Read the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def accuracies(folder: pathlib.Path) -> dict[int, float]:
    """Return step -> held-out accuracy after it."""
    return {line["step"]: line["eval/accuracy"] for line in records(folder) if "eval/accuracy" in line}
