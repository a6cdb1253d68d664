"""The one aggregation that turns per-token losses into a scalar, and what it divides by.

The denominator is counted over the whole update, all its micro-batches and ranks, before the first forward. So
sharding, packing and micro-batches cannot change what a token weighs.
"""

import torch

from grpo.algorithm.inputs import LossInputs
from grpo.config import Aggregation


def aggregate(loss_BT: torch.Tensor, inputs: LossInputs, kind: Aggregation, denominator: float) -> torch.Tensor:
    """This micro-batch's part of the update's loss: a scalar. Parts add up over micro-batches and ranks.

    `token_mean` and `fixed_horizon` sum the loss tokens; `sequence_mean` weighs each by 1 / the loss tokens of its
    sequence. `denominator` is `loss_denominator` of the whole update, not of this micro-batch.
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator={denominator} must be above 0; loss_denominator gives at least 1 for an empty update"
        )
    loss_BT = loss_BT.where(inputs.loss_mask_BT, 0)
    if kind == "sequence_mean":
        loss_BT = loss_BT / inputs.num_loss_tokens_BT
    elif kind not in ("token_mean", "fixed_horizon"):
        raise _unknown_aggregation(kind)
    return loss_BT.sum() / denominator


def loss_denominator(num_loss_tokens_S: torch.Tensor, kind: Aggregation, max_completion_tokens: int) -> float:
    """What the summed loss of one update is divided by, counted over all its sequences before any forward.

    `token_mean`: the loss tokens (DAPO). `sequence_mean`: the number of sequences that have one (GRPO).
    `fixed_horizon`: that number x `max_completion_tokens` (Dr. GRPO, arXiv:2503.20783), so a token weighs the same in
    long and short completions. At least 1, so that an update in which nothing counts divides by one.
    `num_loss_tokens_S`: int [S], loss tokens of each sequence; 0 for one that is excluded.
    """
    num_sequences = int((num_loss_tokens_S > 0).sum())
    if kind == "token_mean":
        count = int(num_loss_tokens_S.sum())
    elif kind == "sequence_mean":
        count = num_sequences
    elif kind == "fixed_horizon":
        count = num_sequences * max_completion_tokens
    else:
        raise _unknown_aggregation(kind)
    return float(max(count, 1))


def _unknown_aggregation(kind: str) -> ValueError:
    return ValueError(f"aggregation={kind!r} is unknown; use 'token_mean', 'sequence_mean' or 'fixed_horizon'")
