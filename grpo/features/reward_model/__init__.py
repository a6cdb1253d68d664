"""A frozen sequence classifier that scores what the policy wrote, on the ranks of the reference."""

from typing import Any

from grpo.config.fields import REWARD_MODEL


def reward_part(config: Any) -> tuple[str, Any]:
    """Open its tokenizer on rank 0. Returns the part of the reward that it computes; its model comes with `load`."""
    from grpo.features.reward_model.model import open_reward_model

    return REWARD_MODEL, open_reward_model(config.reward.model, config.trainer)


def load(config: Any, folder: str, roles: Any) -> Any:
    """Load the model, in parts over the reference ranks. Collective over these; every learner calls it."""
    from grpo.features.reward_model.model import RewardModel

    return RewardModel(config.model, config.trainer, folder, roles)
