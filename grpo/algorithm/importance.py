"""Log-probs of the same tokens by two models: estimates of the KL divergence, and a correction for the generator's.

Trainer and generator differ because the generator computes in other kernels or in lower precision, or holds older
weights; policy and reference, because the policy learns.
"""

import torch
from torch import Tensor

from grpo.algorithm.inputs import LossInputs, Metrics, clamped, sequence_means
from grpo.config import AlgorithmConfig
from grpo.types import TrainBatch


def mismatch(x: LossInputs, config: AlgorithmConfig) -> Metrics:
    """Return how far the policy's log-probs of the sampled tokens are from the generator's, as metrics; detached.

    With d = policy - generator: `mismatch/mean` and `mismatch/max` are |d| in nats; `mismatch/kl` exp(d) - 1 - d, the
    k3 estimate of KL(generator || policy) on the generator's own samples (see `kl`); `mismatch/weight` exp(d) and
    `mismatch/weight_squared`, of whose means `with_effective_sample_size` makes one number. The last three clamp d to
    +-20.
    """
    difference_BT = log_weight(x, config)
    clamped_BT = clamped(difference_BT)
    weight_BT = clamped_BT.exp()
    return {
        "mismatch/mean": difference_BT.abs(),
        "mismatch/max": difference_BT.abs(),
        "mismatch/kl": clamped_BT.expm1() - clamped_BT,
        "mismatch/weight": weight_BT,
        "mismatch/weight_squared": weight_BT.square(),
    }


