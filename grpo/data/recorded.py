"""A batch as a file in `RUN_DIR/batches`, safetensors: tensors and text, nothing that a reader would run."""

import os
import pathlib
from dataclasses import fields

import torch
from safetensors.torch import save_file

from grpo.types import TrainBatch

BATCHES = "batches"
FORMAT = "1"


def save_batch(
    batch: TrainBatch, path: pathlib.Path, tensors: dict[str, torch.Tensor] | None = None, **facts: str
) -> None:
    """Write the fields of a batch that are known, further tensors and, as text, further facts; in one step."""
    known = {field.name: getattr(batch, field.name) for field in fields(batch)} | (tensors or {})
    known = {name: tensor.contiguous() for name, tensor in known.items() if tensor is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    save_file(known, partial, {"format": FORMAT, **facts})
    os.replace(partial, path)
