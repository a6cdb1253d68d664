"""Lite PPO's advantages: one scale for the whole step (Liu et al. 2025, arXiv:2508.08221).

FILE=configs/examples/methods/batch_std.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.advantages $FILE:batch_std --algorithm.aggregation token_mean

The advantage is (reward - mean of the group) / (std of all rewards of the step + 1e-4).
"""

from grpo.algorithm.advantages import group_mean


def batch_std(x):
    """Return the advantages [P, G]. A single reward in the step has a standard deviation of 0."""
    num = x.has_PG.sum()
    squares_PG = (x.rewards_PG - x.rewards_PG.sum() / num.clamp(min=1)).square().where(x.has_PG, 0.0)
    return group_mean(x) / ((squares_PG.sum() / (num - 1).clamp(min=1)).sqrt() + 1e-4)