def log_weight(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """Return log(policy / generator) of each token, detached; the policy is the one at the start of the step.

    With `old_logprobs` generator its log-probs were not computed, and the policy as it is now takes its place.
    """
    policy_BT = x.logprobs_BT.detach() if config.old_logprobs == "generator" else x.old_logprobs_BT
    return policy_BT - x.generator_logprobs_BT


def with_effective_sample_size(means: dict[str, float]) -> dict[str, float]:
    """Return a step's means with `mismatch/ess` in place of the two weights that `mismatch` measured for it.

    It is mean(w)^2 / mean(w^2), in (0, 1]: unweighted tokens worth as much, as a share of all tokens (Kish 1965). It is
    1 for a step in which every weight is 0.
    """
    means = dict(means)
    if "mismatch/weight" in means:
        weight = means.pop("mismatch/weight")
        squared = means.pop("mismatch/weight_squared")
        means["mismatch/ess"] = min(weight**2 / squared, 1.0) if squared else 1.0  # rounding can exceed 1
    return means


def correct_importance(
    loss_BT: Tensor, metrics: Metrics, x: LossInputs, config: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    """Return the per-token loss times `importance_factors`, and the metrics with what that changed.

    `mismatch/corrected_frac` is new: tokens whose factor was cut off or masked. `loss/active_frac` then leaves out
    tokens of factor 0.
    """
    factors_BT, corrected_BT = importance_factors(x, config)
    metrics = metrics | {"mismatch/corrected_frac": corrected_BT}
    if "loss/active_frac" in metrics:
        metrics["loss/active_frac"] = metrics["loss/active_frac"] * (factors_BT != 0)
    return factors_BT * loss_BT, metrics


def importance_factors(x: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return factors of the per-token loss that make up for a generator that differs from the policy.

    With w = policy / generator of a token, clamped to exp(+-20), and low and high from the config:
    `none`: 1. `truncate`: min(w, high), truncated importance sampling (TIS; Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). `mask_tokens`: w where it lies in [low, high], else 0
    (IcePop; Ling Team 2025, arXiv:2510.18855). `mask_sequences`: 1 for a sequence whose geometric mean of w lies in
    [low, high], 0 for all tokens of any other sequence.
    A token of factor 0 stays in the loss's denominator, which is counted before any forward: masking makes a step
    smaller, it does not make the remaining tokens count more.

    Returns:
        factors [B, T], detached, 1 outside the mask; and bool [B, T], the loss tokens that were cut off or masked.
    """
    kind = config.importance_correction
    low = config.importance_correction_low
    high = config.importance_correction_high
    mask_BT = x.loss_mask_BT
    difference_BT = log_weight(x, config)
    if kind == "none":
        return torch.ones_like(difference_BT), torch.zeros_like(mask_BT)
    if kind == "mask_sequences":
        difference_BT = sequence_means(difference_BT, x)
    ratio_BT = clamped(difference_BT).exp()
    if kind == "truncate":
        corrected_BT = (ratio_BT > high) & mask_BT
        factors_BT = ratio_BT.clamp(max=high)
    else:
        corrected_BT = ((ratio_BT < low) | (ratio_BT > high)) & mask_BT
        kept_BT = ratio_BT if kind == "mask_tokens" else torch.ones_like(ratio_BT)
        factors_BT = kept_BT.masked_fill(corrected_BT, 0)
    return factors_BT.where(mask_BT, 1), corrected_BT


def token_kl(x: LossInputs, config: AlgorithmConfig) -> Tensor:
    """Estimate KL(policy || reference) at each token by `kl_estimator`: [B, T], nats, with a gradient.

    `k3_weighted` is w * r * k3. Here r is policy / old policy, with a gradient, and w the factor by
    `importance_correction`, without. Its gradient is w * r * d * grad logp, where d = log policy - log reference, as
    the two other terms cancel. Over tokens that the generator drew, w * r is policy / generator unless it was cut, so
    both value and gradient are those of the KL without bias (DeepSeek-AI 2025, "DeepSeek-V3.2", section on the unbiased
    KL estimate). Where w alone is policy / generator already (`old_logprobs` generator), r is 1, with its gradient.
    """
    log_ratio_BT = clamped(x.logprobs_BT - x.ref_logprobs_BT)
    if config.kl_estimator != "k3_weighted":
        return kl(log_ratio_BT, config.kl_estimator)
    factors_BT, _ = importance_factors(x, config)
    old_BT = x.old_logprobs_BT
    if config.old_logprobs == "generator" and config.importance_correction in ("truncate", "mask_tokens"):
        old_BT = x.logprobs_BT.detach()
    ratio_BT = clamped(x.logprobs_BT - old_BT).exp()
    return factors_BT * ratio_BT * kl(log_ratio_BT, "k3")


def kl(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token from x = log policy - log reference, clamped to +-20.

    After Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html:
    `k1` x: unbiased, noisy, can be negative. As a loss it teaches nothing, since its gradient, that of logp, has mean 0
    over tokens sampled from the policy; as a part of the reward it is the right one.
    `k2` x^2 / 2: biased, never negative; its gradient x * grad logp is, on-policy, in expectation that of the true KL.
    `k3` exp(-x) - 1 + x: unbiased, never negative; but its gradient (1 - exp(-x)) * grad logp is not the KL's.
    `k3_k2_gradient`: the value of k3 and the gradient of k2, k2 - sg[k2] + sg[k3]. `k3_weighted` is the same here,
    where its weights are 1; see `token_kl`.
    On these gradients: Tang and Munos 2025, arXiv:2506.09477. They are those of each token's own KL: what a token does
    to the KL of the tokens after it is left out.

    >>> kl(torch.tensor([-1.0, 0.0, 1.0]), "k2")
    tensor([0.5000, 0.0000, 0.5000])
    """
    if estimator == "k1":
        return log_ratio
    k2 = log_ratio.square() / 2
    if estimator == "k2":
        return k2
    # expm1, because near 0 the terms cancel: in float32 exp(1e-4) - 1e-4 - 1 has not one correct digit
    k3 = torch.expm1(-log_ratio) + log_ratio
    if estimator == "k3":
        return k3
    return (k2 - k2.detach()) + k3.detach()


def rollout_kl(batch: TrainBatch, estimator: str) -> Tensor:
    """Return KL(generator || reference) of each rollout, summed over its loss tokens: float32 [R], nats."""
    log_ratio_N = (batch.generator_logprobs_N - batch.ref_logprobs_N).where(batch.loss_mask_N, 0)
    kl_N = kl(clamped(log_ratio_N), estimator)
    return torch.zeros(batch.num_rollouts).index_add(0, batch.rollout_N, kl_N)
