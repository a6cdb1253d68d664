"""Rewards of a group -> advantages.

The S sequences of a step lie group after group: sequences 0 .. G-1 answer the first prompt, G .. 2G-1 the second, ...
A NaN reward means "no reward": that completion gets a NaN advantage, and everything is judged without it.

Layer 0: pure functions.
"""

import torch

from grpo.config import Advantages

# Added to the std, as in TRL. Rewards live on a scale of about 1, so it matters only for nearly equal rewards.
STD_EPS = 1e-4


def group_advantages(rewards_S: torch.Tensor, group_size: int, kind: Advantages) -> torch.Tensor:
    """Compare every reward with those of the other completions of its prompt; float32 [S], NaN where the reward is NaN.

    Mean and std are those of the rewards that are not NaN, std with ddof=1; but for `none`, a group in which all
    rewards are equal gives exactly 0, and so does one with a single reward.

    `group_std`: (r - group mean) / (group std + 1e-4) (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; ddof and
    epsilon as in TRL).
    `group_mean`: r - group mean, which does not blow up the easy and the hard prompts (Liu et al. 2025,
    arXiv:2503.20783).
    `batch_std`: (r - group mean) / (std of all rewards of the step + 1e-4) (Liu et al. 2025, arXiv:2508.08221, Lite
    PPO).
    `rloo`: r - mean of the OTHER rewards of the group, which is n / (n - 1) * (r - group mean) for n rewards (Ahmadian
    et al. 2024, arXiv:2402.14740).
    `none`: r.

    Raises:
        ValueError: S is no multiple of `group_size`, a reward is infinite, or `kind` is unknown.
    """
    # float64, so that the mean of G equal rewards is that reward and not one rounding error away, over 1e-4
    rewards_PG = _by_group(rewards_S, group_size).double()
    if kind == "none":
        return rewards_PG.flatten().float()
    centered_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    # centered is NaN in a row that has no reward at all, as it should be, so only rewards that are there are set to 0
    same_P1 = _no_two_differ(rewards_PG)[:, None]
    centered_PG = centered_PG.masked_fill(same_P1 & ~rewards_PG.isnan(), 0.0)
    num_rewards_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True)
    if kind == "group_mean":
        advantages_PG = centered_PG
    elif kind == "group_std":
        variance_P1 = centered_PG.square().nansum(dim=1, keepdim=True) / (num_rewards_P1 - 1).clamp(min=1)
        advantages_PG = centered_PG / (variance_P1.sqrt() + STD_EPS)
    elif kind == "batch_std":
        squares_PG = (rewards_PG - rewards_PG.nanmean()).square()
        variance = squares_PG.nansum() / (num_rewards_P1.sum() - 1).clamp(min=1)
        advantages_PG = centered_PG / (variance.sqrt() + STD_EPS)
    elif kind == "rloo":
        advantages_PG = centered_PG * num_rewards_P1 / (num_rewards_P1 - 1).clamp(min=1)
    else:
        raise ValueError(
            f"advantages={kind!r} is unknown; use 'group_std', 'group_mean', 'batch_std', 'rloo' or 'none'"
        )
    return advantages_PG.flatten().float()


def zero_variance(rewards_S: torch.Tensor, group_size: int) -> torch.Tensor:
    """bool [P]: no two rewards of the group differ, so comparing them teaches nothing.

    True for equal rewards, for a single reward, and for a group without any.

    Raises:
        ValueError: S is no multiple of `group_size`, or a reward is infinite.
    """
    return _no_two_differ(_by_group(rewards_S, group_size))


def zero_variance_groups(rewards_S: torch.Tensor, group_size: int) -> int:
    """Count the groups of `zero_variance`."""
    return int(zero_variance(rewards_S, group_size).sum())


def _by_group(rewards_S: torch.Tensor, group_size: int) -> torch.Tensor:
    """View [S] as [P, G] after the checks: P prompts, G completions of each."""
    if group_size < 1 or len(rewards_S) % group_size:
        raise ValueError(
            f"{len(rewards_S)} rewards do not split into groups of group_size={group_size}; "
            "pass one reward per completion, NaN where there is none"
        )
    if rewards_S.isinf().any():
        # inf - mean(inf) is NaN, which would pass silently as "no reward"
        raise ValueError(
            f"reward of sequence {int(rewards_S.isinf().int().argmax())} is infinite; rewards must be finite"
        )
    return rewards_S.reshape(-1, group_size)


def _no_two_differ(rewards_PG: torch.Tensor) -> torch.Tensor:
    no_reward_PG = rewards_PG.isnan()
    lowest_P = rewards_PG.masked_fill(no_reward_PG, torch.inf).amin(dim=1)
    highest_P = rewards_PG.masked_fill(no_reward_PG, -torch.inf).amax(dim=1)
    return lowest_P >= highest_P  # inf and -inf in a group without a reward
