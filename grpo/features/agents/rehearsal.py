"""An agent without a model or an engine: its requests are answered by words and calls."""

import functools
import itertools
import json
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Any

from grpo.data.rows import Example
from grpo.features.agents.episodes import Agents
from grpo.features.agents.tree import Turn
from grpo.text import one_line, printable
from grpo.types import Piece, Prompt, Rollout

WORDS = ["attic", "box", "door", "east", "find", "go", "7", "42"]


def rehearse(config: Any, tokenizer: Any, examples: Sequence[Example], num_episodes: int) -> bool:
    """Play episodes of the config's agent on these rows, and print their trees. Returns whether one was lost."""
    rows = itertools.islice(itertools.cycle(examples), num_episodes)
    prompts = [Prompt(number, [], example.columns) for number, example in enumerate(rows)]
    with closing(Agents(config, tokenizer, [tokenizer.eos_token_id])) as agents:
        rollouts = agents.play(prompts, 0, functools.partial(answer_all, tokenizer))
    for rollout in rollouts:
        print(printable("\n".join(lines_of(rollout, tokenizer))))
    return any(rollout.episode["failure"] for rollout in rollouts)


def answer_all(tokenizer: Any, ended: Collection, begun: Collection) -> dict[Turn, Piece]:
    """Answer each request by a word and calls of some of its tools. It is called in place of `decode`."""
    pieces = {}
    for _, _, _, max_tokens, turn in begun:
        text = random.choice(WORDS)
        for tool in turn.body.get("tools") or []:
            names = tool["function"].get("parameters", {}).get("properties", {})
            arguments = dict.fromkeys(names, random.choice(WORDS))
            call = {"name": tool["function"]["name"], "arguments": arguments}
            if random.random() < 0.5:
                text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        ids = tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"][:max_tokens]
        pieces[turn] = Piece.sampled(ids, [0.0] * len(ids), ended_by="stop")
    return pieces


def lines_of(rollout: Rollout, tokenizer: Any) -> Iterator[str]:
    """Yield what came of an episode, and its sequences: > is what the model wrote, = what an earlier sequence has."""
    episode = rollout.episode
    yield f"--- reward {episode['reward']}; ended by {rollout.ended_by} {episode['failure']}"
    for number, pieces in enumerate(rollout.sequences):
        yield f"sequence {number}"
        for piece in pieces:
            mark = " "
            if piece.is_sampled:
                mark = "=" if piece.is_repeated else ">"
            yield f"{mark} {one_line(tokenizer.decode(piece.ids_T))}"
