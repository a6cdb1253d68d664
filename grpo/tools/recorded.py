"""Recorded batches are read and checked; neither a model nor other ranks are needed."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from grpo.data.recorded import BATCHES, RecordedStep, batch_path
from grpo.types import TrainBatch

REWARDS = ("rewards_R", "has_reward_R", "parts_FR")


def read_step(run_dir: str, step: int, vocab_size: int | None = None) -> RecordedStep:
    """Read a step's batch. Raises ValueError with the path if `save_step` did not write the file.

    vocab_size: tokens that the model has; a batch with another token is refused. None: all are taken.
    """
    path = batch_path(run_dir, step)
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
        lacking = [name for name in REWARDS if name not in tensors]
        if lacking:
            raise ValueError(f"it lacks {', '.join(lacking)}")
        recorded = RecordedStep(
            batch=TrainBatch(**tensors),
            group_size=int(facts["group_size"]),
            metrics=json.loads(facts["metrics"]),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recorded batch ({type(error).__name__}: {error}); record it again") from error
    largest = int(recorded.batch.ids_N.max())
    if vocab_size and largest >= vocab_size:
        raise ValueError(
            f"{path} has token {largest}, and the model has {vocab_size} tokens; use a model with the tokenizer of the "
            "recorded run"
        )
    return recorded


def check_recorded(
    run_dir: str,
    steps: Iterable[int],
    group_size: int,
    needs_reference: str = "",
    needs_turns: bool = False,
) -> None:
    """Refuse a run whose recorded batches cannot be trained on: a step is missing, or the first one does not fit.

    needs_reference: the setting that needs the reference's log-probs, for the message; empty if none does. needs_turns:
    whether the rewards of turns are needed. Raises ValueError.
    """
    steps = list(steps)
    folder = Path(run_dir) / BATCHES
    missing = [step for step in steps if not batch_path(run_dir, step).is_file()]
    if missing:
        raise ValueError(
            f"{folder} has {len(steps) - len(missing)} of the {len(steps)} steps from {steps[0]} to {steps[-1]}, and "
            f"step {missing[0]} is not among them; train that run with --record first, or use fewer --num-steps"
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
