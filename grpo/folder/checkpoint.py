"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

torch.distributed.checkpoint holds the sharded model, optimizer and schedule and the random states of each rank, so a
run may resume on another number of trainer ranks. What the driver needs (step, config, place in the data, groups in
flight) is in `driver.pt`, which is written last; then the folder gets its name. A save copies everything to the host's
memory, and a thread writes the copy while training goes on. Reading runs no code. Files that are missing or cut short
are found before anything is loaded; a bit that a disk flipped is not.
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

from grpo.config.fields import Config
from grpo.config.recipes import changes_since
from grpo.folder.run_folder import CHECKPOINTS, PARTIAL, check_run_folder, read_marker, step_folders, step_of
from grpo.roles.process_groups import make_savers_group
from grpo.text import reason_of
from grpo.watch.failures import FULL_DISK, BadInput

DRIVER_FILE = "driver.pt"
METADATA_FILE = ".metadata"
SAVED_CONFIG = "config"  # in the driver's state: the `written_fields` of the run
# All that torch's description of a checkpoint may contain: passive classes, mostly of one module, and dtypes
_CLASSES = [
    pathlib.PosixPath,
    torch.Size,
    torch.serialization._get_layout,
    filesystem._StorageInfo,
]
for _value in vars(metadata).values():
    if getattr(_value, "__module__", "") == metadata.__name__:
        _CLASSES.append(_value)
ALLOWED = {(value.__module__, value.__qualname__): value for value in _CLASSES}
for _name, _value in vars(torch).items():
    if isinstance(_value, torch.dtype):
        ALLOWED["torch", _name] = _value
# Python before 3.11.4 writes the member of an enum as getattr(kind, name). This returns members and no other attribute.
ALLOWED["builtins", "getattr"] = enum.EnumMeta.__getitem__
# What unpickling raises for bytes that are not a pickle
MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
)


# ---- How a run begins in its folder


def open_run_folder(
    config: Config,
    script: str,
    inputs: Iterable[str],
) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """Return the newest checkpoint and the driver's state in it, if the run resumes from one. Changes nothing.

    inputs: paths and hub names that the run reads. If the config has changed, groups in flight are left out, because
    they belong to the old one. Raises ValueError if the folder is not for this run (see `check_run_folder`), if the
    checkpoint cannot be used, or if the result would not be that of the run which is resumed.
    """
    check_run_folder(config, script, inputs)
    if not config.resume:
        return None, {}
    checkpoint, state = newest_checkpoint(config.run_dir)
    if checkpoint is None:
        return None, {}
    if step_of(checkpoint) > config.num_steps:
        raise ValueError(
            f"{checkpoint} is beyond num_steps={config.num_steps}; --num-steps {step_of(checkpoint)} exports what it "
            "has, and a larger number trains it further; remove its folder to go back to the one before"
        )
    # not run.json's first: what ran last may have ended before it saved; older checkpoints do not say their config
    old_config = state.get(SAVED_CONFIG) or read_marker(config.run_dir)["config"]
    if not is_same_run(config, old_config):
        groups = state.get("flight")
        if groups:
            state["flight"] = None
            num_groups = len(groups.get("counts", ()))
            if num_groups:
                print(f"{num_groups} groups in flight are left out: they are of the old config")
    return checkpoint, state


def is_same_run(config: Config, old_config: dict[str, str]) -> bool:
    """Return whether the result is that of the run which is resumed, and print each field of the config that differs.

    old_config: its `written_fields`. Raises ValueError if the result depends on a field that differs, unless
    `allow_changes` is set.
    """
    changes = changes_since(old_config, config)
    refused = [text for text, breaks_exactness in changes.items() if breaks_exactness]
    if refused and not config.allow_changes:
        raise ValueError(
            f"{config.run_dir} would not go on as the run that it is: {'; '.join(refused)}. Resume with the old "
            "values, take --allow-changes if the change is meant, or start a new run in another --run-dir"
        )
    if changes:
        lines = ["resumed with another config than before", *changes]
        print("\n  ".join(lines))
    return not refused


# ---- Which checkpoints there are


def newest_checkpoint(run_dir: str) -> tuple[pathlib.Path | None, dict[str, Any]]:
    """Return the newest checkpoint and the driver's state in it, or None and an empty state if the run has none.

    Raises ValueError if its files are not whole, with the way to the checkpoint before.
    """
    folders = step_folders(run_dir)
    if not folders:
        return None, {}
    newest = folders[-1]
    try:
        return newest, check_checkpoint(newest)
    except ValueError as error:
        then = "start again"
        if len(folders) > 1:
            then = f"continue after step {step_of(folders[-2])}"
        raise ValueError(
            f"the checkpoint of step {step_of(newest)} cannot be used: {error}; remove {newest} to {then}"
        ) from error


