"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

torch.distributed.checkpoint holds the sharded model, optimizer and schedule and the random states of each rank, so a
run may resume on another number of trainer ranks. The driver's tensors are in `driver.safetensors`, its plain values
(step, place in the data) in `driver.json`, written last; then the folder gets its name. Reading runs no code. Files
that are missing or cut short are found before anything is loaded; a bit that a disk flipped is not.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config import CheckpointConfig
from grpo.folder.run_folder import CHECKPOINTS, PARTIAL, STEP_FOLDER, step_folders, step_of
from grpo.folder.safe_reader import METADATA_FILE, SafePlanner, SafeReader, content_of
from grpo.watch.failures import BadInput

DRIVER_FILE = "driver.json"
DRIVER_TENSORS_FILE = "driver.safetensors"


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoints there are
# ---------------------------------------------------------------------------------------------------------------------


def newest_checkpoint(run_dir: str) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """The newest checkpoint and the driver's state in it; None and an empty state if the run has none.

    Raises ValueError, with what is wrong and the way to the one before, if its files are not whole.
    """
    folders = step_folders(run_dir)
    if not folders:
        return None, {}
    try:
        return folders[-1], check_checkpoint(folders[-1])
    except ValueError as error:
        then = f"continue after step {step_of(folders[-2])}" if folders[1:] else "start anew"
        raise ValueError(
            f"the checkpoint of step {step_of(folders[-1])} cannot be used: {error}; remove {folders[-1]} to {then}"
        ) from error


def check_checkpoint(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The driver's state, without its tensors, of a checkpoint whose files are all there and long enough.

    Reads no tensor. Raises ValueError that says which file is missing, cut short or of another step.
    """
    state, ends = _read_driver_state(checkpoint), {}
    try:
        for place in SafeReader(checkpoint).read_metadata().storage_data.values():
            name = str(place.relative_path)
            ends[name] = max(ends.get(name, 0), int(place.offset) + int(place.length))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{checkpoint / METADATA_FILE} describes no checkpoint: {error}") from error
    for name, end in ends.items():
        shard = checkpoint / name
        if pathlib.PurePath(name).name != name or not shard.is_file():
            raise ValueError(f"{shard} is missing, which {METADATA_FILE} names")
        if shard.stat().st_size < end:
            raise ValueError(f"{shard} has {shard.stat().st_size} bytes, and a piece of it ends at {end}")
    return state


def remove_unfinished(run_dir: str) -> None:
    """Delete what is left of checkpoints that a run was writing, or deleting, when it was killed."""
    for folder in (pathlib.Path(run_dir) / CHECKPOINTS).glob(f"step-*{PARTIAL}"):
        if STEP_FOLDER.fullmatch(folder.name.removesuffix(PARTIAL)):
            shutil.rmtree(folder, ignore_errors=True)


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """The checkpoint with the highest `eval/<metric>` after its step, the newest of equal ones; None without any."""
    values = {}
    with open(pathlib.Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for record in map(json.loads, file):
            if (value := record.get(f"eval/{metric.removeprefix('eval/')}")) is not None:
                values[record["step"]] = value
    evaluated = {folder: values[step_of(folder)] for folder in step_folders(run_dir) if step_of(folder) in values}
    return max(reversed(evaluated), key=evaluated.get, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------------------------------


def saves(config: CheckpointConfig, step: int, is_last: bool) -> bool:
    """Whether a checkpoint follows the `step`-th step."""
    return config.interval > 0 and (is_last or step % config.interval == 0)


def save_checkpoint(
    run_dir: str,
    config: CheckpointConfig,
    step: int,
    trained: Stateful,
    driver_state: dict[str, Any] | None,
    driver_tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the checkpoint of `step` and delete all but the `keep` newest, and the best by `keep_best`.

    `trained` is anything with a state_dict; `driver_state` (JSON) and `driver_tensors`, if there are any, are wanted on
    rank 0 alone. Collective over the trainer ranks. If the files cannot be written, nothing of them is left, older
    checkpoints stay, and every rank raises BadInput.
    """
    target = pathlib.Path(run_dir) / CHECKPOINTS / f"step-{step:08d}"
    partial = target.with_suffix(PARTIAL)

    def complete() -> None:
        """Make a checkpoint of what all ranks have written, and delete those that are not kept."""
        files = {DRIVER_TENSORS_FILE: safetensors.torch.save(driver_tensors)} if driver_tensors else {}
        for name, content in (files | {DRIVER_FILE: json.dumps(driver_state).encode()}).items():
            with open(partial / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync_folder(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)  # in one step: a crash before it leaves the older checkpoints as they are
        _sync_folder(target.parent)
        best = best_checkpoint(run_dir, config.keep_best) if config.keep_best else None
        for old in step_folders(run_dir)[: -config.keep]:
            if old != best:
                shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))  # killed meanwhile, it is not half a checkpoint

    failed: BaseException | None = _on_rank_0(lambda: _make_empty(partial))
    if failed is None:
        try:
            dcp.save(trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}, checkpoint_id=partial)
        except dcp.api.CheckpointException as error:  # the same on every rank
            failed = _cause(error)
    failed = failed or _on_rank_0(complete)
    if failed is None:
        return
    _on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
    if not isinstance(failed, OSError | RuntimeError):  # torch's writer has both for a full disk
        raise failed
    free = shutil.disk_usage(run_dir).free
    raise BadInput(
        f"the checkpoint of step {step} could not be saved in {partial.parent}: {failed}; without it "
        f"{free / 2**30:.2f} GiB are free, and older checkpoints stay. Make room and continue with --resume"
    ) from failed


