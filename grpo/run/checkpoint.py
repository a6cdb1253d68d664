"""Saving and exact resume: `RUN_DIR/checkpoints/step-N`, each one complete or not there at all.

Sharded model, optimizer, schedule and random states go through torch.distributed.checkpoint, so a run may resume on
another number of trainer ranks; the driver's state (step, data position) is in the same folder as JSON, and completions
that were sampled ahead as safetensors.
"""

import io
import json
import pathlib
import pickle
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from grpo.config import TrainerConfig
from grpo.models.lora import PLACES
from grpo.run.run_folder import CHECKPOINTS, step_folders, step_of

DRIVER_FILE = "driver.json"
DRIVER_TENSORS_FILE = "driver.safetensors"
METADATA_FILE = ".metadata"
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


def latest_checkpoint(run_dir: str) -> pathlib.Path | None:
    """The newest complete checkpoint of a run, None if there is none."""
    found = [folder for folder in step_folders(run_dir) if (folder / DRIVER_FILE).is_file()]
    return found[-1] if found else None


def read_driver_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Step and data position of a checkpoint. Raises ValueError if the file does not have them."""
    path = checkpoint / DRIVER_FILE
    way_out = "remove this checkpoint to resume from the one before"
    try:
        state = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); {way_out}") from error
    if not isinstance(state, dict) or type(state.get("step")) is not int or not isinstance(state.get("data"), dict):
        raise ValueError(f"{path} has no step and place in the data; {way_out}")
    return state


def read_driver_tensors(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors beside the driver's state. Raises ValueError if the file cannot be read."""
    path = checkpoint / DRIVER_TENSORS_FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove this checkpoint to resume from the one before"
        ) from error


def check_adapters(checkpoint: pathlib.Path, trainer: TrainerConfig) -> None:
    """Refuse to resume with other LoRA adapters than the checkpoint has. Raises ValueError that names both."""
    there = PlainReader(checkpoint).read_metadata().state_dict_metadata
    places, saved = {place: target for target, place in PLACES.items()}, {}
    for name in there:  # model.layers.0.attention.wo.lora_a
        if name.startswith("model.layers.") and name.endswith(".lora_a"):
            saved[places[name.split(".", 3)[3].removesuffix(".lora_a")]] = there[name].size[0]
    wanted = dict.fromkeys(trainer.lora_targets, trainer.lora_rank) if trainer.lora_rank else {}
    if saved != wanted:
        raise ValueError(
            f"{checkpoint} has {_in_words(saved)}, and this run trains {_in_words(wanted)}; resume with the "
            "trainer.lora_rank and trainer.lora_targets that the run began with"
        )


def best_checkpoint(run_dir: str | pathlib.Path, metric: str) -> pathlib.Path | None:
    """Of the checkpoints after whose step the run was evaluated, that with the highest `eval/<metric>`; None without.

    Of equal ones the newest.
    """
    values = {}
    with open(pathlib.Path(run_dir) / "metrics.jsonl", encoding="utf-8") as file:
        for record in map(json.loads, file):
            if (value := record.get(f"eval/{metric.removeprefix('eval/')}")) is not None:
                values[record["step"]] = value
    evaluated = {folder: values[step_of(folder)] for folder in step_folders(run_dir) if step_of(folder) in values}
    return max(reversed(evaluated), key=evaluated.get, default=None)


def save_checkpoint(
    run_dir: str,
    step: int,
    trained: Stateful,
    driver_state: dict[str, Any] | None,
    keep: int,
    keep_best: str = "",
    driver_tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the checkpoint of `step` and delete all but the `keep` newest, and the best by the metric `keep_best`.

    `trained` is anything with a state_dict; `driver_state` (written as JSON) and `driver_tensors` are wanted on rank 0
    alone. Collective over the trainer ranks.
    """
    target = pathlib.Path(run_dir) / CHECKPOINTS / f"step-{step:08d}"
    partial = target.with_suffix(".partial")
    writes = dist.get_rank() == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(trained.state_dict() | {"random": {str(dist.get_rank()): _random_state()}}, checkpoint_id=partial)
    if writes:
        (partial / DRIVER_FILE).write_text(json.dumps(driver_state))
        if driver_tensors:
            save_file(driver_tensors, partial / DRIVER_TENSORS_FILE)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)  # in one step: a crash before it leaves the older checkpoints as they are
        best = best_checkpoint(run_dir, keep_best) if keep_best else None
        for old in step_folders(run_dir)[: -max(keep, 1)]:
            if old != best:
                shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(checkpoint: pathlib.Path, trained: Stateful) -> None:
    """Bring model, optimizer, schedule and random states back. Collective over the trainer ranks.

    Only tensors and plain values are read; a file that would run code is refused with pickle.UnpicklingError.
    """
    state = trained.state_dict()
    reader = PlainReader(checkpoint)
    there, rank = reader.read_metadata().state_dict_metadata, str(dist.get_rank())
    # absent when more ranks resume than saved, or on another kind of device
    random = {kind: value for kind, value in _random_state().items() if f"random.{rank}.{kind}" in there}
    if random:
        state["random"] = {rank: random}
    dcp.load(state, storage_reader=reader, planner=PlainPlanner())
    trained.load_state_dict(state)
    if random:
        torch.set_rng_state(state["random"][rank]["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(state["random"][rank]["cuda"])


def load_model(checkpoint: pathlib.Path, model: Stateful) -> None:
    """Only the weights, into a sharded model. Collective over the ranks that hold it; any number of them."""
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=PlainReader(checkpoint), planner=PlainPlanner())
    model.load_state_dict(state["model"])


def _in_words(rank_of: dict[str, int]) -> str:
    """Of adapters, by their targets."""
    if not rank_of:
        return "no adapters"
    return f"adapters of rank {max(rank_of.values())} for {', '.join(name for name in PLACES if name in rank_of)}"


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


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state
