"""GRPO runs on additions for the benches beside this file. A run that finished is not made again."""

import json
import pathlib
import sys

from speed import run_limited

# Every role on one rank, and no model at the end
ALONE = ["--roles.colocated", "--roles.num-trainers", "1", "--roles.num-references", "0", "--overwrite"]
ALONE += ["--checkpoint.no-export"]


def train(folder: pathlib.Path, arguments: list[str], num_ranks: int = 1, limit: float | None = None) -> None:
    """Run `train_grpo.py ARGUMENTS --run-dir FOLDER`, unless it finished before. Its log lies beside the folder.

    limit: seconds, after which it is stopped.
    """
    if is_finished(folder):
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["train_grpo.py", *arguments, "--run-dir", str(folder)]
    log = folder.with_suffix(".log")
    code = run_limited(command, log, limit, OMP_NUM_THREADS="1")
    if code:
        print(f"{folder.name}: FAILED, {code}, see {log.name}", flush=True)
        return
    print(f"{folder.name}: done", flush=True)
    (folder / "finished").touch()


def is_finished(folder: pathlib.Path) -> bool:
    """Say whether `train` has ended there without a failure."""
    return (folder / "finished").exists()


def records(folder: pathlib.Path) -> list[dict]:
    """Read the lines of a run's metrics.jsonl, as far as they are written."""
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def accuracies(folder: pathlib.Path) -> dict[int, float]:
    """Return step -> held-out accuracy after it."""
    return {line["step"]: line["eval/accuracy"] for line in records(folder) if "eval/accuracy" in line}
