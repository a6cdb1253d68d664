"""The run folder, saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

Sharded model, optimizer, schedule and random states go through torch.distributed.checkpoint, so a run may resume on
another number of trainer ranks; the driver's state (step, data position) is in the same folder as JSON.
"""

import json
import pathlib
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

DRIVER_FILE = "driver.json"
COMPLETE = "step-????????"  # not step-NNNNNNNN.partial, which is being written or was when its run died

# What a run writes into its folder, and all that `overwrite` deletes
RUN_FILES = (
    "config.py",
    "metrics.jsonl",
    "completions.jsonl",
    "evaluation.jsonl",
    "samples.txt",
    "tensorboard",
    "checkpoints",
    "model",
    "initial_model",
)
# of which these are there already when bad input is refused later on; they are no reason to refuse the corrected run
WRITTEN_BEFORE_RUN = ("config.py", "initial_model")


def find_run(run_dir: str, *, resume: bool = False, overwrite: bool = False) -> pathlib.Path | None:
    """The checkpoint to resume from, if that was asked for and there is one. Changes nothing.

    Raises FileExistsError if an earlier run's files are there and neither `resume` nor `overwrite` was asked for.
    """
    there = [name for name in RUN_FILES if (pathlib.Path(run_dir) / name).exists()]
    if set(there) - set(WRITTEN_BEFORE_RUN) and not (resume or overwrite):
        raise FileExistsError(
            f"{run_dir} holds an earlier run ({', '.join(there)}); continue it with --resume, delete it with "
            "--overwrite, or choose another --run-dir"
        )
    return latest_checkpoint(run_dir) if resume else None


def begin_run(run_dir: str, recipe: str, *, fresh: bool = False) -> None:
    """Save the run's resolved config in its folder; `fresh` deletes first what an earlier run left there."""
    folder = pathlib.Path(run_dir)
    for name in RUN_FILES if fresh else ():
        path = folder / name
        if name != "initial_model":  # this run's own already
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.py").write_text(recipe)


def latest_checkpoint(run_dir: str) -> pathlib.Path | None:
    """The newest complete checkpoint of a run, None if there is none."""
    found = sorted(pathlib.Path(run_dir).glob(f"checkpoints/{COMPLETE}/{DRIVER_FILE}"))
    return found[-1].parent if found else None


def read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Step and data position of a checkpoint."""
    return json.loads((checkpoint / DRIVER_FILE).read_text())


def save_checkpoint(run_dir: str, step: int, trained: Stateful, driver_state: dict[str, Any] | None, keep: int) -> None:
    """Write the checkpoint of `step` and delete all but the `keep` newest. Collective over the trainer ranks.

    `trained` is anything with a state_dict; `driver_state` is wanted on rank 0 alone.
    """
    target = pathlib.Path(run_dir) / "checkpoints" / f"step-{step:08d}"
    partial = target.with_suffix(".partial")
    writes = dist.get_rank() == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}, checkpoint_id=partial)
    if writes:
        (partial / DRIVER_FILE).write_text(json.dumps(driver_state))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)  # in one step: a crash before it leaves the older checkpoints as they are
        for old in sorted(target.parent.glob(COMPLETE))[: -max(keep, 1)]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(checkpoint: pathlib.Path, trained: Stateful) -> None:
    """Bring model, optimizer, schedule and random states back. Collective over the trainer ranks."""
    state = trained.state_dict()
    there = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    rank = str(dist.get_rank())
    if f"random.{rank}" in there:  # absent when more ranks resume than saved
        state["random"] = {rank: _random_state()}
    dcp.load(state, checkpoint_id=checkpoint)
    trained.load_state_dict(state)
    if "random" in state:
        torch.set_rng_state(state["random"][rank]["cpu"])
        if "cuda" in state["random"][rank]:
            torch.cuda.set_rng_state(state["random"][rank]["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state
