"""Per-token policy losses, the KL estimator, and the one aggregation that turns them into a scalar.

Everything is `[B, T]`, aligned with the position that *predicts* a token (see `packing.MicroBatch`), and pure: to try
another algorithm, write another function that returns a per-token loss and a dict of metrics.

Metrics are detached scalars over the masked-in tokens of ONE micro-batch, never means: each is a **sum**, which the
trainer adds up over micro-batches and ranks and divides by the step's token count; names that end in `_max` are
**maxima**, combined with max. So a metric does not depend on how the step was split.

Masked-out positions may hold anything (inf, nan): they are replaced with `where` before any arithmetic that could
overflow, because 0 * nan is nan, forward and backward. Inside the mask nothing is repaired: a NaN log-prob or
advantage there gives a NaN loss. So the caller takes sequences without a reward (NaN advantage) out of the mask.

Layer 0: pure functions.
"""

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]

# exp(20) = 4.9e8: far beyond any ratio that means something, and its sum over a step is still far from overflowing.
MAX_LOG_RATIO = 20.0


def clipped_policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate of PPO and GRPO: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    Schulman et al. 2017, arXiv:1707.06347, eq. 7; with clip_high above clip_low it is DAPO's, arXiv:2503.14476. All
    inputs are [B, T]; `completion_mask_BT` is bool. Natural log-probs. Beyond a log-ratio of +-20 the ratio is held
    constant, so such a token has no gradient.

    Returns:
        The loss [B, T], 0 outside the mask, and the metrics `clip_low_share` (ratio below 1 - clip_low and A < 0: the
        gradient is cut), `clip_high_share` (ratio above 1 + clip_high and A > 0), `clip_share` (both), `ratio_mean`
        (sums over tokens, see the top of this file) and `ratio_max` (0 if nothing is masked in).
    """
    log_ratio_BT = _masked_log_ratio(logprobs_BT, old_logprobs_BT, completion_mask_BT)
    advantages_BT = advantages_BT.where(completion_mask_BT, 0)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)

    ratio_BT = ratio_BT.detach()
    # outside the mask the advantage is 0, so neither condition can hold there
    clip_low_share = ((ratio_BT < 1 - clip_low) & (advantages_BT < 0)).sum().float()
    clip_high_share = ((ratio_BT > 1 + clip_high) & (advantages_BT > 0)).sum().float()
    # a ratio is positive, so the 0 outside the mask changes neither the sum nor the maximum
    ratio_BT = ratio_BT.where(completion_mask_BT, 0)
    return loss_BT, {
        "clip_low_share": clip_low_share,
        "clip_high_share": clip_high_share,
        "clip_share": clip_low_share + clip_high_share,
        "ratio_mean": ratio_BT.sum(),
        "ratio_max": ratio_BT.max(),
    }


def kl_k3(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, completion_mask_BT: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token: exp(ref - lp) - (ref - lp) - 1; [B, T], 0 where masked.

    The k3 of Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html): never negative, unbiased
    for tokens sampled from the policy. Log-ratios are clamped to +-20 as in `clipped_policy_loss`.
    """
    log_ratio_BT = _masked_log_ratio(ref_logprobs_BT, logprobs_BT, completion_mask_BT)
    # expm1, because near 0 the two terms cancel: in float32 exp(1e-4) - 1e-4 - 1 has not one correct digit
    return log_ratio_BT.expm1() - log_ratio_BT


def aggregate(
    loss_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    completion_lengths_BT: torch.Tensor,
    kind: Aggregation,
    denominator: float,
) -> torch.Tensor:
    """This micro-batch's share of the step's loss: a scalar. Shares add up over micro-batches and ranks.

    `token_mean` and `fixed_horizon` sum the masked-in tokens; `sequence_mean` weighs each by 1 / the tokens in its
    sequence's completion, which `completion_lengths_BT` holds at every masked-in position (above 0 elsewhere).

    Args:
        denominator: `step_denominator` of the whole optimizer step, not of this micro-batch.

    Raises:
        ValueError: `kind` is unknown, or the denominator is not above 0.
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator={denominator} must be above 0; step_denominator gives at least 1 for an empty step"
        )
    loss_BT = loss_BT.where(completion_mask_BT, 0)
    if kind == "sequence_mean":
        loss_BT = loss_BT / completion_lengths_BT
    elif kind not in ("token_mean", "fixed_horizon"):
        raise _unknown_aggregation(kind)
    return loss_BT.sum() / denominator


def step_denominator(
    completion_lengths_S: torch.Tensor, has_reward_S: torch.Tensor, kind: Aggregation, max_completion_tokens: int
) -> float:
    """What the summed loss of one optimizer step is divided by, counted over all its sequences before any forward.

    `token_mean`: completion tokens of the sequences that have a reward (DAPO). `sequence_mean`: the number of those
    sequences (GRPO). `fixed_horizon`: that number x `max_completion_tokens` (Dr. GRPO, arXiv:2503.20783), so a token
    weighs the same in long and short completions. At least 1, so that a step without any reward divides by one.

    Args:
        completion_lengths_S: int [S], tokens.
        has_reward_S: bool [S].
    """
    num_sequences = int(has_reward_S.sum())
    if kind == "token_mean":
        count = int(completion_lengths_S[has_reward_S].sum())
    elif kind == "sequence_mean":
        count = num_sequences
    elif kind == "fixed_horizon":
        count = num_sequences * max_completion_tokens
    else:
        raise _unknown_aggregation(kind)
    return float(max(count, 1))


def _masked_log_ratio(above_BT: torch.Tensor, below_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log(above / below), clamped; 0 outside the mask whatever stands there, and so is its gradient."""
    return (above_BT - below_BT).where(mask_BT, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _unknown_aggregation(kind: str) -> ValueError:
    return ValueError(f"aggregation={kind!r} is unknown; use 'token_mean', 'sequence_mean' or 'fixed_horizon'")
