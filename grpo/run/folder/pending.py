"""What was sampled ahead (`overlap_steps`) as a part of a checkpoint, so that a resumed run trains on the very same.

Prompts as the place in the data at which they are drawn again; completions as tensors. Rewards are not in it: they are
computed when the step begins that trains on it, resumed or not.
"""

import pathlib
from typing import Any

import torch

from grpo.data.streams import PromptStream
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.run.folder.checkpoint_files import DRIVER_FILE, read_driver_tensors
from grpo.types import Pending

TENSORS = ("header", "temperatures", "ids", "logprobs")  # those of `flatten_completions`


def pending_state(pending: Pending) -> dict[str, Any]:
    """The part of it that is written as JSON."""
    counts = {"prompts": len(pending.prompts), "completions": len(pending.completions)}
    return {"version": pending.version, "place": pending.place, **counts}


def pending_tensors(pending: Pending) -> dict[str, torch.Tensor]:
    """The part of it that is written as tensors."""
    return dict(zip(TENSORS, flatten_completions(pending.completions), strict=True))


def without_pending(state: dict[str, Any]) -> dict[str, Any]:
    """A driver's state in which nothing was sampled ahead: the first step draws those prompts again."""
    if "pending" not in state:
        return state
    return {name: value for name, value in state.items() if name != "pending"} | {"data": state["pending"]["place"]}


def read_pending(checkpoint: pathlib.Path, state: dict[str, Any], stream: PromptStream) -> Pending:
    """Undo `pending_state` and `pending_tensors`. Raises ValueError if the two do not fit together."""
    tensors = read_driver_tensors(checkpoint)
    completions = unflatten_completions(*(tensors[name] for name in TENSORS)) if {*TENSORS} == tensors.keys() else []
    if len(completions) != state["completions"]:
        raise ValueError(
            f"{checkpoint} has {len(completions)} completions sampled ahead and {DRIVER_FILE} says "
            f"{state['completions']}; remove this checkpoint to resume from the one before"
        )
    prompts = stream.draw_again(state["place"], state["prompts"])
    return Pending(prompts, completions, state["version"], state["place"])
