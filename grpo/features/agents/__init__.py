"""Agents that call an OpenAI-compatible endpoint, trained as they are: the endpoint stands beside the engine's loop."""

from collections.abc import Iterator, Sequence
from typing import Any

from grpo.config.engine_options import needs_texts


def problems(config: Any) -> Iterator[str]:
    """Yield what does not go with an agent."""
    environment = config.environment
    refused = {
        "environment.name or environment.tools: the agent answers the turns": environment.enabled,
        "environment.answer_steps or environment.rounds: nobody knows when it asks next": (
            environment.answer_steps or environment.rounds
        ),
        "algorithm.advantages=return_to_go: it gives one reward, at its end": config.turns_earn,
        "sampling.carry_over: it does not outlive its step": config.sampling.carry_over,
        "a text as data.prompt_template: it has no turns; give a .jinja file": config.data.is_text_template,
        "generator.stop, or generator.sampling other than top_p, top_k and min_p: a request has its own `stop`": (
            needs_texts(config.generator)
        ),
    }
    for reason, is_set in refused.items():
        if is_set:
            yield f"environment.agent does not go with {reason}"


def check(config: Any, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
    """Refuse an agent that cannot be loaded, and print what it is."""
    from grpo.features.agents.process import load_agent

    load_agent(config.environment.agent)
    print(f"agent {config.environment.agent}")


def rehearse(config: Any, tokenizer: Any, examples: Sequence[Any], by_hand: bool) -> bool:
    """Play episodes of an agent without a model, and print them. Returns whether one was lost."""
    from grpo.features.agents import rehearsal

    if by_hand:
        raise SystemExit("--play is for environments; an agent is answered by words")
    return rehearsal.rehearse(config, tokenizer, examples)


def reward_part(config: Any) -> tuple[str, Any]:
    """Return the part of the reward that an agent gives, with its name."""
    from grpo.rewards.pool import EpisodePart

    return config.environment.reward_name, EpisodePart()


def open_episodes(config: Any, folder: str, stop_token_ids: Sequence[int], roles: Any) -> Any:
    """Start the agents' processes on the first rank of an engine. Returns what plays their episodes."""
    from grpo.data.chat import load_tokenizer
    from grpo.features.agents.episodes import Agents

    tokenizer = load_tokenizer(folder, config.data)
    return Agents(config, tokenizer, stop_token_ids, roles.replica.index(roles.rank), len(roles.replica))
