"""Clip-Cov: some of the tokens that lower the entropy most get no gradient (Cui et al. 2025, arXiv:2505.22617).

FILE=configs/examples/methods/clip_cov.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.advantages $FILE:clip_cov --algorithm.aggregation token_mean

The entropy falls by the covariance of log-probs and advantages: likely tokens of good completions. A token's part of it
is (A - mean A) * (logp - mean logp), with means over the step's loss tokens. Of the tokens whose part lies within
COVARIANCES, a share CLIPPED_FRAC of all tokens, at least one, is drawn by chance, and its advantage becomes 0.
"""

import torch

from grpo.algorithm.advantages import group_mean_std

# The paper's, for Qwen2.5-7B and 32B
CLIPPED_FRAC = 2e-4
COVARIANCES = (1.0, 5.0)


def clip_cov(x):
    """Return GRPO's advantages as one for each token [N], 0 for those that are drawn.

    The log-probs are the generator's, which are known before the step's first forward. What is drawn follows from the
    step's tokens, so all ranks, and a resumed run, draw alike.
    """
    mean_P1, std_P1 = group_mean_std(x.rewards_PG, x.has_PG)
    advantages_N = x.per_token((x.rewards_PG - mean_P1) / (std_P1 + 1e-4))
    batch = x.batch
    counts_N = batch.loss_mask_N & x.has_PG.flatten()[batch.rollout_N]
    if not counts_N.any():
        return advantages_N
    logprobs_N = batch.generator_logprobs_N.where(counts_N, 0)
    covariance_N = advantages_N - advantages_N[counts_N].mean()
    covariance_N = covariance_N * (logprobs_N - logprobs_N[counts_N].mean())
    low, high = COVARIANCES
    places = (counts_N & (covariance_N > low) & (covariance_N < high)).nonzero().flatten()
    number = max(int(CLIPPED_FRAC * counts_N.sum()), 1)
    chance = torch.Generator().manual_seed(int(batch.ids_N.sum()))
    drawn = places[torch.randperm(len(places), generator=chance)[:number]]
    return advantages_N.index_fill(0, drawn, 0.0)
