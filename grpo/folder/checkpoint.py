"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

torch.distributed.checkpoint holds the sharded model, optimizer and schedule and the random states of each rank, so a
run may resume on another number of trainer ranks. What the driver needs (step, config, place in the data, groups in
flight) is in `driver.pt`, length and checksum of each file in `files.json`, which is written last; then the folder gets
its name. A save copies everything to the host's memory, and a thread writes the copy while training goes on. Reading
runs no code. What is missing or cut short is found by rank 0 at the start, a damaged shard when the trainers load it.
"""

import contextlib
import enum
import io
import json
import os
import pathlib
import pickle
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config.fields import CheckpointConfig
from grpo.folder.run_folder import (
    CHECKPOINTS,
    PARTIAL,
    read_marker,
    read_metrics,
    step_folders,
    step_of,
)
from grpo.roles.process_groups import make_savers_group
from grpo.text import naming, reason_of
from grpo.watch.failures import BadInput

DRIVER_FILE = "driver.pt"
METADATA_FILE = ".metadata"
FILES_FILE = "files.json"  # of each other file: its bytes, and its CRC-32
CHECKED_BYTES = 16 << 20  # of a file at once
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
        raise ValueError(unusable(newest, error)) from error


def unusable(checkpoint: pathlib.Path, reason: object) -> str:
    """Write why a checkpoint cannot be used, and how the run goes on without it."""
    earlier = [folder for folder in step_folders(checkpoint.parents[1]) if step_of(folder) < step_of(checkpoint)]
    then = f"continue after step {step_of(earlier[-1])}" if earlier else "start again"
    return f"the checkpoint of step {step_of(checkpoint)} cannot be used: {reason}; remove {checkpoint} to {then}"


def check_checkpoint(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return the driver's state in a checkpoint. Raises ValueError with a file's name if it is missing or cut short.

    Shards are compared with their checksums when they are loaded, the other files here.
    """
    for name, (num_bytes, _) in files_of(checkpoint).items():
        path = checkpoint / name
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        if path.stat().st_size != num_bytes:
            raise Damaged(f"{path} has {path.stat().st_size} bytes, in {FILES_FILE} {num_bytes}")
    check_file(checkpoint, METADATA_FILE)
    check_file(checkpoint, DRIVER_FILE)
    path = checkpoint / DRIVER_FILE
    try:
        state = torch.load(path, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(state, dict) or state.get("step") != step_of(checkpoint):
        raise ValueError(f"{path} is not of step {step_of(checkpoint)}")
    return state


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """Return the checkpoint with the highest `eval/<metric>`, the newest of equals; None if none has it."""
    name = f"eval/{metric.removeprefix('eval/')}"
    values = {record["step"]: record[name] for record in read_metrics(run_dir) if record.get(name) is not None}
    measured = [folder for folder in step_folders(run_dir) if step_of(folder) in values]
    return max(reversed(measured), key=lambda folder: values[step_of(folder)], default=None)


# ---- Saving


class CheckpointSaver:
    """Saves checkpoints, one at a time, on every trainer rank. Training goes on while a thread writes.

    The thread has a process group of its own, so its collectives do not meet those of training. The copy of what is
    saved stays in the host's memory for the next save; on a GPU's host it is pinned, which takes 0.3 s a GiB once.
    """

    def __init__(
        self,
        run_dir: str,
        config: CheckpointConfig,
        deadline_minutes: float,
    ):
        """Collective over the trainer ranks. Raises BadInput if some do not see the run folder that rank 0 opened."""
        self.run_dir = run_dir
        self.config = config
        self.group = make_savers_group(deadline_minutes)
        _check_shared(run_dir, self.group)
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

    def make_room(self, trained: Stateful) -> None:
        """Take the host's memory for copies of `trained`, so that the first save finds it. Collective as `save` is."""
        self.stager.stage(trained.state_dict())

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
            storage_writer=_Writer(self.run_dir, self.config, step, driver_state),
            process_group=self.group,
            async_stager=self.stager,
        )

    def raise_failure(self) -> None:
        """Raise what `finish` raises, if the thread has ended already. Returns at once."""
        if self.writing is not None and self.writing.done():
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
            partial = _partial_folder(self.run_dir, self.step)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            cause = _cause(error)
            if not isinstance(cause, OSError):
                raise cause from error
            free_gib = shutil.disk_usage(self.run_dir).free / 2**30
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


