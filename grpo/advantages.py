"""Rewards of a group -> advantages.

The S sequences of a step lie group after group: sequences 0 .. G-1 answer the first prompt, G .. 2G-1 the second, ...
A NaN reward means "no reward": that completion gets a NaN advantage, and its group is judged without it.

Layer 0: pure functions.
"""

from typing import Literal

import torch

# Added to the group's std, as in TRL. Rewards live on a scale of about 1, so it matters only for nearly equal rewards.
STD_EPS = 1e-4


def group_advantages(rewards_S: torch.Tensor, group_size: int, kind: Literal["group", "group_mean"]) -> torch.Tensor:
    """Compare every reward with those of the other completions of its prompt; float32 [S], NaN where the reward is NaN.

    `group`: (r - mean) / (std + 1e-4), std with ddof=1 (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; ddof and
    epsilon as in TRL). `group_mean`: r - mean, which does not blow up the easy and the hard prompts (Liu et al. 2025,
    arXiv:2503.20783). Mean and std are those of the group's rewards that are not NaN. A group in which all rewards are
    equal gives exactly 0, and so does one with a single reward.

    Raises:
        ValueError: S is no multiple of `group_size`, a reward is infinite, or `kind` is unknown.
    """
    # float64, so that the mean of G equal rewards is that reward and not one rounding error away, over 1e-4
    rewards_PG = _by_group(rewards_S, group_size).double()
    mean_P1 = rewards_PG.nanmean(dim=1, keepdim=True)
    centered_PG = rewards_PG - mean_P1
    # centered is NaN in a row that has no reward at all, as it should be, so only rows with rewards are set to 0
    centered_PG = centered_PG.masked_fill(_all_equal(rewards_PG)[:, None] & ~rewards_PG.isnan(), 0.0)
    if kind == "group_mean":
        return centered_PG.flatten().float()
    if kind == "group":
        num_rewards_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True)
        variance_P1 = centered_PG.square().nansum(dim=1, keepdim=True) / (num_rewards_P1 - 1).clamp(min=1)
        return (centered_PG / (variance_P1.sqrt() + STD_EPS)).flatten().float()
    raise ValueError(f"advantages={kind!r} is unknown; use 'group' or 'group_mean'")


def zero_variance_groups(rewards_S: torch.Tensor, group_size: int) -> int:
    """Count the groups whose rewards (at least one that is not NaN) are all equal: they teach nothing in this step."""
    return int(_all_equal(_by_group(rewards_S, group_size)).sum())


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


def _all_equal(rewards_PG: torch.Tensor) -> torch.Tensor:
    """bool [P]: the group has a reward, and no two differ."""
    no_reward_PG = rewards_PG.isnan()
    lowest_P = rewards_PG.masked_fill(no_reward_PG, torch.inf).amin(dim=1)
    highest_P = rewards_PG.masked_fill(no_reward_PG, -torch.inf).amax(dim=1)
    return lowest_P == highest_P
