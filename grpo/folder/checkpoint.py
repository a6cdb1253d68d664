"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

torch.distributed.checkpoint holds the sharded model, optimizer and schedule and the random states of each rank, so a
run may resume on another number of trainer ranks. What the driver needs (step, place in the data, groups in flight) is
in `driver.pt`, written last; then the folder gets its name. A save copies all of it to the host's memory; a thread
writes the copy while training goes on. Reading runs no code. Files that are missing or cut short are found before
anything is loaded; a bit that a disk flipped is not.
"""

import enum
import io
import json
import os
import pathlib
import pickle
import shutil
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import changes_since
from grpo.folder.run_folder import CHECKPOINTS, PARTIAL, check_run_folder, read_marker, step_folders, step_of
from grpo.roles.process_groups import make_savers_group
from grpo.watch.failures import BadInput

DRIVER_FILE = "driver.pt"
METADATA_FILE = ".metadata"
# What torch's description of a checkpoint is made of: passive classes, mostly those of one module, and dtypes
_CLASSES = [value for value in vars(metadata).values() if getattr(value, "__module__", "") == metadata.__name__]
_CLASSES += [pathlib.PosixPath, torch.Size, torch.serialization._get_layout, filesystem._StorageInfo]
ALLOWED = {(value.__module__, value.__qualname__): value for value in _CLASSES}
ALLOWED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Python before 3.11.4 writes the member of an enum as getattr(kind, name); this gives members, and no other attribute
ALLOWED["builtins", "getattr"] = enum.EnumMeta.__getitem__
# What unpickling raises for bytes that are no pickle
MALFORMED = (pickle.UnpicklingError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError)
MALFORMED += (OverflowError, MemoryError, RecursionError)


# ---- How a run begins in its folder


def open_run_folder(
    config: GRPOConfig | SFTConfig, script: str, inputs: Iterable[str]
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """The newest checkpoint and the driver's state in it, if the run is to be resumed and has one. Changes nothing.

    inputs: paths and hub names that the run reads. Groups in flight are not for another config, so that they are left
    out. Raises ValueError if the folder is not for this run (see `check_run_folder`), if that checkpoint cannot be
    used, or if the run would go on as another one.
    """
    check_run_folder(config.run_dir, script, inputs, resume=config.resume, overwrite=config.overwrite)
    checkpoint, state = newest_checkpoint(config.run_dir) if config.resume else (None, {})
    if checkpoint is not None and not is_same_run(config) and (flight := state.pop("flight", {})):
        print(f"{len(flight['counts'])} groups in flight are left out: they are of the old config", flush=True)
    return checkpoint, state


def is_same_run(config: GRPOConfig | SFTConfig) -> bool:
    """Whether the run goes on as it began; prints each field that differs from the config of the run that is resumed.

    That is what `run.json` says, which is data; its config.py is not run. Raises ValueError, unless `allow_changes` is
    set, if the result depends on one of them.
    """
    told = changes_since(read_marker(config.run_dir)["config"], config)
    refused = [text for text, breaks_exactness in told.items() if breaks_exactness]
    if refused and not config.allow_changes:
        raise ValueError(
            f"{config.run_dir} would not go on as the run that it is: {'; '.join(refused)}. Resume with the old "
            "values, take --allow-changes if the change is meant, or start a new run in another --run-dir"
        )
    if told:
        print("\n  ".join(["resumed with another config than before", *told]), flush=True)
    return not refused


# ---- Which checkpoints there are


def newest_checkpoint(run_dir: str) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """The newest checkpoint and the driver's state in it; None and an empty state if the run has none.

    Raises ValueError, with the way to the one before, if its files are not whole.
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
    """The driver's state in a checkpoint. Raises ValueError that names the file if one is missing or cut short."""
    state, ends = _read_driver_state(checkpoint), {}
    for place in SafeReader(checkpoint).read_metadata().storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        shard = checkpoint / name
        if shard.parent != checkpoint or not shard.is_file():
            raise ValueError(f"{shard} is missing, which {METADATA_FILE} names")
        if shard.stat().st_size < end:
            raise ValueError(f"{shard} has {shard.stat().st_size} bytes, and a piece of it ends at {end}")
    return state


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """The checkpoint with the highest `eval/<metric>` after its step, the newest of equal ones; None without any."""
    return _best_of(step_folders(run_dir), _held_out_values(run_dir, metric))