class _SummedFile(io.BufferedWriter):
    """A file that is written from its beginning to its end, its bytes and its checksum."""

    num_bytes = 0
    checksum = 0
    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write and sum up."""
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.num_bytes += count
        self.checksum = zlib.crc32(data, self.checksum)
        return count


class _SummedFiles(filesystem.FileSystem):
    """The files that this rank writes: their bytes and checksums by name."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        """Open a file to write it. Raises OSError with its path if it cannot be written, as on a full disk."""
        with naming(path), _SummedFile(io.FileIO(path, mode)) as file:
            try:
                yield file
            except RuntimeError as error:  # torch's writer goes on behind a full disk, and then its counts differ
                raise (file.failure or error) from None
        name = pathlib.Path(path).name.removesuffix(".tmp")  # of .metadata, which then gets its name
        self.written[name] = (file.num_bytes, file.checksum)


class _Writer(dcp.FileSystemWriter):
    """Writes one checkpoint under a temporary name, and renames it when it is complete."""

    def __init__(
        self,
        run_dir: str,
        config: CheckpointConfig,
        step: int,
        driver_state: dict[str, Any] | None,
    ):
        # All lies in the host's memory. With a number above 0 torch's thread would wait, again and again, for what
        # GPU 0 computes, and take memory there, whichever GPU this rank has.
        super().__init__(_partial_folder(run_dir, step), per_thread_copy_ahead=0)
        self.fs = _SummedFiles()
        self.run_dir = run_dir
        self.config = config
        self.driver_file = io.BytesIO()
        torch.save(driver_state, self.driver_file)  # now: the driver goes on

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """Write this rank's shard. The result, which rank 0 gets from all ranks, has its checksum too."""
        pieces = super().write_data(plan, planner)
        result = torch.futures.Future()
        result.set_result((pieces.value(), self.fs.written))
        return result

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """Give the folder its name after all ranks have written, and delete what is not kept. On rank 0."""
        super().finish(metadata, [pieces for pieces, _ in results])
        partial = pathlib.Path(self.path)
        self._write(DRIVER_FILE, self.driver_file.getbuffer())
        files = self.fs.written
        for _, of_rank in results:
            files |= of_rank
        self._write(FILES_FILE, json.dumps(files).encode())
        _bring_to_disk(partial)
        partial.rename(partial.with_suffix(""))  # atomic: a crash before it leaves the older ones as they are
        _bring_to_disk(partial.parent)
        best = None
        if self.config.keep_best:
            best = best_checkpoint(self.run_dir, self.config.keep_best)
        for old in step_folders(self.run_dir)[: -self.config.keep]:
            if old != best:
                _delete(old)

    def _write(self, name: str, content: bytes | memoryview) -> None:
        with self.fs.create_stream(pathlib.Path(self.path) / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


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
        if isinstance(cause, Damaged):
            raise BadInput(unusable(checkpoint, cause)) from cause
        raise BadInput(
            f"{checkpoint} cannot be loaded: {reason_of(cause)}. If it lacks something, another version of PlainRL or "
            "another config saved it: resume with those, which run.json has"
        ) from cause


# ---- Reading without running anything that is in it


class Damaged(ValueError):
    """A file of a checkpoint is not as it was written."""


def files_of(checkpoint: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return bytes and checksum of each file of a checkpoint, by its name. Raises Damaged if that is not known."""
    path = checkpoint / FILES_FILE
    if not path.is_file():  # reading a pipe of this name would not end
        raise Damaged(f"{path} is missing")
    try:
        return {name: (num_bytes, checksum) for name, (num_bytes, checksum) in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {reason_of(error)}") from error


def check_file(checkpoint: pathlib.Path, name: str) -> None:
    """Raise Damaged if a file of a checkpoint has not the checksum that it was written with."""
    path = checkpoint / name
    _, written = files_of(checkpoint).get(name, (0, None))
    if written is None or not path.is_file():
        raise Damaged(f"{path} is missing")
    checksum = 0
    with open(path, "rb") as file:
        while content := file.read(CHECKED_BYTES):
            checksum = zlib.crc32(content, checksum)
    if checksum != written:
        raise Damaged(f"{path} is damaged: its CRC-32 is {checksum}, in {FILES_FILE} {written}")


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint, and refuses metadata that holds more than is ALLOWED; torch would unpickle anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return torch's description of the checkpoint. Raises ValueError if it is damaged or would run code."""
        path = self.path / METADATA_FILE
        check_file(self.path, METADATA_FILE)
        try:
            description = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, ValueError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        description.storage_meta = description.storage_meta or metadata.StorageMeta()
        description.storage_meta.load_id = self.load_id
        return description

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Compare this rank's share of the shards with their checksums before anything is loaded."""
        shards = {piece.relative_path for piece in self.storage_data.values()}
        for name in sorted(shards)[dist.get_rank() :: dist.get_world_size()]:
            check_file(self.path, name)
        return super().prepare_local_plan(plan)


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