def check_checkpoint(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return the driver's state in a checkpoint. Raises ValueError with a file's name if it is missing or cut short."""
    state = _read_driver_state(checkpoint)
    description = SafeReader(checkpoint).read_metadata()
    for piece in description.storage_data.values():
        shard = checkpoint / piece.relative_path
        if shard.parent != checkpoint or not shard.is_file():
            raise ValueError(f"{shard} is missing, which {METADATA_FILE} names")
        size = shard.stat().st_size
        end = piece.offset + piece.length
        if size < end:
            raise ValueError(f"{shard} has {size} bytes, and a piece of it ends at {end}")
    return state


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """Return the checkpoint with the highest `eval/<metric>`, the newest of equals; None if none has it."""
    name = f"eval/{metric.removeprefix('eval/')}"
    values = {}
    with open(pathlib.Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):  # it is being written, or was when its run died
                break
            record = json.loads(line)
            if record.get(name) is not None:
                values[record["step"]] = record[name]
    measured = [folder for folder in step_folders(run_dir) if step_of(folder) in values]
    ranked = sorted(measured, key=lambda folder: values[step_of(folder)])
    return ranked[-1] if ranked else None


# ---- Saving


class CheckpointSaver:
    """Saves checkpoints, one at a time, on every trainer rank. Training goes on while a thread writes.

    The thread has a process group of its own, so its collectives do not meet those of training. The copy of what is
    saved stays in the host's memory for the next save; on a GPU's host it is pinned.
    """

    def __init__(self, config: Config):
        """Collective over the trainer ranks. Raises BadInput if some do not see the run folder that rank 0 opened."""
        self.config = config
        self.group = make_savers_group(config.deadline_minutes)
        _check_shared(config.run_dir, self.group)
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,  # the next update would change what is copied
            use_non_blocking_copy=on_gpu,
        )
        self.stager = DefaultStager(options)
        self.step = 0
        self.writing: Future | None = None

    def save(self, step: int, trained: Stateful, driver_state: dict[str, Any] | None) -> None:
        """Begin to write the checkpoint of `step`, after the one before is written.

        When it is complete, all except the `keep` newest and the best by `keep_best` are deleted. `trained` is anything
        with a state_dict. `driver_state` consists of plain values and tensors, and is None except on rank 0. Collective
        over the trainer ranks. Raises what `finish` raises.
        """
        self.finish()
        self.step = step
        state = trained.state_dict()
        state["random"] = {str(dist.get_rank()): _random_state()}
        self.writing = dcp.async_save(
            state,
            storage_writer=_Writer(self.config, step, driver_state),
            process_group=self.group,
            async_stager=self.stager,
        )

    def raise_failure(self) -> None:
        """Raise what `finish` raises, if the thread has ended already. Returns at once."""
        if self.writing is not None and self.writing.done():
            self.finish()

    def explain(self, failure: BaseException) -> None:
        """Raise what `finish` raises if `failure` is a full disk: the checkpoint that is being written filled it."""
        if any(sign in str(failure) for sign in FULL_DISK):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written, if one is being written. Not collective.

        If its files cannot be written, they are deleted, older checkpoints stay, and every rank raises BadInput.
        """
        if self.writing is None:
            return
        writing = self.writing
        self.writing = None
        try:
            writing.result()
        except dcp.api.CheckpointException as error:  # the same on every rank
            partial = _partial_folder(self.config.run_dir, self.step)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            cause = _cause(error)
            if not isinstance(cause, OSError | RuntimeError):  # torch's writer raises either one for a full disk
                raise cause from error
            free_gib = shutil.disk_usage(self.config.run_dir).free / 2**30
            raise BadInput(
                f"the checkpoint of step {self.step} could not be saved in {partial.parent}: {cause}; without it "
                f"{free_gib:.2f} GiB are free, and older checkpoints stay. Make room and continue with --resume"
            ) from cause


def _check_shared(run_dir: str, group: dist.ProcessGroup) -> None:
    """Raise BadInput on all ranks if some do not see `run.json`: their parts of a checkpoint would lie elsewhere."""
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return
    num_blind = torch.tensor(int(read_marker(run_dir) is None))
    dist.all_reduce(num_blind, group=group)
    if num_blind:
        raise BadInput(
            f"{num_blind} of {num_ranks} trainer ranks do not see {pathlib.Path(run_dir).absolute()}, which rank 0 has "
            "opened, so no checkpoint could be whole; name a --run-dir on a file system that all nodes see"
        )


class _Writer(dcp.FileSystemWriter):
    """Writes one checkpoint under a temporary name, and renames it when it is complete."""

    def __init__(
        self,
        config: Config,
        step: int,
        driver_state: dict[str, Any] | None,
    ):
        # All lies in the host's memory. With a number above 0 torch's thread would wait, again and again, for what
        # GPU 0 computes, and take memory there, whichever GPU this rank has.
        super().__init__(_partial_folder(config.run_dir, step), per_thread_copy_ahead=0)
        self.config = config
        self.driver_file = io.BytesIO()
        torch.save(driver_state, self.driver_file)  # now: the driver goes on

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """Give the folder its name after all ranks have written, and delete what is not kept. On rank 0."""
        super().finish(metadata, results)
        partial = pathlib.Path(self.path)
        (partial / DRIVER_FILE).write_bytes(self.driver_file.getbuffer())
        _bring_to_disk(partial / DRIVER_FILE)
        _bring_to_disk(partial)
        partial.rename(partial.with_suffix(""))  # atomic: a crash before it leaves the older ones as they are
        _bring_to_disk(partial.parent)
        options = self.config.checkpoint
        best = None
        if options.keep_best:
            best = best_checkpoint(self.config.run_dir, options.keep_best)
        for old in step_folders(self.config.run_dir)[: -options.keep]:
            if old != best:
                _delete(old)


def _delete(checkpoint: pathlib.Path) -> None:
    """Delete an old checkpoint, or warn: NFS keeps files that another process reads, and the new one is saved."""
    try:
        partial = checkpoint.rename(checkpoint.with_suffix(PARTIAL))  # a kill meanwhile leaves no half checkpoint
        shutil.rmtree(partial)
    except OSError as error:
        print(f"warning: {checkpoint} could not be deleted ({error.strerror}); remove what is left of it", flush=True)


def _partial_folder(run_dir: str, step: int) -> pathlib.Path:
    return pathlib.Path(run_dir) / CHECKPOINTS / f"step-{step:08d}{PARTIAL}"


def _bring_to_disk(path: pathlib.Path) -> None:
    """Wait until a file's content, or the names in a folder, would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: dcp.api.CheckpointException) -> BaseException:
    """Return the first exception on the lowest rank that failed. torch's own text has the tracebacks of all ranks."""
    cause, _ = error.failures[min(error.failures)]
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__
    return cause


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


# ---- Loading


def load_checkpoint(checkpoint: pathlib.Path, trained: Stateful) -> None:
    """Restore model, optimizer, schedule and random states. Collective over the trainer ranks.

    Raises BadInput if the pieces cannot be read, would run code or do not fit what is trained.
    """
    state = trained.state_dict()
    rank = str(dist.get_rank())
    saved = SafeReader(checkpoint).read_metadata().state_dict_metadata
    # absent if fewer ranks saved than resume, or if they had another kind of device
    random = {kind: value for kind, value in _random_state().items() if f"random.{rank}.{kind}" in saved}
    if random:
        state["random"] = {rank: random}
    _load(state, checkpoint)
    trained.load_state_dict(state)
    if random:
        random = state["random"][rank]
        torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])


