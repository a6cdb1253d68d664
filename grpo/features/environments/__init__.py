"""Turns, tools and environments that answer a policy: with these a rollout is a conversation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo.config.engine_options import needs_texts

# By what name an episode is lost that has functions as tools and no class
TOOLS_ALONE = "environment.tools"
CALLS = {
    "parse": "grpo.features.environments.calls:parse",
    "style_of": "grpo.features.environments.calls:style_of",
    "random_turn": "grpo.features.environments.calls:random_turn",
}


def problems(config: Any) -> Iterator[str]:
    """Yield what does not go with an environment, or is missing for one."""
    environment = config.environment
    if not environment.enabled:
        yield "algorithm.advantages=return_to_go needs an environment: it compares turns; without them use rloo"
    if config.sampling.carry_over:
        yield (
            "sampling.carry_over does not go with an environment: it does not outlive its step; set "
            "--sampling.carry-over 0"
        )
    if needs_texts(config.generator):
        yield (
            "generator.stop, or generator.sampling other than top_p, top_k and min_p, does not go with an environment: "
            "it would see each turn alone; use "
            "generator.stop_token_ids"
        )
    if config.data.is_text_template:
        yield "a text as data.prompt_template does not go with an environment: it has no turns; give a .jinja file"
    if environment.rounds and environment.answer_steps:
        yield "environment.rounds does not go with answer_steps: both say when an answer joins; drop one"
    for spec in environment.all_classes.values():
        if ":" not in spec:
            yield (
                f"environment.name has {spec!r}, which names no class in a file; write path/file.py:Class "
                "(functions and `python` belong in environment.tools)"
            )
    if environment.are_several and not config.data.row and "environment" not in config.data.columns:
        yield (
            "several classes in environment.name need a column that says which a row gets: "
            "--data.columns environment COLUMN"
        )


def tool_schemas(config: Any) -> dict[str, Any]:
    """Return the JSON schemas of each environment's tools, as the chat template gets them, by its name."""
    from grpo.features.environments.tools import load_toolboxes

    toolboxes = load_toolboxes(config.environment)
    return {name: toolbox.schemas for name, toolbox in toolboxes.items()}


def check(config: Any, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
    """Refuse an environment whose class, functions or chat template cannot be used, and print what it is."""
    from grpo.features.environments.episodes import check_environment

    check_environment(config, tokenizer, stop_token_ids)


def rehearse(config: Any, tokenizer: Any, examples: Sequence[Any], by_hand: bool) -> bool:
    """Play episodes of an environment without a model, and print them. Returns whether one was lost."""
    from grpo.features.environments import rehearsal

    return rehearsal.rehearse(config, tokenizer, examples, by_hand)


def reward_part(config: Any) -> tuple[str, Any]:
    """Return the part of the reward that an environment gives, with its name; that of tools alone has no weight."""
    from grpo.rewards.pool import EpisodePart

    environment = config.environment
    return environment.reward_name if environment.all_classes else TOOLS_ALONE, EpisodePart()


def open_episodes(config: Any, folder: str, stop_token_ids: Sequence[int], roles: Any) -> Any:
    """Start the environments of this rank's replica. Returns what plays its episodes."""
    from grpo.features.environments.episodes import Episodes

    return Episodes(config, folder, stop_token_ids, roles)


def lines() -> list[Callable]:
    """Return what makes warnings of a step's rollouts, each of which is given once."""
    from grpo.features.environments.step_lines import unread_calls_line

    return [unread_calls_line]
