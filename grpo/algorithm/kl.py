"""Estimates of the KL divergence from the policy to the reference, per sampled token."""

import torch

from grpo.algorithm.inputs import clamped
from grpo.types import TrainBatch


def kl(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token from x = log policy - log reference, clamped to +-20.

    After Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html:
    `k1` x: unbiased, noisy, can be negative. As a loss it teaches nothing, since its gradient, that of logp, has mean 0
    over tokens sampled from the policy; as a part of the reward it is the right one.
    `k2` x^2 / 2: biased, never negative; its gradient x * grad logp is, on-policy, in expectation that of the true KL.
    `k3` exp(-x) - 1 + x: unbiased, never negative; but its gradient (1 - exp(-x)) * grad logp is not the KL's.
    `k3_k2_gradient`: the value of k3 and the gradient of k2, k2 - sg[k2] + sg[k3].
    On these gradients: Tang and Munos 2025, arXiv:2506.09477. They are those of each token's own KL: what a token does
    to the KL of the tokens after it is left out.
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
    if estimator == "k3_k2_gradient":
        return (k2 - k2.detach()) + k3.detach()
    raise ValueError(f"kl_estimator={estimator!r} is unknown; use 'k1', 'k2', 'k3' or 'k3_k2_gradient'")


def sequence_kl(batch: TrainBatch, estimator: str) -> torch.Tensor:
    """Return KL(generator || reference) of each sequence, summed over its loss tokens: float32 [S], nats."""
    log_ratio_N = (batch.generator_logprobs_N - batch.ref_logprobs_N).where(batch.loss_mask_N, 0)
    kl_N = kl(clamped(log_ratio_N), estimator)
    return torch.zeros(batch.num_sequences).index_add(0, batch.owner_N, kl_N)