def _make_empty(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync_folder(folder: pathlib.Path) -> None:
    """Bring the names in a folder to disk, where a renamed file may otherwise be missing after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _on_rank_0(work: Callable[[], None]) -> OSError | None:
    """Do it on the first trainer; every trainer gets the OSError that it raised, None if it did not. Collective."""
    raised: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            raised = [error]
    dist.broadcast_object_list(raised, src=0, device=torch.device("cpu"))
    return raised[0]


def _cause(error: dcp.api.CheckpointException) -> BaseException:
    """What went wrong first on the lowest rank on which anything did; torch's own text is the tracebacks of all."""
    cause, _ = error.failures[min(error.failures)]
    while below := cause.__cause__ or cause.__context__:
        cause = below
    return cause


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


def load_checkpoint(checkpoint: pathlib.Path, trained: Stateful) -> None:
    """Bring model, optimizer, schedule and random states back. Collective over the trainer ranks.

    Raises BadInput if the pieces cannot be read, would run code or do not fit what is trained.
    """
    state, rank = trained.state_dict(), str(dist.get_rank())
    there = SafeReader(checkpoint).read_metadata().state_dict_metadata
    # absent when more ranks resume than saved, or on another kind of device
    random = {kind: value for kind, value in _random_state().items() if f"random.{rank}.{kind}" in there}
    if random:
        state["random"] = {rank: random}
    _load(state, checkpoint)
    trained.load_state_dict(state)
    if random:
        torch.set_rng_state(state["random"][rank]["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(state["random"][rank]["cuda"])


def load_model(checkpoint: pathlib.Path, model: Stateful) -> None:
    """Only the weights, into a sharded model. Collective over the ranks that hold it; any number of them."""
    state = {"model": model.state_dict()}
    _load(state, checkpoint)
    model.load_state_dict(state["model"])


def read_driver_tensors(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    """The driver's tensors by name; empty if it had none. Raises ValueError if they cannot be read."""
    path = checkpoint / DRIVER_TENSORS_FILE
    try:
        return safetensors.torch.load(content_of(path)) if path.exists() else {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _load(state: dict[str, Any], checkpoint: pathlib.Path) -> None:
    """Fill in the state's tensors and values. Raises BadInput with the one cause, if there was one on any rank."""
    try:
        dcp.load(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner())
    except dcp.api.CheckpointException as error:
        cause = _cause(error)
        said = str(cause).partition("\n")[0]
        raise BadInput(f"{checkpoint} cannot be loaded: {type(cause).__name__}: {said}") from cause


def _read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Step, place in the data and whatever else the driver gave. Raises ValueError if the file is not as it was."""
    path = checkpoint / DRIVER_FILE
    content = content_of(path)
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(state, dict) or type(state.get("step")) is not int or not isinstance(state.get("data"), dict):
        raise ValueError(f"{path} has no step and place in the data")
    if state["step"] != step_of(checkpoint):
        raise ValueError(f"{path} is of step {state['step']}, in a folder of step {step_of(checkpoint)}")
    return state
