"""The door to the features, the only way from the core to them. Any folder beside this file can be deleted.

A feature is a folder whose `__init__.py` offers some of these, each called in one place:

    problems(config)            what it needs and does not go with, a sentence each       config/checks.py
    REWARDS, TOOLS, CALLS       name -> "module:function": rewards, makers of tools, what
                                reads and tries calls of tools        rewards/, environments, agents
    CHECKS                      name -> "module:function": of a loss                tools/check_loss.py
    FAMILIES                    model_type -> "module:family"                      models/families.py
    tool_schemas(config)        of the tools that prompts show                            run/start.py
    check(config, ..)           a check on rank 0, once the policy's files are read       run/scorer.py
    before_rewards(config)      a check on rank 0; returns a line to print                run/scorer.py
    reward_part(config)         name and part of the reward that no function computes     run/scorer.py
    lines()                     functions that warn of a step's rollouts, each once       run/scorer.py
    fit_to_machine(config, ..)  decides what the config leaves open, and judges         run/session.py
    open_episodes(config, ..)   plays rollouts of several turns on the engine             run/session.py
    load(config, folder, roles) a model on the learners                                   run/session.py
    open_repository, push       a place for the exported model, before and after the run  run/session.py
    open_tracker(config, ..)    gets metrics and samples as the log does                  run/session.py
    show_examples(examples, ..) prints examples of SFT                                    run/start.py
    rehearse(config, ..)        plays episodes without a model                    tools/check_environment.py
    try_algorithm(algorithm)    calls a user's loss, advantages, aggregation              run/start.py

Standard library alone: worker processes and the checks of a config come through here. No feature imports another.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

# Name of a folder -> whether a config turns the feature on
FEATURES: dict[str, Callable[[Any], Any]] = {
    "agents": lambda config: config.environment.agent,
    "environments": lambda config: config.environment.enabled or config.turns_earn,
    "hub": lambda config: config.checkpoint.push_to_hub,
    "programs": lambda config: "code_reward" in config.reward.functions or "python" in config.environment.tools,
    "reward_model": lambda config: config.reward.model,
    "show": lambda config: getattr(config, "show", 0),
    "wandb": lambda config: config.metrics.wandb_project,
    # no config names these: two look at a run before it starts, and a model's folder says its family
    "machine": lambda config: "machine" in present(),
    "qwen3_5": lambda config: "qwen3_5" in present(),
    "trial": lambda config: "trial" in present(),
}


def present() -> list[str]:
    """List the features whose folders are here."""
    return [name for name in FEATURES if importlib.util.find_spec(f"grpo.features.{name}")]


def call(config: Any, hook: str, *arguments: Any) -> list[Any]:
    """Call the hook of each feature that the config turns on and that has it. Returns what each returns.

    Raises ValueError if a feature that is turned on is deleted.
    """
    results = []
    for name, is_on in FEATURES.items():
        if not is_on(config):
            continue
        if name not in present():
            raise ValueError(f"the config needs grpo/features/{name}, which this checkout lacks; turn it off")
        feature = importlib.import_module(f"grpo.features.{name}")
        if hasattr(feature, hook):
            results.append(getattr(feature, hook)(*arguments))
    return results


def offers(hook: str) -> dict[str, Any]:
    """Return what all features that are here offer under this hook, by its own names."""
    offered = {}
    for feature in present():
        table = getattr(importlib.import_module(f"grpo.features.{feature}"), hook, {})
        for name, target in table.items():
            module, _, function = target.partition(":")
            offered[name] = getattr(importlib.import_module(module), function)
    return offered
