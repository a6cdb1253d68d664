"""What was sampled ahead (`overlap_steps`) as a part of a checkpoint, so that a resumed run trains on the very same.

Prompts as the place in the data at which they are drawn again; completions as tensors. Rewards are not in it: they are
computed when the step begins that trains on it, resumed or not.
"""

import pathlib
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.data.streams import PromptStream
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.run.checkpoint import DRIVER_FILE, read_driver_tensors
from grpo.types import Pending

TENSORS = ("header", "temperatures", "ids", "logprobs")  # those of `flatten_completions`


def pending_state(pending: Pending) -> dict[str, Any]:
    """The part of it that is written as JSON."""
    counts = {"prompts": len(pending.prompts), "completions": len(pending.completions)}
    return {"version": pending.version, "place": pending.place, **counts}


def pending_tensors(pending: Pending | None) -> dict[str, torch.Tensor]:
    """The part of it that is written as tensors; nothing if nothing was sampled ahead."""
    return dict(zip(TENSORS, flatten_completions(pending.completions), strict=True)) if pending else {}


def check_pending(state: dict[str, Any], config: GRPOConfig) -> None:
    """Refuse to train on pending completions with other groups than theirs. Raises ValueError that names both."""
    num_prompts, num_completions = state["prompts"], state["completions"]
    if (num_prompts, num_completions) != (config.prompts_per_step, config.completions_per_step):
        raise ValueError(
            f"the checkpoint has {num_prompts} x {num_completions // num_prompts} completions that were sampled ahead, "
            f"and this run's steps have {config.prompts_per_step} x {config.group_size}; resume with "
            f"--prompts-per-step {num_prompts} --group-size {num_completions // num_prompts}"
        )


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
