"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

torch.distributed.checkpoint holds the sharded model, optimizer and schedule, the random states of each rank and the
driver's tensors, so a run may resume on another number of trainer ranks. The driver's plain values (step, place in the
data) are in `driver.json`, written last; then the folder gets its name. Reading runs no code. Files that are missing or
cut short are found before anything is loaded; a bit that a disk flipped is not.
"""

import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config import CheckpointConfig
from grpo.folder.run_folder import BROKEN, CHECKPOINTS, PARTIAL, STEP_FOLDER, step_folders, step_of
from grpo.folder.safe_reader import METADATA_FILE, SafePlanner, SafeReader, content_of
from grpo.watch.failures import BadInput

DRIVER_FILE = "driver.json"
DRIVER = "driver"  # what the names of the driver's tensors begin with


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoints there are
# ---------------------------------------------------------------------------------------------------------------------


def newest_usable(run_dir: str) -> tuple[pathlib.Path | None, dict[str, Any], list[pathlib.Path]]:
    """The newest checkpoint that is whole, the driver's state in it, and the newer ones that are not.

    None and an empty state if the run has no checkpoint. A line on the console says why one was passed over. Raises
    ValueError, with what is wrong with the newest, if there are checkpoints and none can be used.
    """
    broken, first_reason = [], ""
    for folder in reversed(step_folders(run_dir)):
        try:
            state = check_checkpoint(folder)
        except ValueError as reason:
            broken.append(folder)
            first_reason = first_reason or str(reason)
            print(f"warning: the checkpoint of step {step_of(folder)} cannot be used: {reason}", flush=True)
            continue
        if broken:
            back = f"warning: the run goes back to the checkpoint of step {step_of(folder)}"
            print(f"{back}; what came after it is trained again", flush=True)
        return folder, state, broken
    if broken:
        raise ValueError(
            f"{run_dir} has {len(broken)} checkpoints, of which none can be used: {first_reason}; start anew with "
            "--overwrite or another --run-dir"
        )
    return None, {}, []


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


def set_aside(broken: list[pathlib.Path]) -> None:
    """Give checkpoints that cannot be used another name, under which they are neither resumed nor counted as kept."""
    for folder in broken:
        aside = folder.with_name(f"{folder.name}{BROKEN}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


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


@dataclass(frozen=True)
class Writing:
    """A checkpoint that threads are writing."""

    step: int
    written: Future
    """This rank's shard."""
    completed: Future | None
    """The whole checkpoint; on rank 0."""


class Saver:
    """Saves the checkpoints of one run; the trainer ranks use it together.

    `save` copies the state to host memory, and threads write it from there. Rank 0's makes a checkpoint of the files as
    soon as every rank has written its own. With `config.in_background` the next steps run meanwhile.
    """

    def __init__(self, run_dir: str, config: CheckpointConfig, group: ProcessGroup | None) -> None:
        """group: the trainer ranks, on CPU tensors, with nothing else going on in it."""
        self.run_dir, self.config, self.group = run_dir, config, group
        self._writing: Writing | None = None

    def save(
        self,
        step: int,
        trained: Stateful,
        driver_state: dict[str, Any] | None,
        driver_tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the checkpoint of `step` and delete all but the `keep` newest, and the best by `keep_best`.

        `trained` is anything with a state_dict; `driver_state` (JSON) and `driver_tensors`, if there are any, are
        wanted on rank 0 alone. Collective over the trainer ranks; waits for the checkpoint before. If the files cannot
        be written, nothing of them is left, older checkpoints stay, and every rank raises BadInput: here, or in the
        background in the next `save` or `wait`.
        """
        self.wait()
        partial = self._place(step).with_suffix(PARTIAL)
        if failed := _on_rank_0(lambda: _make_empty(partial)):
            self._give_up(step, failed)
        state = trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}
        if driver_tensors:
            state[DRIVER] = driver_tensors
        written, completed = dcp.async_save(state, checkpoint_id=partial, process_group=self.group), None
        if dist.get_rank() == 0:
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            # as text, because the driver goes on with what is in it
            completed = thread.submit(self._complete, step, written, json.dumps(driver_state))
            thread.shutdown(wait=False)
        self._writing = Writing(step, written, completed)
        if not self.config.in_background:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete; raises as `save` does.

        Collective over the trainer ranks; returns at once where none is being written.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.written.result()
        except dcp.api.CheckpointException as error:  # the same on every rank
            self._give_up(writing.step, _cause(error))
        if failed := _on_rank_0(lambda: writing.completed.result()):
            self._give_up(writing.step, failed)

    def _place(self, step: int) -> pathlib.Path:
        return pathlib.Path(self.run_dir) / CHECKPOINTS / f"step-{step:08d}"

    def _complete(self, step: int, written: Future, driver_state: str) -> None:
        """Make a checkpoint of what all ranks have written, and delete those that are not kept."""
        written.result()  # torch's planner has heard from all ranks
        target = self._place(step)
        partial = target.with_suffix(PARTIAL)
        with open(partial / DRIVER_FILE, "w", encoding="utf-8") as file:
            file.write(driver_state)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)  # in one step: a crash before it leaves the older checkpoints as they are
        _sync_folder(target.parent)
        best = best_checkpoint(self.run_dir, self.config.keep_best) if self.config.keep_best else None
        for old in step_folders(self.run_dir)[: -self.config.keep]:
            if old != best:
                shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))  # killed meanwhile, it is not half a checkpoint

    def _give_up(self, step: int, failed: BaseException) -> None:
        """Leave nothing of a checkpoint that could not be written, and raise. Collective over the trainer ranks."""
        target = self._place(step)
        partial, free = target.with_suffix(PARTIAL), shutil.disk_usage(self.run_dir).free
        size = sum(path.stat().st_size for path in partial.glob("*")) if dist.get_rank() == 0 else 0
        _on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
        if not isinstance(failed, OSError | RuntimeError):  # torch's writer has both for a full disk
            raise failed
        older = [str(step_of(folder)) for folder in step_folders(self.run_dir) if folder != target]
        left = f"the checkpoint of step {older[-1]} stays" if older else "there is no older one"
        raise BadInput(
            f"the checkpoint of step {step} could not be saved in {target.parent}: {failed}; {size / 2**30:.2f} GiB of "
            f"it were written and {free / 2**30:.2f} GiB were free; {left}. Make room and continue with --resume"
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
    """The driver's tensors by name; empty if it had none. Not collective. Raises BadInput if they cannot be read."""
    there, tensors = SafeReader(checkpoint).read_metadata().state_dict_metadata, {}
    for name in filter(lambda name: name.startswith(f"{DRIVER}."), there):
        if not isinstance(there[name], TensorStorageMetadata):
            raise BadInput(f"{checkpoint} cannot be loaded: {name} is no tensor")
        tensors[name] = torch.empty(there[name].size, dtype=there[name].properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # torch's, that one process loads alone
        _load(tensors, checkpoint, no_dist=True)
    return {name.removeprefix(f"{DRIVER}."): tensor for name, tensor in tensors.items()}


def _load(state: dict[str, Any], checkpoint: pathlib.Path, no_dist: bool = False) -> None:
    """Fill in the state's tensors and values. Raises BadInput with the one cause, if there was one on any rank."""
    try:
        dcp.load(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner(), no_dist=no_dist)
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
