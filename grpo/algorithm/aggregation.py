"""How the losses of tokens become the number whose gradient is taken; `algorithm.aggregation` names one of these.

An aggregation is a function of one micro-batch, whose parts add up over micro-batches and ranks:

    aggregation(loss_BT, x: LossInputs, totals: UpdateTotals) -> scalar

`loss_BT` is 0 outside the loss mask. What is divided by is counted over the whole update before its first forward, so
that sharding, packing and micro-batches cannot change what a token weighs. Means are over rollouts, not over the
sequences of an episode that has several. `sequence_mean`, GRPO's, stands in train_grpo.py; one of your own is named
`path/file.py:function`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from grpo.algorithm.inputs import LossInputs
from grpo.config.user_files import load_function
from grpo.types import TrainBatch


@dataclass(frozen=True)
class UpdateTotals:
    """Counts over a whole update, all its micro-batches and ranks. At least 1, because losses are divided by them."""

    num_tokens: int
    """Loss tokens."""
    num_rollouts: int
    """Rollouts with a loss token."""
    max_completion_tokens: int
    """The longest completion that a config allows."""

    @classmethod
    def of(cls, mini_batch: TrainBatch, max_completion_tokens: int) -> "UpdateTotals":
        """Count the tokens and rollouts of an update's mini-batch."""
        num_tokens = int(mini_batch.loss_mask_N.sum())
        num_rollouts = len(mini_batch.rollout_N[mini_batch.loss_mask_N].unique())
        return cls(max(num_tokens, 1), max(num_rollouts, 1), max_completion_tokens)


def token_mean(loss_BT: Tensor, x: LossInputs, totals: UpdateTotals) -> Tensor:
    """Return this micro-batch's part of the mean over the update's tokens (DAPO, arXiv:2503.14476)."""
    return loss_BT.sum() / totals.num_tokens


def fixed_horizon(loss_BT: Tensor, x: LossInputs, totals: UpdateTotals) -> Tensor:
    """Return this micro-batch's part of the mean over rollouts of the sum over tokens / max_completion_tokens.

    A token weighs the same in long and short completions (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    """
    return loss_BT.sum() / (totals.num_rollouts * totals.max_completion_tokens)


AGGREGATIONS = {"token_mean": token_mean, "fixed_horizon": fixed_horizon}


def named_aggregation(name: str) -> Callable[[Tensor, LossInputs, UpdateTotals], Tensor]:
    """Return the aggregation of that name, or the user's `path/file.py:function`; raises what `load_function` does."""
    return AGGREGATIONS.get(name) or load_function(name, "aggregation")
