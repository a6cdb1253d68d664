"""What does this environment say? Episodes before a run: `python -m grpo.check_environment guess.py:Guess`.

    python -m grpo.check_environment path/file.py:Class [RECIPE.py] [--field value ...]       or :function, a tool
    python -m grpo.check_environment path/file.py:Class --play                                you are the model

Three episodes by random calls, in processes and within the limits of a run: the conversation as token ids have it, what
the model writes (and learns from) in green, with the reward, how it ended and the seconds of each turn; then the first
one once more in a fresh process, whose texts must be the same. Chat template and rows are those of the recipe, if its
model is a folder here; without one, a plain template and an empty row. Exit code 1 if an episode is lost or differs.
"""

import inspect
import itertools
import pathlib
import random
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from grpo.config.user_files import load_function
from grpo.data.chat import load_tokenizer
from grpo.data.encode import Encoded
from grpo.data.rows import row_reader
from grpo.data.sources import load_rows
from grpo.data.toy import trained_tokenizer
from grpo.environments.calls import written_call
from grpo.environments.host import EnvironmentHost
from grpo.environments.play import Episode, Player
from grpo.environments.tools import Toolbox, load_toolbox
from grpo.models.hf_folder import stop_token_ids
from grpo.roles.episodes import call_style, turns_of
from grpo.run.command_line import DEFAULT_RECIPES, subject_of
from grpo.run.sft_driver import show_chat
from grpo.text import printable
from grpo.types import Prompt

NUM_EPISODES = 3
WORDS = ["attic", "box", "cellar", "door", "east", "find", "go", "7", "42"]


def main(arguments: list[str]) -> int:
    """Play and tell; returns the exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    subject, rest = subject_of(__doc__, arguments)
    plays = "--play" in rest
    rest = [word for word in rest if word != "--play"]
    has_recipe = bool(rest) and not rest[0].startswith("-")
    try:
        field = (
            "--environment.name" if inspect.isclass(load_function(subject, "environment")) else "--environment.tools"
        )
        config = load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], [*rest[:has_recipe], field, subject, *rest[has_recipe:]])
        toolbox = load_toolbox(config.environment)
        rows = itertools.islice(load_rows(config.data.all_sources[0]), NUM_EPISODES) if has_recipe else ()
        examples = [example for example in map(row_reader(config.data), rows) if example]
        tokenizer, stops, style = _words(config, toolbox)
        turns = turns_of(tokenizer, config.environment, config.data, stops, toolbox)
        if not has_recipe:
            toolbox.check_columns([])
        console.print(f"{toolbox.name}: tools {', '.join(toolbox.tools) or 'none'}. {turns.line}")
        console.print_json(data=toolbox.schemas)
        told = []
        for number in (0,) if plays else (*range(NUM_EPISODES), 0):  # the last one in a process of its own
            example = examples[number % len(examples)] if examples else None
            prompt = Prompt(number, turns.opening(str(example.prompt) if example else "Begin."))
            if example:
                prompt = Prompt(number, prompt.ids, example.columns, content=example.prompt)
            host = EnvironmentHost(config.environment, style, 1, config.reward.environment)
            player = Player(config.environment, toolbox, host, turns, tokenizer, config.max_sequence_tokens)
            try:
                episode = play(player, prompt, number, style, stops[0], config.generator.max_completion_tokens, plays)
            finally:
                host.close()
            told.append(episode)
            if len(told) <= NUM_EPISODES:
                show(console, episode, tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}")
        return 1
    lost = any(episode.failure for episode in told)
    if plays or lost:
        return int(lost)
    first, again = ([one.opening, [turn["answers"] for turn in one.turns]] for one in (told[0], told[-1]))
    verdict = "the same texts" if first == again else f"OTHER TEXTS: {first} and {again}"
    console.print(f"seed 0 once more, in a fresh process: {verdict}")
    return int(first != again)


def play(
    player: Player, prompt: Prompt, seed: int, style: str, stop: int, max_tokens: int, by_hand: bool = False
) -> Episode:
    """One episode, whose turns are random calls, or what somebody types."""
    draw = random.Random(seed)
    player.begin([Episode(prompt, 0, seed, 0)], max_tokens)
    while player.collect([0], "all").turns:
        if by_hand:
            episode = player.episodes[0]
            print("\n".join(episode.turns[-1]["answers"]) if episode.turns else episode.opening or prompt.content)
            text = input("> ")
        else:
            text = random_turn(player.toolbox, style, draw)
        ids = player.tokenizer(text, add_special_tokens=False)["input_ids"] + [stop]
        player.ended(0, ids, [0.0] * len(ids), "stop")
    return player.finish()[0]


def random_turn(toolbox: Toolbox, style: str, draw: random.Random) -> str:
    """A call of some tool with arguments of the right types, or words where there are no tools."""
    if not toolbox.tools:
        return draw.choice(WORDS)
    function = draw.choice(toolbox.schemas)["function"]
    known = function["parameters"]["properties"]
    return written_call(function["name"], {name: _random_value(known[name], draw) for name in known}, style)


def _random_value(schema: dict[str, Any], draw: random.Random) -> Any:
    values = {
        "integer": draw.randint(1, 16),
        "number": draw.randint(1, 16),
        "boolean": draw.random() < 0.5,
        "array": [],
    }
    return draw.choice(schema["enum"]) if "enum" in schema else values.get(schema.get("type"), draw.choice(WORDS))


def show(console: Console, episode: Episode, tokenizer: Any) -> None:
    """Print a conversation with its loss mask in colour, and what came of it."""
    written = [] if episode.opening is not None else episode.prompt.ids
    ids = [*written, *(token for piece in episode.pieces for token in piece.ids_T.tolist())]
    mask = [False] * len(written) + [bool(one) for piece in episode.pieces for one in piece.loss_mask_T]
    console.rule(f"seed {episode.seed}", align="left")
    console.print(show_chat(Encoded(ids=ids, mask=mask), tokenizer))
    seconds = episode.waited / max(1, len(episode.turns))
    reward = f"lost: {episode.failure}" if episode.failure else f"reward {episode.reward}"
    counts = ", ".join(f"{name} {count}" for name, count in episode.counts.items() if count)
    told = f"{reward}; ended by {episode.ended_by} after {len(episode.turns)} turns of {seconds:.4f} s; {counts}"
    console.print(Text(printable(told), "bold"))


def _words(config: GRPOConfig, toolbox: Toolbox) -> tuple[Any, list[int], str]:
    """Tokenizer, tokens that end a turn, and how calls are written: the model's, or a plain ChatML's."""
    if pathlib.Path(config.model.path).is_dir():
        tokenizer = load_tokenizer(config.model.path, config.data)
        stops = stop_token_ids(config.model.path, tokenizer, config.generator.stop_token_ids)
        return tokenizer, stops, call_style(tokenizer, config.environment, toolbox)
    tokenizer = trained_tokenizer(WORDS, 300)
    style = "hermes" if config.environment.calls == "auto" else config.environment.calls
    return tokenizer, [tokenizer.eos_token_id], style


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
