"""Rewards of a group -> advantages; a teacher's log-probs -> advantages.

`algorithm.advantages` names a function

    advantages(x: AdvantageInputs) -> advantages_PG

or, where tokens of a completion differ, advantages_N. What it returns for a completion without a reward is not used.
`group_std`, GRPO's, stands in train_grpo.py; one of your own is named `path/file.py:function`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo.algorithm.groups import by_group, equal_rewards
from grpo.algorithm.inputs import clamped
from grpo.config.user_files import load_function
from grpo.types import TrainBatch


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What a function of advantages sees of one step: P groups of G completions, scored by F reward functions.

    A missing value is 0 and must not count in a statistic; the fields `has_` are False there.
    """

    rewards_PG: Tensor
    """float64: weighted sums, minus the penalty with `algorithm.kl_in` reward."""
    has_PG: Tensor
    """bool: the completion has a reward."""
    parts_FPG: Tensor
    """float64: each reward function's unweighted value, the environment's first."""
    has_FPG: Tensor
    """bool: the function gave a value, and the completion has a reward."""
    weights_F: Tensor
    """float64: weight of each function in the sum."""
    batch: TrainBatch
    """The step's N tokens and P * G rollouts, group after group; `batch.rollout_N` is each token's rollout."""

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        group_size: int,
        weights: Mapping[str, float],
    ) -> "AdvantageInputs":
        """Return the rewards of a step's batch by group. weights: of each reward function, by its name.

        Raises ValueError for a reward that is not finite, and if there are weights of another number of functions.
        """
        parts_FR = batch.parts_FR
        if len(parts_FR) != len(weights):
            raise ValueError(
                f"the step has values of {len(parts_FR)} reward functions, and the config has {len(weights)} "
                f"({', '.join(weights)}); name those that scored it"
            )
        rewards_PG, has_PG = by_group(batch.rewards_R, batch.has_reward_R, group_size)
        has_FR = ~parts_FR.isnan() & batch.has_reward_R
        parts_FPG = parts_FR.double().where(has_FR, 0.0).view(-1, *has_PG.shape)
        weights_F = torch.tensor(list(weights.values()), dtype=torch.float64)
        return cls(rewards_PG, has_PG, parts_FPG, has_FR.view(parts_FPG.shape), weights_F, batch)

    def per_token(self, advantages: Tensor) -> Tensor:
        """Return each token's advantage, float32 [N], from those of completions [P, G] or of tokens [N].

        It is 0 for a completion without a reward.
        """
        rollout_N = self.batch.rollout_N
        advantages_N = advantages.flatten()[rollout_N] if advantages.ndim == 2 else advantages
        return advantages_N.where(self.has_PG.flatten()[rollout_N], 0).float()


