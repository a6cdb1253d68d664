"""What every loss sees of a micro-batch, and the arithmetic on masked log-ratios that losses, KL and corrections share.

Positions outside the mask may hold anything (inf, nan): they are replaced with `where` before any arithmetic that could
overflow, because 0 * nan is nan, forward and backward. Inside the mask nothing is repaired: a NaN log-prob or advantage
there gives a NaN loss.
"""

from dataclasses import dataclass, fields

import torch

from grpo.types import MicroBatch

# exp(20) = 4.9e8: far beyond any ratio that means something, and its sum over a step is still far from overflowing.
MAX_LOG_RATIO = 20.0

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a policy loss sees of one micro-batch: [B, T], aligned with the position that predicts a token."""

    logprobs_BT: torch.Tensor
    """Natural log-probs of the tokens by the policy as it is now, with gradient."""
    old_logprobs_BT: torch.Tensor
    """The ratio's denominator, detached: the policy at the start of the step, or the generator."""
    generator_logprobs_BT: torch.Tensor
    """By the generator, at sampling time."""
    ref_logprobs_BT: torch.Tensor | None
    """By the frozen reference; None where the run has none."""
    advantages_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    """bool: the tokens that count in the loss."""
    sequence_BT: torch.Tensor
    """int64: index of the sequence of each position, -1 on padding. A row may hold several sequences; a sequence is
    never split over rows or micro-batches."""
    num_loss_tokens_BT: torch.Tensor
    """int64: loss tokens of this position's sequence; at least 1, also where the mask is False."""
    num_sequences: int
    """Every index in `sequence_BT` is below it."""

    @classmethod
    def of(cls, micro: MicroBatch, logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor) -> "LossInputs":
        """The fields of a micro-batch with the policy's log-probs and the chosen denominator."""
        chosen = {"logprobs_BT": logprobs_BT, "old_logprobs_BT": old_logprobs_BT}
        names = (field.name for field in fields(cls) if field.name not in chosen)
        return cls(**chosen, **{name: getattr(micro, name) for name in names})


def sequence_means(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """At each loss token the mean of the values over its sequence's loss tokens; [B, T], 0 outside the mask.

    Over sequences, never over rows, which may hold several of them.
    """
    # float64, so that the order in which a GPU adds does not show; padding (-1) gets a slot of its own
    slots_BT = inputs.sequence_BT + 1
    sums = torch.zeros(inputs.num_sequences + 1, dtype=torch.float64, device=values_BT.device)
    sums = sums.index_add(0, slots_BT.flatten(), values_BT.where(inputs.loss_mask_BT, 0).double().flatten())
    means_BT = sums[slots_BT] / inputs.num_loss_tokens_BT
    return means_BT.to(values_BT.dtype).where(inputs.loss_mask_BT, 0)


def masked_log_ratio(above_BT: torch.Tensor, below_BT: torch.Tensor, loss_mask_BT: torch.Tensor) -> torch.Tensor:
    """log(above / below) of two log-probs; 0 outside the mask whatever is there, and so is its gradient."""
    return (above_BT - below_BT).where(loss_mask_BT, 0)


def clamped(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """Within +-MAX_LOG_RATIO; beyond it there is no gradient."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
