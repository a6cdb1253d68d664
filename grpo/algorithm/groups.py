"""What the rewards of a step's groups say: whether comparing them teaches anything, and how many completions passed.

Rewards become tensors here. R rollouts lie group after group, P groups of G; F parts of the reward.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo.types import Rollout


def reward_tensors(rollouts: Sequence[Rollout], parts: Iterable[str] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rewards (float32 [R], 0 for None), which there are (bool [R]), and values of parts of the reward.

    The values are float32 [F, R], unweighted, and NaN for None.
    """
    rewards_R = torch.tensor([r.reward or 0.0 for r in rollouts])
    has_reward_R = torch.tensor([r.reward is not None for r in rollouts])
    values = []
    for part in parts:
        values.append([r.rewards[part] for r in rollouts])
    values_FR = np.array(values, dtype=np.float32)  # numpy makes NaN of None
    values_FR = values_FR.reshape(-1, len(rollouts))
    return rewards_R, has_reward_R, torch.from_numpy(values_FR)


def by_group(rewards_R: Tensor, has_reward_R: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the rewards as float64 [P, G], 0 where a completion has none, and bool [P, G]: it has one.

    float64, so that rewards far from 0 keep their differences. Raises ValueError if a reward is not finite.
    """
    rewards_R = rewards_R.double().where(has_reward_R, 0.0)
    broken_R = ~rewards_R.isfinite()
    if broken_R.any():
        first = int(broken_R.int().argmax())
        raise ValueError(f"reward of rollout {first} is {rewards_R[first].item()}; rewards must be finite")
    return rewards_R.view(-1, group_size), has_reward_R.view(-1, group_size)


def equal_rewards(rewards_PG: Tensor, has_PG: Tensor) -> Tensor:
    """Return bool [P]: no two rewards of the group differ, so comparing them teaches nothing.

    True for equal rewards, for a single reward, and for a group without any. Values of parts [F, P, G] give [F, P].

    >>> equal_rewards(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool))
    tensor([False,  True])
    """
    lowest_P = rewards_PG.masked_fill(~has_PG, torch.inf).amin(dim=-1)
    highest_P = rewards_PG.masked_fill(~has_PG, -torch.inf).amax(dim=-1)
    return lowest_P >= highest_P  # inf and -inf in a group without a reward


def are_equal(rollouts: Sequence[Rollout], group_size: int) -> Tensor:
    """Return bool [P]: the rewards of the group are all equal or missing."""
    rewards_R, has_reward_R, _ = reward_tensors(rollouts)
    rewards_PG, has_PG = by_group(rewards_R, has_reward_R, group_size)
    return equal_rewards(rewards_PG, has_PG)


def are_informative(rollouts: Sequence[Rollout], group_size: int, judging_parts: Sequence[str]) -> Tensor:
    """Return bool [P]: rewards of the group differ, and not by length alone.

    judging_parts: the parts of the reward that count and look at more than length. If there are some, one must differ.
    """
    _, has_reward_R, parts_FR = reward_tensors(rollouts, judging_parts)
    informative_P = ~are_equal(rollouts, group_size)
    if judging_parts:
        has_PG = has_reward_R.view(-1, group_size)
        parts_FR = parts_FR.masked_fill(parts_FR.isnan(), torch.inf)  # None differs from any value
        parts_FPG = parts_FR.view(-1, *has_PG.shape)
        informative_P &= ~equal_rewards(parts_FPG, has_PG).all(dim=0)
    return informative_P


def pass_values(rollouts: Sequence[Rollout], functions: Sequence[str]) -> Tensor:
    """Return float64 [R]: the value of the first of `functions` that gave one, by which a completion passes.

    NaN if none did, or if one before it failed.
    """
    values = []
    for rollout in rollouts:
        deciding = [f for f in functions if f in rollout.failures or rollout.rewards.get(f) is not None]
        values.append(rollout.rewards.get(deciding[0]) if deciding else None)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def pass_rate(values_R: Tensor, pass_value: float) -> float | None:
    """Return the share of `pass_values` that are at least `pass_value`, without NaN; None if all are NaN."""
    known_R = values_R[~values_R.isnan()]
    if not len(known_R):
        return None
    return (known_R >= pass_value).double().mean().item()
