"""An environment played without a model or an engine: by random calls, or by hand (grpo/tools/check_environment.py)."""

import json
import random
from contextlib import closing
from typing import Any

from grpo.data.rows import Example
from grpo.features.environments.calls import random_turn
from grpo.features.environments.episodes import turns_of
from grpo.features.environments.host import EnvironmentHost
from grpo.features.environments.play import Episode, Player
from grpo.features.environments.tools import load_toolboxes
from grpo.report.samples import turn_lines
from grpo.text import one_line, printable, without_surrogates
from grpo.types import Piece, Prompt


def rehearse(config: Any, tokenizer: Any, examples: list[Example], by_hand: bool) -> bool:
    """Play an episode of the config's one environment on each row, and print it. Returns whether one was lost.

    by_hand: somebody types what the model would write. Raises ValueError for an environment that cannot be used.
    """
    environment = config.environment
    (toolbox,) = load_toolboxes(environment).values()
    toolbox.check_columns(examples[0].columns)
    stops = [tokenizer.eos_token_id]
    turns = turns_of(tokenizer, config, stops, {"": toolbox})
    host = EnvironmentHost(environment, environment.calls, num_processes=1, variables=config.reward.environment)
    print(f"{toolbox.name}: tools {', '.join(toolbox.tools) or 'none'}\n{json.dumps(toolbox.schemas, indent=2)}")
    player = Player(environment, host, turns, tokenizer, config.max_sequence_tokens)
    is_lost = False
    with closing(host):
        for seed, example in enumerate(examples):
            prompt = Prompt(seed, turns[""].opening(example.prompt), example.columns, content=example.prompt)
            episode = Episode(prompt, 0, seed, 0)
            player.begin([episode], config.generator.max_completion_tokens)
            draw = random.Random(seed)
            while any(decision.max_tokens for decision in player.collect([0], 1)):
                text = random_turn(toolbox.schemas, environment.calls, draw)
                if by_hand:
                    text = typed_turn(episode, text)
                ids = tokenizer.encode(text, add_special_tokens=False) + stops
                player.add_turn(0, Piece.sampled(ids, [0.0] * len(ids), ended_by="stop"))
            player.finish()
            show(episode)
            is_lost |= bool(episode.failure)
    return is_lost


def typed_turn(episode: Episode, such_as: str) -> str:
    """Show what was answered last, and return what somebody types."""
    if episode.turns:
        print(printable("\n".join(episode.turns[-1]["answers"])))
    else:
        print(printable(episode.opening or str(episode.prompt.content)))
        print(f"Enter ends a turn, Ctrl-D leaves. A turn may be: {one_line(such_as)}")
    try:
        return without_surrogates(input("> "))
    except EOFError:
        print("\nleft before the end of the episode")
        raise SystemExit(0) from None


def show(episode: Episode) -> None:
    """Print an episode and what came of it."""
    seconds = episode.waited / max(1, len(episode.turns))
    outcome = f"lost: {episode.failure}" if episode.failure else f"reward {episode.reward}"
    outcome += f"; ended by {episode.ended_by} after {len(episode.turns)} turns, each answered in {seconds:.4f} s"
    lines = [
        f"--- seed {episode.seed}",
        episode.opening or str(episode.prompt.content),
        *turn_lines(episode.turns),
        outcome,
        json.dumps(episode.counts),
    ]
    print(printable("\n".join(lines)))
