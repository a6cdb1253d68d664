"""What every loss sees of a micro-batch, and the arithmetic that losses, KL and corrections share."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo.types import MicroBatch

# exp(20) = 4.9e8: far beyond any ratio that means something, and its sum over a step is still far from overflowing.
MAX_LOG_RATIO = 20.0

Metrics = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a policy loss sees of one micro-batch: [B, T], aligned with the position that predicts a token.

    Log-probs and entropy are at the temperature that sampled the token. With top_p, top_k or min_p they are those of
    the distribution over the ids that these kept.

    Outside the loss mask all of it is 0, whatever was there (inf and nan too, since 0 * nan is nan, forward and
    backward), so a loss needs no mask. Inside nothing is repaired: a NaN there gives a NaN loss.
    """

    logprobs_BT: Tensor
    """Natural log-probs of the tokens by the policy as it is now, with gradient."""
    old_logprobs_BT: Tensor
    """By the policy at the start of the step, detached; with `algorithm.old_logprobs` generator by the generator."""
    generator_logprobs_BT: Tensor
    """By the generator, at sampling time."""
    ref_logprobs_BT: Tensor | None
    """By the reference or teacher; None if the run has none."""
    advantages_BT: Tensor
    entropy_BT: Tensor
    """Entropy of the policy as it is now at that position, nats, with gradient."""
    loss_mask_BT: Tensor
    """bool: the tokens that count in the loss."""
    sequence_BT: Tensor
    """int64: index of the sequence of each position, -1 on padding. A row may hold several sequences; a sequence is
    never split over rows or micro-batches."""
    num_loss_tokens_BT: Tensor
    """int64: loss tokens of this position's sequence; at least 1, also where the mask is False."""
    num_rollout_tokens_BT: Tensor
    """int64: the same of its rollout, which has one sequence or, as an agent's episode, several."""
    num_sequences: int
    """Every index in `sequence_BT` is below it."""

    @classmethod
    def of(cls, micro: MicroBatch, logprobs_BT: Tensor, entropy_BT: Tensor) -> "LossInputs":
        """Return a micro-batch with the policy's log-probs, which are the old ones too where the batch has none."""
        old_BT = logprobs_BT.detach() if micro.old_logprobs_BT is None else micro.old_logprobs_BT
        computed = {"logprobs_BT": logprobs_BT, "old_logprobs_BT": old_BT, "entropy_BT": entropy_BT}
        names = (field.name for field in fields(cls) if field.name not in computed)
        values = computed | {name: getattr(micro, name) for name in names}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                values[name] = value.where(micro.loss_mask_BT, 0)
        return cls(**values)


def sequence_means(values_BT: Tensor, x: LossInputs) -> Tensor:
    """Return at each loss token the mean of the values over its sequence's loss tokens; [B, T], 0 outside the mask.

    The mean is over sequences, never over rows, which may hold several of them, nor over episodes of several sequences.
    """
    # float64, so that the order in which a GPU adds does not show; padding (-1) gets a slot of its own
    slots_BT = x.sequence_BT + 1
    sums = torch.zeros(x.num_sequences + 1, dtype=torch.float64, device=values_BT.device)
    sums = sums.index_add(0, slots_BT.flatten(), values_BT.where(x.loss_mask_BT, 0).double().flatten())
    means_BT = sums[slots_BT] / x.num_loss_tokens_BT
    return means_BT.to(values_BT.dtype).where(x.loss_mask_BT, 0)


def clamped(log_ratio: Tensor) -> Tensor:
    """Return it within +-MAX_LOG_RATIO; beyond it there is no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
