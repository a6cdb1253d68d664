"""What was sampled ahead (`overlap_steps`) as a part of a checkpoint, so that a resumed run trains on the very same.

Prompts as the place in the data at which they are drawn again; completions as tensors. Rewards are not in it: they are
computed when the step begins that trains on it, resumed or not. What is carried over (grpo/run/carried.py) uses the
same form.
"""

import pathlib
from dataclasses import replace
from typing import Any

import torch

from grpo.data.streams import PromptStream
from grpo.folder.checkpoint import DRIVER_FILE, read_driver_tensors
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.types import Completion, Pending

TENSORS = ("header", "temperatures", "pieces", "ids", "loss_mask", "logprobs")  # those of `flatten_completions`


def pending_state(pending: Pending) -> dict[str, Any]:
    """The part of it that is written as JSON."""
    counts = {"prompts": len(pending.prompts), "completions": len(pending.completions)}
    expected = [prompt.expected_tokens for prompt in pending.prompts]
    return {"version": pending.version, "place": pending.place, "expected_tokens": expected, **counts}


def pending_tensors(pending: Pending) -> dict[str, torch.Tensor]:
    """The part of it that is written as tensors."""
    return completion_tensors(pending.completions)


def without_pending(state: dict[str, Any]) -> dict[str, Any]:
    """A driver's state in which nothing was sampled ahead or carried over.

    The first step draws the prompts of the former again. Those of the latter are left out, which is printed: others of
    the same draws were trained on.
    """
    if carried := state.get("carried"):
        num_groups = sum(len(draw["prompts"]) for draw in carried["draws"])
        print(f"{num_groups} groups that were carried over are left out: they are of the old config", flush=True)
    place = state["pending"]["place"] if "pending" in state else state.get("data")
    return {name: x for name, x in state.items() if name not in ("pending", "carried")} | {"data": place}


def read_pending(checkpoint: pathlib.Path, state: dict[str, Any], stream: PromptStream) -> Pending:
    """Undo `pending_state` and `pending_tensors`. Raises ValueError if the two do not fit together."""
    completions = read_completions(checkpoint, state["completions"], "sampled ahead")
    drawn = zip(stream.draw_again(state["place"], state["prompts"]), state["expected_tokens"], strict=True)
    prompts = [replace(prompt, expected_tokens=expected) for prompt, expected in drawn]
    return Pending(prompts, completions, state["version"], state["place"])


def completion_tensors(completions: list[Completion]) -> dict[str, torch.Tensor]:
    """Completions as tensors by name."""
    return dict(zip(TENSORS, flatten_completions(completions), strict=True))


def read_completions(checkpoint: pathlib.Path, count: int, what: str) -> list[Completion]:
    """Undo `completion_tensors`. Raises ValueError unless there are `count`, which were `what`."""
    tensors = read_driver_tensors(checkpoint)
    completions = unflatten_completions(*(tensors[name] for name in TENSORS)) if {*TENSORS} == tensors.keys() else []
    if len(completions) != count:
        raise ValueError(
            f"{checkpoint} has {len(completions)} completions {what} and {DRIVER_FILE} says {count}; remove this "
            "checkpoint to resume from the one before"
        )
    return completions