def _held_out_values(run_dir: str | pathlib.Path, metric: str) -> dict[int, float]:
    """The metric by step."""
    values = {}
    with open(pathlib.Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for record in map(json.loads, file):
            if (value := record.get(f"eval/{metric.removeprefix('eval/')}")) is not None:
                values[record["step"]] = value
    return values


def _best_of(folders: list[pathlib.Path], values: dict[int, float]) -> pathlib.Path | None:
    evaluated = {folder: values[step_of(folder)] for folder in folders if step_of(folder) in values}
    return max(reversed(evaluated), key=evaluated.get, default=None)


# ---- Saving


class CheckpointSaver:
    """Saves checkpoints, one at a time, on every trainer rank. Training goes on while a thread writes.

    The thread has a process group of its own, so its collectives do not meet those of training. The copy of what is
    saved stays in the host's memory for the next save; on a GPU's host it is pinned.
    """

    def __init__(self, config: GRPOConfig | SFTConfig):
        """Collective over the trainer ranks."""
        self.config = config
        self.group = make_savers_group(config.deadline_minutes)
        on_gpu = torch.cuda.is_available()
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,  # the next update would change what is copied
                use_non_blocking_copy=on_gpu,
            )
        )
        self.step = 0
        self.writing: Future | None = None

    def save(self, step: int, trained: Stateful, driver_state: dict[str, Any] | None) -> None:
        """Begin to write the checkpoint of `step`, when the one before is written.

        When it is complete, all but the `keep` newest and the best by `keep_best` are deleted. `trained` is anything
        with a state_dict; `driver_state`, of plain values and tensors, is wanted on rank 0 alone. Collective over the
        trainer ranks. Raises what `finish` raises.
        """
        self.finish()
        self.step = step
        state = trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}
        self.writing = dcp.async_save(
            state,
            storage_writer=_Writer(self.config, step, driver_state),
            process_group=self.group,
            async_stager=self.stager,
        )

    def raise_failure(self) -> None:
        """Raise what `finish` raises if that is known. Returns at once."""
        if self.writing is not None and self.writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written, if one is being written. Not collective.

        If its files cannot be written, nothing of them is left, older checkpoints stay, and every rank raises BadInput.
        """
        writing, self.writing = self.writing, None
        try:
            if writing is not None:
                writing.result()
        except dcp.api.CheckpointException as error:  # the same on every rank
            partial = _partial_folder(self.config.run_dir, self.step)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            cause = _cause(error)
            if not isinstance(cause, OSError | RuntimeError):  # torch's writer has both for a full disk
                raise cause from error
            free = shutil.disk_usage(self.config.run_dir).free
            raise BadInput(
                f"the checkpoint of step {self.step} could not be saved in {partial.parent}: {cause}; without it "
                f"{free / 2**30:.2f} GiB are free, and older checkpoints stay. Make room and continue with --resume"
            ) from cause


class _Writer(dcp.FileSystemWriter):
    """Writes one checkpoint under another name, and makes it complete."""

    def __init__(self, config: GRPOConfig | SFTConfig, step: int, driver_state: dict[str, Any] | None):
        super().__init__(_partial_folder(config.run_dir, step))
        self.config = config
        self.driver_file = io.BytesIO()
        torch.save(driver_state, self.driver_file)  # now: the driver goes on
        best = config.checkpoint.keep_best
        self.held_out_values = _held_out_values(config.run_dir, best) if best and driver_state else {}

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """On rank 0, when all ranks have written: give the folder its name, and delete those that are not kept."""
        super().finish(metadata, results)
        partial = pathlib.Path(self.path)
        (partial / DRIVER_FILE).write_bytes(self.driver_file.getbuffer())
        _bring_to_disk(partial / DRIVER_FILE)
        _bring_to_disk(partial)
        partial.rename(partial.with_suffix(""))  # in one step: a crash before it leaves the older ones as they are
        _bring_to_disk(partial.parent)
        best = _best_of(step_folders(self.config.run_dir), self.held_out_values)
        for old in step_folders(self.config.run_dir)[: -self.config.checkpoint.keep]:
            if old != best:
                shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))  # killed meanwhile, it is not half a checkpoint


def _partial_folder(run_dir: str, step: int) -> pathlib.Path:
    return (pathlib.Path(run_dir) / CHECKPOINTS / f"step-{step:08d}").with_suffix(PARTIAL)


def _bring_to_disk(path: pathlib.Path) -> None:
    """Wait until a file's content, or the names in a folder, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: dcp.api.CheckpointException) -> BaseException:
    """What went wrong first on the lowest rank on which anything did; torch's own text is the tracebacks of all."""
    cause, _ = error.failures[min(error.failures)]
    while below := cause.__cause__ or cause.__context__:
        cause = below
    return cause


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


# ---- Loading


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


def _load(state: dict[str, Any], checkpoint: pathlib.Path) -> None:
    """Fill in the state's tensors and values. Raises BadInput with the one cause, if there was one on any rank."""
    try:
        dcp.load(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner())
    except dcp.api.CheckpointException as error:
        cause = _cause(error)
        raise BadInput(f"{checkpoint} cannot be loaded: {_in_one_line(cause)}") from cause


def _read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Step, place in the data and whatever else the driver gave. Raises ValueError if the file is not as it was."""
    path = checkpoint / DRIVER_FILE
    content = content_of(path)
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except (RuntimeError, *MALFORMED) as error:
        raise ValueError(f"{path} cannot be read: {_in_one_line(error)}") from error
    if not isinstance(state, dict) or state.get("step") != step_of(checkpoint):
        raise ValueError(f"{path} is not of step {step_of(checkpoint)}")
    return state


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# ---- Reading without running anything that is in it


def content_of(path: pathlib.Path) -> bytes:
    """The bytes of a regular file; a pipe under its name would not end. Raises ValueError if there is none."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return path.read_bytes()


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint whose metadata, which torch would unpickle whatever it is, may hold only what is ALLOWED."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """torch's description of the checkpoint. Raises ValueError if it cannot be read or would run code."""
        path = self.path / METADATA_FILE
        try:
            read = _MetadataUnpickler(io.BytesIO(content_of(path))).load()
        except MALFORMED as error:
            raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error
        if not isinstance(read, dcp.Metadata) or not read.storage_data:
            raise ValueError(f"{path} describes no checkpoint")
        read.storage_meta = read.storage_meta or metadata.StorageMeta()
        read.storage_meta.load_id = self.load_id
        return read


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has; nothing of it was run")
        return ALLOWED[module, name]


class SafePlanner(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors with `weights_only`, which torch's own planner does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # it puts the value in its place, from bytes that are ours
