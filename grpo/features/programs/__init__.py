"""Programs that a policy wrote: the reward `code_reward`, and the tool `python` of environments."""

from typing import Any

REWARDS = {"code_reward": "grpo.features.programs.code_reward:code_reward"}
TOOLS = {"python": "grpo.features.programs.tool:python_tool"}


def before_rewards(config: Any) -> str:
    """Try out a program, and return what programs run under here. Raises ValueError if they cannot be locked down."""
    from grpo.features.programs.run import check_programs

    return check_programs(config.reward.allow_without_landlock)
