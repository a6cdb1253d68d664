"""A step's batch as a file, `RUN_DIR/batches/step-N.safetensors`: tensors and text, nothing that a reader would run.

Writing and reading need neither a model nor other ranks. Left out: prompts and completions as text, which
completions.jsonl has.
"""

import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from grpo.types import TrainBatch

BATCHES = "batches"
REWARDS = ("rewards_S", "has_reward_S", "parts_FS")


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """What the trainers got in one step: all that its updates depend on, besides the weights and the config."""

    batch: TrainBatch
    """As before the advantages; with the reference's log-probs, if there was one."""
    rewards_S: torch.Tensor
    """float32."""
    has_reward_S: torch.Tensor
    """bool."""
    parts_FS: torch.Tensor
    """float32: each reward function's unweighted values; NaN is None."""
    group_size: int
    metrics: dict[str, float]
    """What was measured of the sampling: rewards, lengths, groups."""


def batch_path(run_dir: str | pathlib.Path, step: int) -> pathlib.Path:
    """Where a run has the batch of a step, counted as the log does: the first is 1."""
    return pathlib.Path(run_dir) / BATCHES / f"step-{step:08d}.safetensors"


def save_step(run_dir: str | pathlib.Path, step: int, recorded: RecordedStep) -> None:
    """Write what `read_step` gives back; the file appears when it is whole."""
    batch, path = recorded.batch, batch_path(run_dir, step)
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors |= {name: getattr(recorded, name) for name in REWARDS}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    facts = {"group_size": str(recorded.group_size), "metrics": json.dumps(recorded.metrics)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(save(tensors, facts))
    os.replace(partial, path)


def read_step(run_dir: str, step: int, vocab_size: int | None = None) -> RecordedStep:
    """The step's batch. Raises ValueError with the path if the file is not one that `save_step` wrote.

    vocab_size: tokens that the model has, if the step must not have others.
    """
    path = batch_path(run_dir, step)
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
        lengths_S = tensors["lengths_S"]
        sizes = {"S": len(lengths_S), "N": int(lengths_S.sum())}
        if wrong := {name: list(x.shape) for name, x in tensors.items() if not fits(name, x.shape, sizes)}:
            raise ValueError(f"of {sizes['S']} sequences and {sizes['N']} tokens it has {wrong}")
        rewards = [tensors.pop(name) for name in REWARDS]
        metrics, group_size = json.loads(facts["metrics"]), int(facts["group_size"])
        found = RecordedStep(TrainBatch(**tensors), *rewards, group_size, metrics)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recorded batch ({type(error).__name__}: {error}); record it again") from error
    if vocab_size and (largest := int(found.batch.ids_N.max())) >= vocab_size:
        raise ValueError(
            f"{path} has token {largest}, and the model has {vocab_size} tokens; use a model with the tokenizer of the "
            "recorded run"
        )
    return found


def fits(name: str, shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Whether a tensor has the dimensions that its name spells, those that are among `sizes` by their letters."""
    letters = name.rpartition("_")[2]
    return len(shape) == len(letters) and all(
        sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)
    )


def check_recorded(
    run_dir: str,
    steps: Iterable[int],
    group_size: int,
    needs_reference: str = "",
    needs_turns: bool = False,
) -> None:
    """Refuse a run whose recorded batches cannot be trained on: a step is missing, or the first one does not fit.

    needs_reference: why the reference's log-probs must be there; empty if they need not. needs_turns: so must
    what turns earned. Raises ValueError.
    """
    steps, folder = list(steps), pathlib.Path(run_dir) / BATCHES
    missing = [step for step in steps if not batch_path(run_dir, step).is_file()]
    if missing:
        fewer = f"use --num-steps {missing[0] - 1}, or " if missing[0] > steps[0] else ""
        raise ValueError(
            f"{folder} has {len(steps) - len(missing)} of the {len(steps)} steps from {steps[0]} to {steps[-1]}, and "
            f"step {missing[0]} is not among them; {fewer}train that run with --record first"
        )
    first = read_step(run_dir, steps[0])
    if first.group_size != group_size:
        raise ValueError(f"{folder} has groups of {first.group_size}, not of group_size={group_size}; set it to that")
    if needs_reference and first.batch.ref_logprobs_N is None:
        raise ValueError(
            f"{folder} has no log-probs of a reference, which {needs_reference} needs; set it to 0, or record a run "
            "that has one"
        )
    if needs_turns and first.batch.turn_N is None:
        raise ValueError(
            f"{folder} does not say what turns earned, which algorithm.advantages=return_to_go needs; record a run "
            "that has it, or use rloo"
        )
