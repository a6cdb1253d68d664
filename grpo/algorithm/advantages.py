"""Rewards of a group -> advantages; a teacher's log-probs -> advantages.

The S sequences of a step lie group after group: sequences 0 .. G-1 answer the first prompt, G .. 2G-1 the second, ...
A completion without a reward has no advantage either, and everything is compared without it.
"""

import torch

from grpo.algorithm.kl import kl
from grpo.config import Advantages
from grpo.types import TrainBatch

# Added to the std, as in TRL. Rewards live on a scale of about 1, so it matters only for nearly equal rewards.
STD_EPS = 1e-4


def group_advantages(
    rewards_S: torch.Tensor, has_reward_S: torch.Tensor, group_size: int, kind: Advantages
) -> torch.Tensor:
    """Compare every reward with those of the other completions of its prompt; float32 [S], 0 where there is no reward.

    Mean and std are over the rewards that there are, std with ddof=1. Except with `none`, a group in which all rewards
    are equal gives exactly 0, and so does one with a single reward.

    `group_std`: (r - group mean) / (group std + 1e-4) (Shao et al. 2024, arXiv:2402.03300, section 4.1.2; ddof and
    epsilon as in TRL).
    `group_mean`: r - group mean, which does not blow up the easy and the hard prompts (Liu et al. 2025,
    arXiv:2503.20783).
    `batch_std`: (r - group mean) / (std of all rewards of the step + 1e-4) (Liu et al. 2025, arXiv:2508.08221, Lite
    PPO).
    `rloo`: r - mean of the OTHER rewards of the group, which is n / (n - 1) * (r - group mean) for n rewards (Ahmadian
    et al. 2024, arXiv:2402.14740).
    `none`: r.

    `rewards_S` is float [S], anything finite where `has_reward_S` (bool [S]) is False. Raises ValueError if S is no
    multiple of `group_size`, or a reward is not finite.
    """
    # float64, so that the mean of G equal rewards is that reward and not one rounding error away, over 1e-4
    rewards_PG, there_PG = _by_group(rewards_S, has_reward_S, group_size)
    num_rewards_P1 = there_PG.sum(dim=1, keepdim=True)
    mean_P1 = rewards_PG.sum(dim=1, keepdim=True) / num_rewards_P1.clamp(min=1)
    differ_P1 = ~zero_variance(rewards_S, has_reward_S, group_size)[:, None]
    centered_PG = (rewards_PG - mean_P1).where(there_PG & differ_P1, 0.0)
    if kind == "group_std":
        variance_P1 = centered_PG.square().sum(dim=1, keepdim=True) / (num_rewards_P1 - 1).clamp(min=1)
        advantages_PG = centered_PG / (variance_P1.sqrt() + STD_EPS)
    elif kind == "group_mean":
        advantages_PG = centered_PG
    elif kind == "batch_std":
        num_rewards = num_rewards_P1.sum()
        squares_PG = (rewards_PG - rewards_PG.sum() / num_rewards.clamp(min=1)).square().where(there_PG, 0.0)
        variance = squares_PG.sum() / (num_rewards - 1).clamp(min=1)
        advantages_PG = centered_PG / (variance.sqrt() + STD_EPS)
    elif kind == "rloo":
        advantages_PG = centered_PG * num_rewards_P1 / (num_rewards_P1 - 1).clamp(min=1)
    elif kind == "none":
        advantages_PG = rewards_PG
    else:
        raise ValueError(
            f"advantages={kind!r} is unknown; use 'group_std', 'group_mean', 'batch_std', 'rloo' or 'none'"
        )
    return advantages_PG.flatten().float()


def teacher_advantages(batch: TrainBatch) -> torch.Tensor:
    """log teacher - log policy of each sampled token: float32 [N], nats, 0 outside the loss mask.

    The teacher is the batch's reference, the policy the one that sampled. On-policy distillation (Lu and Thinking
    Machines Lab 2025, "On-Policy Distillation"; Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024,
    arXiv:2306.08543): over tokens drawn from the policy this is minus the reverse KL(policy || teacher) of the next
    token, and its policy gradient is the gradient of that KL. What a token does to the KL of later ones is left out.
    Within +-20 (see `kl`).
    """
    return -kl(batch.generator_logprobs_N, batch.ref_logprobs_N, batch.loss_mask_N, "k1")


def zero_variance(rewards_S: torch.Tensor, has_reward_S: torch.Tensor, group_size: int) -> torch.Tensor:
    """bool [P]: no two rewards of the group differ, so comparing them teaches nothing.

    True for equal rewards, for a single reward, and for a group without any. Raises as `group_advantages` does.
    """
    rewards_PG, there_PG = _by_group(rewards_S, has_reward_S, group_size)
    lowest_P = rewards_PG.masked_fill(~there_PG, torch.inf).amin(dim=1)
    highest_P = rewards_PG.masked_fill(~there_PG, -torch.inf).amax(dim=1)
    return lowest_P >= highest_P  # inf and -inf in a group without a reward


def _by_group(
    rewards_S: torch.Tensor, has_reward_S: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards (float64, 0 where there is none) and which there are, viewed as [P, G] after the checks."""
    if group_size < 1 or len(rewards_S) % group_size:
        raise ValueError(
            f"{len(rewards_S)} rewards do not split into groups of group_size={group_size}; "
            "pass one reward per completion"
        )
    rewards_S = rewards_S.double().where(has_reward_S, 0.0)
    broken_S = ~rewards_S.isfinite()
    if broken_S.any():
        first = int(broken_S.int().argmax())
        raise ValueError(f"reward of sequence {first} is {rewards_S[first].item()}; rewards must be finite")
    return rewards_S.view(-1, group_size), has_reward_S.view(-1, group_size)
