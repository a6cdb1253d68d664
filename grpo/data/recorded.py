"""A step's batch as a file, `RUN_DIR/batches/step-N.safetensors`: tensors and text, nothing that a reader would run.

grpo/tools/recorded.py reads it. Left out: prompts and completions as text, which completions.jsonl has.
"""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

from safetensors.torch import save

from grpo.text import naming
from grpo.types import TrainBatch

BATCHES = "batches"


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The input of the trainers in one step: everything that its updates depend on, except weights and config."""

    batch: TrainBatch
    """The batch with its rewards and, if there was a reference, its log-probs; before the advantages were added."""
    group_size: int
    metrics: dict[str, float]
    """Metrics of the sampling: rewards, lengths, groups."""


def batch_path(run_dir: str | Path, step: int) -> Path:
    """Return the file of a step's batch. Steps are counted as in the log: the first is 1."""
    return Path(run_dir) / BATCHES / f"step-{step:08d}.safetensors"


def drop_batches_after(run_dir: str | Path, step: int) -> None:
    """Delete the batches of later steps than `step`. Another run made them, or a part of this one that was lost."""
    folder = Path(run_dir) / BATCHES
    if folder.is_symlink():
        return
    last_kept = batch_path(run_dir, step).name
    for path in folder.glob("step-*.safetensors"):
        if path.name > last_kept:
            path.unlink()


def save_step(run_dir: str | Path, step: int, recorded: RecordedStep) -> None:
    """Write the batch of a step, for `read_step`; the file appears when it is complete."""
    path = batch_path(run_dir, step)
    tensors = {}
    for field in fields(recorded.batch):
        values = getattr(recorded.batch, field.name)
        if values is not None:
            tensors[field.name] = values.contiguous()
    facts = {
        "group_size": str(recorded.group_size),
        "metrics": json.dumps(recorded.metrics),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    with naming(partial):
        partial.write_bytes(save(tensors, facts))
    os.replace(partial, path)