def load_model(checkpoint: pathlib.Path, model: Stateful) -> None:
    """Load only the weights, into a sharded model. Collective over the ranks that hold it, whose number may differ."""
    state = {"model": model.state_dict()}
    _load(state, checkpoint)
    model.load_state_dict(state["model"])


def _load(state: dict[str, Any], checkpoint: pathlib.Path) -> None:
    """Fill in the state's tensors and values. Raises BadInput with the first cause if any rank failed."""
    try:
        dcp.load(state, storage_reader=SafeReader(checkpoint), planner=SafePlanner())
    except dcp.api.CheckpointException as error:
        cause = _cause(error)
        raise BadInput(
            f"{checkpoint} cannot be loaded: {reason_of(cause)}. If it lacks something, another version of PlainRL or "
            "another config saved it: resume with those, which run.json has"
        ) from cause


def _read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Read step, place in the data and the rest of the driver's state. Raises ValueError if the file is damaged."""
    path = checkpoint / DRIVER_FILE
    content = io.BytesIO(content_of(path))
    try:
        state = torch.load(content, weights_only=True)
    except (RuntimeError, *MALFORMED) as error:
        raise ValueError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(state, dict) or state.get("step") != step_of(checkpoint):
        raise ValueError(f"{path} is not of step {step_of(checkpoint)}")
    return state


# ---- Reading without running anything that is in it


def content_of(path: pathlib.Path) -> bytes:
    """Read a regular file. Raises ValueError if there is none; reading a pipe of this name would not end."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return path.read_bytes()


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint, and refuses metadata that holds more than is ALLOWED; torch would unpickle anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return torch's description of the checkpoint. Raises ValueError if it cannot be read or would run code."""
        path = self.path / METADATA_FILE
        try:
            description = _MetadataUnpickler(io.BytesIO(content_of(path))).load()
        except MALFORMED as error:
            raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error
        if not isinstance(description, dcp.Metadata) or not description.storage_data:
            raise ValueError(f"{path} describes no checkpoint")
        description.storage_meta = description.storage_meta or metadata.StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class that is ALLOWED, and refuse others before they are imported."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has; nothing of it was run")
        return ALLOWED[module, name]


class SafePlanner(dcp.DefaultLoadPlanner):
    """Reads values that are not tensors with `weights_only`, which torch's own planner does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value safely, and let torch put it in its place from bytes that we wrote."""
        plain = io.BytesIO()
        loaded = torch.load(value, weights_only=True)
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