def group_mean_std(rewards_PG: Tensor, has_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (ddof=1) of the rewards that each group has, both [P, 1].

    Equal rewards have exactly that reward as their mean and a deviation of 0, so their advantage is exactly 0 and not a
    rounding error divided by 1e-4. A single reward and a group without rewards have a deviation of 0 too.

    >>> has = torch.tensor([[True, True, True], [True, True, False]])
    >>> group_mean_std(torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 0.0]]), has)
    (tensor([[1.],
            [1.]]), tensor([[1.],
            [0.]]))
    """
    num_P1 = has_PG.sum(dim=1, keepdim=True)
    lowest_P1 = rewards_PG.masked_fill(~has_PG, torch.inf).amin(dim=1, keepdim=True)
    mean_P1 = rewards_PG.sum(dim=1, keepdim=True) / num_P1.clamp(min=1)
    mean_P1 = mean_P1.where(~equal_rewards(rewards_PG, has_PG)[:, None] | (num_P1 == 0), lowest_P1)
    squares_P1 = (rewards_PG - mean_P1).where(has_PG, 0).square().sum(dim=1, keepdim=True)
    return mean_P1, (squares_P1 / (num_P1 - 1).clamp(min=1)).sqrt()


def group_mean(x: AdvantageInputs) -> Tensor:
    """Return reward - mean of the group: no division that weighs easy and hard prompts more (arXiv:2503.20783)."""
    mean_P1, _ = group_mean_std(x.rewards_PG, x.has_PG)
    return x.rewards_PG - mean_P1


def rloo(x: AdvantageInputs) -> Tensor:
    """Return reward - mean of the OTHER rewards of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    For n rewards this is n / (n - 1) * (reward - mean of the group).
    """
    num_P1 = x.has_PG.sum(dim=1, keepdim=True)
    return group_mean(x) * num_P1 / (num_P1 - 1).clamp(min=1)


def return_to_go(x: AdvantageInputs) -> Tensor:
    """Return for each token the return of its turn - mean of that return over the OTHERS of the group, float64 [N].

    The return of turn k is what the rollout earned from that turn on, r - e_k. Here r is the whole reward, and e_k is
    what `get_reward` had given when the turn began, times its weight (e_1 = 0). So a turn earns what it adds to
    `get_reward`, and the last turn also earns the rewards of the functions. The others are the rollouts that reached
    turn k too; without any, the advantage is 0, as for a single reward. With one turn this is `rloo`. Tokens that no
    turn sampled have 0. Raises ValueError if the batch has no turns.

    This is REINFORCE's return with a baseline (Sutton and Barto 2018, section 13.4), by turns. The baseline does not
    depend on what the rollout itself did, so it does not change the expected gradient. Rewards that are centred for
    each turn and then summed do change it: the mean of the later turns, which going on costs or earns, drops out.
    """
    batch = x.batch
    if batch.turn_N is None:
        raise ValueError("algorithm.advantages=return_to_go needs episodes, whose turns have rewards; use rloo")
    shape = int(batch.turn_N.max()) + 1, batch.num_rollouts  # [turn, R]; no turn is 0
    index_N = batch.turn_N, batch.rollout_N
    earned = torch.zeros(shape).index_put(index_N, batch.earned_N).double()
    reached = torch.zeros(shape, dtype=torch.bool).index_put(index_N, batch.turn_N > 0)
    returns = x.rewards_PG.flatten() - earned
    has_return = reached & x.has_PG.flatten()
    returns_PG, has_PG = by_group(returns.flatten(), has_return.flatten(), x.has_PG.shape[1])  # a group for each turn
    return rloo(replace(x, rewards_PG=returns_PG, has_PG=has_PG)).where(has_PG, 0).view(shape)[index_N]


def none(x: AdvantageInputs) -> Tensor:
    """Return the reward as it is."""
    return x.rewards_PG


ADVANTAGES = {
    "group_mean": group_mean,
    "rloo": rloo,
    "return_to_go": return_to_go,
    "none": none,
}


def named_advantages(name: str) -> Callable[[AdvantageInputs], Tensor]:
    """Return the advantages of that name, or the user's `path/file.py:function`; raises what `load_function` does.

    The user's function raises ValueError when it is called, unless it returns finite numbers [P, G] or [N].
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function = load_function(name, "advantages")

    def checked(x: AdvantageInputs) -> Tensor:
        advantages = function(x)
        shape = getattr(advantages, "shape", type(advantages).__name__)
        if shape not in (x.has_PG.shape, x.batch.rollout_N.shape) or not x.per_token(advantages).isfinite().all():
            raise ValueError(
                f"advantages {name} returned {shape}; return finite numbers, of shape {tuple(x.has_PG.shape)} for "
                f"completions or {tuple(x.batch.rollout_N.shape)} for tokens"
            )
        return advantages

    return checked


def teacher_advantages(batch: TrainBatch) -> Tensor:
    """Return log teacher - log policy of each sampled token: float32 [N], nats, 0 outside the loss mask.

    The teacher is the batch's reference, the policy the one that sampled. On-policy distillation (Lu and Thinking
    Machines Lab 2025, "On-Policy Distillation"; Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024,
    arXiv:2306.08543): over tokens drawn from the policy this is minus the reverse KL(policy || teacher) of the next
    token, and its policy gradient is the gradient of that KL. What a token does to the KL of later ones is left out.
    Values are clamped to +-20.
    """
    log_ratio_N = (batch.generator_logprobs_N - batch.ref_logprobs_N).where(batch.loss_mask_N, 0)
    return -clamped(log_ratio_N)
