"""An agent without a model or an engine: a stand-in answers its requests by words and calls."""

import itertools
import json
import pathlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from grpo.config.user_files import load_function
from grpo.data.rows import Example
from grpo.features.agents.episodes import Agents
from grpo.features.agents.tree import Turn
from grpo.text import one_line, printable
from grpo.types import Piece, Prompt, Rollout

STAND_IN = f"{pathlib.Path(__file__).parents[3]}/configs/examples/toys.py:trained_tokenizer"
WORDS = ["attic", "box", "door", "east", "find", "go", "7", "42"]


def rehearse(config: Any, examples: Sequence[Example], num_episodes: int) -> bool:
    """Play episodes of the config's agent on these rows, and print their trees. Returns whether one was lost."""
    tokenizer = load_function(STAND_IN, "the stand-in for a tokenizer")(WORDS, 300)
    rows = itertools.islice(itertools.cycle(examples), num_episodes)
    prompts = [(Prompt(number, [], example.columns), 0) for number, example in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        agents = Agents(config, folder, [tokenizer.eos_token_id])
    loop: Any = StandIn(tokenizer)
    most = config.generator.max_completion_tokens
    with closing(agents):
        rollouts = agents.complete(loop, prompts, most, loop.add, run_seed=0, version=0, held_out=False)
    for rollout in rollouts:
        print(printable("\n".join(lines_of(rollout, tokenizer))))
    return any(rollout.episode["failure"] for rollout in rollouts)


class StandIn:
    """In place of the engine's loop: each request is answered in one step, by a word and calls of some of its tools."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.draw = random.Random(0)
        self.running: dict[Turn, int] = {}

    @property
    def num_running(self) -> int:
        """Number of requests without an answer."""
        return len(self.running)

    def add(self, index: int, ids: list[int], number: int, max_tokens: int, turn: Turn) -> None:
        """Take a request."""
        self.running[turn] = max_tokens

    def end(self, turns: Sequence[Turn]) -> None:
        """Answer some requests no more."""
        for turn in turns:
            self.running.pop(turn, None)

    def step(self) -> dict[Turn, Piece]:
        """Answer all requests."""
        pieces = {}
        for turn, max_tokens in self.running.items():
            text = self.draw.choice(WORDS)
            for tool in turn.body.get("tools") or []:
                names = tool["function"].get("parameters", {}).get("properties", {})
                arguments = dict.fromkeys(names, self.draw.choice(WORDS))
                call = {"name": tool["function"]["name"], "arguments": arguments}
                if self.draw.random() < 0.5:
                    text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
            pieces[turn] = Piece.sampled(ids, [0.0] * len(ids), ended_by="stop")
        self.running.clear()
        return pieces


def lines_of(rollout: Rollout, tokenizer: Any) -> Iterator[str]:
    """Yield what came of an episode, and what each sequence adds to those before it; > is what the model wrote."""
    episode = rollout.episode
    yield f"--- reward {episode['reward']}; ended by {rollout.ended_by} {episode['failure']}"
    for number, pieces in enumerate(rollout.sequences):
        lines = [f"sequence {number}"]
        for piece in pieces:
            text = one_line(tokenizer.decode(piece.ids_T))
            if not piece.is_sampled:
                lines.append(f"  {text}")
            elif piece.loss_mask_T.all():
                lines.append(f"> {text}")
            else:  # an earlier sequence has it, with what stands before it
                lines = [f"sequence {number}, behind > {text}"]
        yield from lines
