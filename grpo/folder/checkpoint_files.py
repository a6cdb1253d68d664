"""The files of a checkpoint as data: read without running anything, checked before anything is loaded.

A folder `step-N` has `.metadata` (torch's: which piece of which tensor lies where), `__RANK_*.distcp` (the pieces) and
`driver.json`, written last; with tensors of the driver's also `driver.safetensors`. torch writes a CRC-32 with every
piece and never reads it; `check_checkpoint` does. driver.json holds the CRC-32 of the other files, and its own. Left
out: whether the pieces fit the model of a run, which loading finds out.
"""

import errno
import io
import json
import os
import pathlib
import pickle
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from grpo.folder.run_folder import step_of

DRIVER_FILE = "driver.json"
DRIVER_TENSORS_FILE = "driver.safetensors"
METADATA_FILE = ".metadata"
CHECK_THREADS = 8  # a CRC-32 needs no interpreter lock; disks are faster with several readers
# What the metadata of a checkpoint is made of, besides torch's dtypes: module and name
METADATA_CLASSES = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
} | {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}


# What unpickling raises for a file that is no pickle any more
MALFORMED = (pickle.UnpicklingError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError)
MALFORMED += (OverflowError, MemoryError)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_driver_state(
    checkpoint: pathlib.Path, state: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the driver's tensors, if it has any, and driver.json; bring them and the folder's names to disk.

    driver.json gets checksums of the metadata, the tensors' file and itself.
    """
    state = state | {"metadata_crc32": zlib.crc32((checkpoint / METADATA_FILE).read_bytes())}
    if tensors:
        content = save(tensors)
        _write(checkpoint / DRIVER_TENSORS_FILE, content)
        state["tensors_crc32"] = zlib.crc32(content)
    _write(checkpoint / DRIVER_FILE, json.dumps(state | {"crc32": _crc32_of(state)}).encode())
    sync_folder(checkpoint)


def _write(path: pathlib.Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Bring the names in a folder to disk, where a renamed file may otherwise be missing after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Step and data position of a checkpoint, without the checksums.

    Raises ValueError if the file is missing, does not have them or is not as it was written.
    """
    path = checkpoint / DRIVER_FILE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, so the checkpoint was never completed") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(state, dict) or type(state.get("step")) is not int or not isinstance(state.get("data"), dict):
        raise ValueError(f"{path} has no step and place in the data")
    has_checksums = {"crc32", "metadata_crc32"} & state.keys()  # those of an older version have none
    if has_checksums and state.pop("crc32", None) != _crc32_of(state):
        raise ValueError(f"{path} is damaged: it does not have the checksum that it names")
    if state["step"] != step_of(checkpoint):
        raise ValueError(f"{path} is of step {state['step']}, in a folder of step {step_of(checkpoint)}")
    return state


def check_checkpoint(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Look at every tensor and value of a checkpoint; returns the driver's state.

    All files that the metadata names must be there, and hold its pieces within their sizes, each with the checksum that
    it was written with; ValueError says which file is not so, and why. Reads the whole checkpoint: about as long as the
    disk takes. What may pass is a bit of a zip archive's bookkeeping, which `load_checkpoint` then stumbles over or
    does not need.
    """
    state = read_driver_state(checkpoint)
    path = checkpoint / METADATA_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    if zlib.crc32(content) != state.pop("metadata_crc32", zlib.crc32(content)):  # absent: of an older version
        raise ValueError(f"{path} is damaged: its checksum is not the one in {DRIVER_FILE}")
    if "tensors_crc32" in state:
        _check_driver_tensors(checkpoint / DRIVER_TENSORS_FILE, state.pop("tensors_crc32"))
    pieces = _pieces(checkpoint)
    sizes: dict[str, int] = {}
    for name in {name for name, _, _ in pieces}:
        shard = checkpoint / name
        if pathlib.PurePath(name).name != name or not shard.is_file():
            raise ValueError(f"{shard} is missing, which {METADATA_FILE} names")
        sizes[name] = shard.stat().st_size
    for name, offset, length in pieces:
        if not 0 <= offset <= offset + length <= sizes[name]:
            raise ValueError(
                f"{checkpoint / name} has {sizes[name]} bytes, and a piece of it ends at {offset + length}"
            )
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        for check in [pool.submit(_check_piece, checkpoint / name, *place) for name, *place in pieces]:
            check.result()
    return state


def read_driver_tensors(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors beside the driver's state. Raises ValueError if they cannot be read."""
    path = checkpoint / DRIVER_TENSORS_FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove this checkpoint to resume from the one before"
        ) from error


def innermost_cause(error: dcp.api.CheckpointException) -> BaseException:
    """What went wrong, of all that went wrong on any rank: no room before anything else, then the lowest rank's.

    torch raises the same exception on every rank, with the tracebacks of all of them as its text.
    """
    causes = [_chain(cause)[-1] for _, (cause, _) in sorted(error.failures.items())]
    return next((cause for cause in causes if is_no_room(cause)), causes[0])


def is_no_room(error: BaseException) -> bool:
    """Whether a disk, a quota or the largest size of a file was exhausted."""
    return isinstance(error, OSError) and error.errno in NO_ROOM


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, and those because of which it was raised."""
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(below)
    return chain


def _crc32_of(state: dict[str, Any]) -> int:
    """Of its text, which JSON gives back in the same order; numbers that are keys would be sorted otherwise as text."""
    return zlib.crc32(json.dumps(state).encode())


def _check_driver_tensors(path: pathlib.Path, crc32: int) -> None:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, which {DRIVER_FILE} names") from error
    if zlib.crc32(content) != crc32:
        raise ValueError(f"{path} is damaged: its checksum is not the one in {DRIVER_FILE}")


def _pieces(checkpoint: pathlib.Path) -> list[tuple[str, int, int]]:
    """File, offset and length of each piece, by the metadata. Raises ValueError if it cannot be read."""
    try:
        storage = PlainReader(checkpoint).read_metadata().storage_data.values()
        return [(str(place.relative_path), int(place.offset), int(place.length)) for place in storage]
    except MALFORMED as error:
        path = checkpoint / METADATA_FILE
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def _check_piece(shard: pathlib.Path, offset: int, length: int) -> None:
    """Compare a piece, a zip archive within the file, with the checksums in it."""
    damaged = f"{shard} is damaged between bytes {offset} and {offset + length}"
    try:
        with zipfile.ZipFile(_Part(shard, offset, length)) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"{damaged}: {error}") from error
    if broken is not None:
        raise ValueError(f"{damaged}: a tensor or value there does not have the checksum it was written with")


class _Part(io.RawIOBase):
    """The bytes of a file from `offset` on, `length` of them, as a file that can be read."""

    def __init__(self, path: pathlib.Path, offset: int, length: int) -> None:
        self.descriptor, self.offset, self.length, self.position = os.open(path, os.O_RDONLY), offset, length, 0

    def close(self) -> None:
        if not self.closed:
            os.close(self.descriptor)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer) -> int:
        wanted = max(min(len(buffer), self.length - self.position), 0)
        data = os.pread(self.descriptor, wanted, self.offset + self.position)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint whose metadata may hold only what METADATA_CLASSES names.

    torch's own reader unpickles that file whatever is in it. (Tensors it reads with `weights_only`.)
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with open(self.path / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors with `weights_only`, which torch's own planner does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # it puts the value in its place, from bytes that are ours


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in METADATA_CLASSES or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} of a checkpoint names {module}.{name}, which no checkpoint of this project has; it may "
            "have been tampered with, nothing of it was run"
        )
