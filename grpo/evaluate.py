"""Held-out accuracy between steps, with the weights the generators hold.

Greedy, so it draws no random number and leaves training as it is.
"""

from grpo.config import GRPOConfig
from grpo.types import Rollout


def evaluation_metrics(config: GRPOConfig, rollouts: list[Rollout]) -> dict[str, float]:
    """`eval/accuracy` (share for which the first reward function gives 1 or more), reward, lengths, truncation."""
    first = next(iter(config.reward.functions))
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return {
        "eval/accuracy": sum((r.rewards[first] or 0) >= 1 for r in rollouts) / len(rollouts),
        "eval/reward_mean": sum(rewards) / max(len(rewards), 1),
        "eval/completion_length_mean": sum(len(r.completion.ids) for r in rollouts) / len(rollouts),
        "eval/truncated_share": sum(r.completion.truncated for r in rollouts) / len(rollouts),
    }
