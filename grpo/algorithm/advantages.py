"""Rewards of a group -> advantages; a teacher's log-probs -> advantages.

The S sequences of a step lie group after group, so rewards are a [P, G] matrix. `algorithm.advantages` names a function

    advantages(rewards_PG, has_PG) -> advantages_PG

where `has_PG` (bool) says which rewards there are; the others are 0 in `rewards_PG` (float64), have no advantage
whatever is returned for them, and must not count in a statistic. `group_std`, GRPO's, stands in train_grpo.py; one of
your own is named `path/file.py:function`.
"""

from collections.abc import Callable

import torch

from grpo.algorithm.inputs import clamped
from grpo.algorithm.kl import kl
from grpo.config.user_files import load_function
from grpo.types import TrainBatch

Advantages = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_group(rewards_S: torch.Tensor, has_reward_S: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards as [P, G] in float64, 0 where there is none, and bool [P, G], which there are.

    float64, so that rewards far from 0 keep their differences. Raises ValueError if S is no multiple of `group_size`,
    or a reward that there is is not finite.
    """
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


def group_mean_std(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation (ddof=1) of the rewards that each group has, both [P, 1].

    The mean of equal rewards is exactly that reward and their deviation 0, so that they have no advantage at all, where
    one rounding error over 1e-4 would be one. A single reward and a group without any have a deviation of 0 too.
    """
    num_P1 = has_PG.sum(dim=1, keepdim=True)
    lowest_P1 = rewards_PG.masked_fill(~has_PG, torch.inf).amin(dim=1, keepdim=True)
    mean_P1 = rewards_PG.sum(dim=1, keepdim=True) / num_P1.clamp(min=1)
    mean_P1 = mean_P1.where(~equal_rewards(rewards_PG, has_PG)[:, None] | (num_P1 == 0), lowest_P1)
    squares_P1 = (rewards_PG - mean_P1).where(has_PG, 0).square().sum(dim=1, keepdim=True)
    return mean_P1, (squares_P1 / (num_P1 - 1).clamp(min=1)).sqrt()


def equal_rewards(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
    """Return bool [P]: no two rewards of the group differ, so comparing them teaches nothing.

    True for equal rewards, for a single reward, and for a group without any.
    """
    lowest_P = rewards_PG.masked_fill(~has_PG, torch.inf).amin(dim=1)
    highest_P = rewards_PG.masked_fill(~has_PG, -torch.inf).amax(dim=1)
    return lowest_P >= highest_P  # inf and -inf in a group without a reward


def group_mean(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
    """Return reward - mean of the group, which does not blow up easy and hard prompts (arXiv:2503.20783)."""
    mean_P1, _ = group_mean_std(rewards_PG, has_PG)
    return rewards_PG - mean_P1


def batch_std(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
    """Return (reward - mean of the group) / (std of all rewards of the step + 1e-4) (Lite PPO, arXiv:2508.08221)."""
    num = has_PG.sum()
    squares_PG = (rewards_PG - rewards_PG.sum() / num.clamp(min=1)).square().where(has_PG, 0.0)
    return group_mean(rewards_PG, has_PG) / ((squares_PG.sum() / (num - 1).clamp(min=1)).sqrt() + 1e-4)


def rloo(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
    """Return reward - mean of the OTHER rewards of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    For n rewards this is n / (n - 1) * (reward - mean of the group).
    """
    num_P1 = has_PG.sum(dim=1, keepdim=True)
    return group_mean(rewards_PG, has_PG) * num_P1 / (num_P1 - 1).clamp(min=1)


def return_to_go(
    batch: TrainBatch, rewards_S: torch.Tensor, has_reward_S: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Return float32 [N]: of each token the return of its turn - mean of that return over the OTHERS of the group.

    The return of turn k is what its rollout earned from then on, r - e_k: r is the whole reward, e_k what
    `get_reward` had given when the turn began, times its weight (e_1 = 0). So a turn's reward is what it adds to
    `get_reward`, and the last turn has the reward functions' too. The others are those that reached turn k; a turn that
    no other one reached has the advantage 0, as a single reward has. With one turn this is `rloo`. Tokens that no turn
    sampled have 0. Raises ValueError if the batch does not know of turns.

    REINFORCE's return from a step on with a baseline (Sutton and Barto 2018, section 13.4), here by turns. The baseline
    does not depend on what the rollout itself did, so it leaves the expected gradient as it is. Rewards that are
    centred for each turn and then summed do not: the mean of the later turns, which going on costs or earns, drops out.
    """
    if batch.turn_N is None:
        raise ValueError("algorithm.advantages=return_to_go needs episodes, whose turns have rewards; use rloo")
    shape = int(batch.turn_N.max()) + 1, batch.num_sequences  # [turn, S]; no turn is 0
    place = batch.turn_N, batch.owner_N
    earned = torch.zeros(shape).index_put(place, batch.earned_N).double()
    reached = torch.zeros(shape, dtype=torch.bool).index_put(place, batch.turn_N > 0)
    returns_PG, has_PG = by_group((rewards_S - earned).flatten(), (reached & has_reward_S).flatten(), group_size)
    return rloo(returns_PG, has_PG).where(has_PG, 0).view(shape)[place].float()


def none(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
    """Return the reward as it is."""
    return rewards_PG


ADVANTAGES: dict[str, Advantages] = {
    "group_mean": group_mean,
    "batch_std": batch_std,
    "rloo": rloo,
    "return_to_go": rloo,  # of whole rollouts; train_grpo.py goes on to their turns
    "none": none,
}


def named_advantages(name: str) -> Advantages:
    """Return the advantages of that name, or the user's `path/file.py:function`, whose result is checked.

    Raises what `load_function` raises. The user's function raises ValueError when it is called, unless it returns
    finite numbers [P, G].
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function = load_function(name, "advantages")

    def checked(rewards_PG: torch.Tensor, has_PG: torch.Tensor) -> torch.Tensor:
        advantages_PG = function(rewards_PG, has_PG)
        shape = getattr(advantages_PG, "shape", type(advantages_PG).__name__)
        if shape != rewards_PG.shape or not advantages_PG[has_PG].isfinite().all():
            raise ValueError(f"advantages {name} returned {shape}; return finite numbers of shape {rewards_PG.shape}")
        return advantages_PG

    return checked


def teacher_advantages(batch: TrainBatch) -> torch.Tensor:
    """Return log teacher - log policy of each sampled token: float32 [N], nats, 0 outside the loss mask.

    The teacher is the batch's reference, the policy the one that sampled. On-policy distillation (Lu and Thinking
    Machines Lab 2025, "On-Policy Distillation"; Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024,
    arXiv:2306.08543): over tokens drawn from the policy this is minus the reverse KL(policy || teacher) of the next
    token, and its policy gradient is the gradient of that KL. What a token does to the KL of later ones is left out.
    Within +-20 (see `kl`).

    In self-distillation the reference is the policy, or its start, behind a prompt with a hint. The papers differ:
    OPSD (Zhao et al. 2026, arXiv:2601.18734) has the start as teacher and a divergence over the whole vocabulary, with
    a gradient, in place of the sampled token; SDFT (Shenfeld et al. 2026, arXiv:2601.19897) an average over the
    policy's past weights and the reverse KL over the vocabulary; SDPO (Hübotter et al. 2026, arXiv:2601.20802) the
    current policy, held near its past, and the divergence over its likeliest tokens.
    """
    log_ratio_N = (batch.generator_logprobs_N - batch.ref_logprobs_N).where(batch.loss_mask_N, 0)
    return -kl(clamped(log_ratio_N), "k1")
