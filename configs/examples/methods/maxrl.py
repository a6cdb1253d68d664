"""MaxRL: advantages that raise log p of a right answer in place of p (Tajwar et al. 2026, arXiv:2602.02710).

FILE=configs/examples/methods/maxrl.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.advantages $FILE:maxrl --algorithm.aggregation token_mean

The advantage is (reward - mean) / mean of the group, 0 in a group of mean 0. For rewards of 0 and 1 the mean estimates
the pass rate p. The gradient is that of log p, expanded up to pass@(G - 1): a prompt that is rarely solved weighs more.
"""

from grpo.algorithm.advantages import group_mean_std


def maxrl(x):
    """Return the advantages [P, G]. Raises ValueError for rewards below 0."""
    if (x.rewards_PG < 0).any():
        raise ValueError(
            f"maxrl divides by a group's mean reward, which must be a pass rate, and a reward is "
            f"{x.rewards_PG.min().item():g}; leave out reward functions that give less than 0 and a KL in the reward, "
            "or use group_mean"
        )
    mean_P1, _ = group_mean_std(x.rewards_PG, x.has_PG)
    return (x.rewards_PG - mean_P1) / mean_P1.where(mean_P1 > 0, 1.0)
