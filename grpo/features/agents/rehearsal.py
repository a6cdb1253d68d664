"""An agent without a model or an engine: its requests are answered by words and calls."""

import functools
import random
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any

from grpo import features
from grpo.data.rows import Example
from grpo.features.agents.episodes import Agents
from grpo.features.agents.tree import Turn
from grpo.report.samples import hung_line
from grpo.text import one_line
from grpo.types import Piece, Prompt, Rollout


def rehearse(config: Any, tokenizer: Any, examples: Sequence[Example]) -> bool:
    """Play an episode of the config's agent on each row, and print their trees. Returns whether one was lost.

    Raises ValueError where no feature writes calls of tools.
    """
    if not features.offers("CALLS"):
        raise ValueError("check_environment needs grpo/features/environments, which this checkout lacks")
    prompts = [Prompt(number, [], example.columns) for number, example in enumerate(examples)]
    with closing(Agents(config, tokenizer, [tokenizer.eos_token_id])) as agents:
        rollouts = agents.play(prompts, 0, functools.partial(answer_all, tokenizer, config.environment.calls))
    for rollout in rollouts:
        show(rollout, tokenizer)
    print(hung_line(rollouts))
    return any(rollout.episode["failure"] for rollout in rollouts)


def answer_all(
    tokenizer: Any,
    style: str,
    ended: Collection,
    begun: Collection,
) -> dict[Turn, Piece]:
    """Answer each request in place of an engine: if it has tools, every other time by a call, else by a word."""
    random_turn = features.offers("CALLS")["random_turn"]
    pieces = {}
    for _, _, _, max_tokens, turn in begun:
        tools = random.choice([turn.body.get("tools"), None])
        text = random_turn(tools, style, random) + tokenizer.eos_token
        ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
        pieces[turn] = Piece.sampled(ids, [0.0] * len(ids), ended_by="stop")
    return pieces


def show(rollout: Rollout, tokenizer: Any) -> None:
    """Print what came of an episode, and its sequences: > is what the model wrote, = what an earlier sequence has."""
    print(f"--- reward {rollout.episode['reward']}; ended by {rollout.ended_by} {rollout.episode['failure']}")
    for number, pieces in enumerate(rollout.sequences):
        print(f"sequence {number}")
        for piece in pieces:
            mark = " "
            if piece.is_sampled:
                mark = "=" if piece.is_repeated else ">"
            print(mark, one_line(tokenizer.decode(piece.ids_T)))
