"""Rollouts, and the batches of a step, as tests make them by hand."""

from dataclasses import replace

from torch import Tensor

from grpo.types import TrainBatch


def rewarded(
    batch: TrainBatch,
    rewards_R: Tensor,
    parts_FR: Tensor | None = None,
    has_reward_R: Tensor | None = None,
) -> TrainBatch:
    """Return the batch of a step with its rewards, NaN for none; those of one function unless `parts_FR` are given."""
    if parts_FR is None:
        parts_FR = rewards_R[None].clone()
    if has_reward_R is None:
        has_reward_R = ~rewards_R.isnan()
    return replace(batch, rewards_R=rewards_R, has_reward_R=has_reward_R, parts_FR=parts_FR.contiguous())
