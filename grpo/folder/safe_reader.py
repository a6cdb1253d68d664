"""Reading a checkpoint of torch's without running anything that is in it.

torch reads tensors with `weights_only`, but unpickles its description of the checkpoint, and values that are no
tensors, whatever they are. These two classes close both.
"""

import enum
import io
import pathlib
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem

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


def content_of(path: pathlib.Path) -> bytes:
    """The bytes of a regular file; a pipe under its name would not end. Raises ValueError if there is none."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    return path.read_bytes()


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint whose metadata may hold only what is ALLOWED."""

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
