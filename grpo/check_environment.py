"""What does this environment say? Episodes before a run: `python -m grpo.check_environment guess.py:Guess`.

    python -m grpo.check_environment path/file.py:Class [RECIPE.py] [--field value ...]       or :function, a tool
    python -m grpo.check_environment path/file.py:Class --play                                you are the model
    python -m grpo.check_environment RECIPE.py [--field value ...]                            all that the recipe names

Three episodes by random calls, within the limits of a run: the conversation as token ids have it, what the model writes
in green, with the reward, how it ended and the seconds of each turn; then the first one once more in a fresh process,
whose texts must be the same. Chat template and rows are the recipe's, if its model is a folder here; else a plain
template and an empty row. Exit code 1 if an episode is lost or differs.
"""

import inspect
import itertools
import pathlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo.config import GRPOConfig
from grpo.config.recipes import for_one_process, load
from grpo.config.user_files import load_function
from grpo.data.chat import load_tokenizer
from grpo.data.encode import Encoded
from grpo.data.rows import Example, environment_of, row_reader
from grpo.data.sources import load_rows
from grpo.data.toy import trained_tokenizer
from grpo.environments.calls import END_OF_THOUGHT, written_call
from grpo.environments.host import EnvironmentHost
from grpo.environments.play import Episode, Player
from grpo.environments.suffix import Turns
from grpo.environments.tools import Toolbox, load_toolboxes
from grpo.models.hf_folder import stop_token_ids
from grpo.report.samples import show_chat
from grpo.roles.engine.episodes import call_style, turns_of
from grpo.run.command_line import DEFAULT_RECIPES, subject_of
from grpo.text import printable, without_surrogates
from grpo.types import Prompt

NUM_EPISODES = 3
# Rows among which there should be some of each environment.
LOOKED_AT = 1000
WORDS = ["attic", "box", "cellar", "door", "east", "find", "go", "7", "42"]


def main(arguments: list[str]) -> int:
    """Play and tell; returns the exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    subject, words = subject_of(__doc__, arguments)
    by_hand = "--play" in words
    words = [word for word in words if word != "--play"]
    is_file = ":" in subject
    has_recipe = not is_file or (bool(words) and not words[0].startswith("-"))
    try:
        if is_file:  # in place of what a recipe names
            is_class = inspect.isclass(load_function(subject, "environment"))
            words += ["--environment.name" if is_class else "--environment.tools", subject]
        arguments = words if is_file else [subject, *words]
        config = load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], arguments, for_one_process)
        toolboxes = load_toolboxes(config.environment)
        examples = _examples(config, toolboxes) if has_recipe else {}
        has_model = pathlib.Path(config.model.path).is_dir()
        most_prompt_tokens = config.data.max_prompt_tokens if has_model else config.max_sequence_tokens
        tokenizer, stops, style = _words(config, toolboxes)
        turns = turns_of(tokenizer, config.environment, config.data, stops, toolboxes)

        def episodes(name: str, numbers: Sequence[int]) -> Iterator[Episode]:
            """Those of some seeds, in a process of their own."""
            with closing(EnvironmentHost(config.environment, style, 1, config.reward.environment)) as host:
                player = Player(config.environment, host, turns, tokenizer, most_prompt_tokens)
                for number in numbers:
                    prompt = _prompt(number, examples.get(name), turns[name])
                    player.begin([Episode(prompt, 0, number, 0, name)], config.generator.max_completion_tokens)
                    yield play(player, toolboxes[name], style, stops[0], by_hand)

        failed = False
        for name, toolbox in toolboxes.items():
            if not has_recipe:
                toolbox.check_columns([])
            console.print(f"{name or toolbox.name}: tools {', '.join(toolbox.tools) or 'none'}. {turns[name].line}")
            console.print_json(data=toolbox.schemas)
            played = []
            for one in episodes(name, range(1 if by_hand else NUM_EPISODES)):
                played.append(one)
                show(console, one, tokenizer)
            failed |= (is_lost := any(one.failure for one in played))
            if not (by_hand or is_lost):
                first, again = ((one.opening, one.turns) for one in (played[0], *episodes(name, [0])))
                verdict = "the same texts" if first == again else f"OTHER TEXTS: {first} and {again}"
                console.print(f"seed 0 once more, in a fresh process: {verdict}")
                failed |= first != again
    except EOFError:
        print("\nleft before the end of the episode")
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}")
        return 1
    return int(failed)


def _examples(config: GRPOConfig, toolboxes: Mapping[str, Toolbox]) -> dict[str, list[Example]]:
    """Rows of each environment, among the first ones. Raises ValueError for a row whose column names none."""
    found, read = {name: [] for name in toolboxes}, row_reader(config.data)
    for example in map(read, itertools.islice(load_rows(config.data.all_sources[0]), LOOKED_AT)):
        if example:
            found[environment_of(example.columns, config.data, found)].append(example)
    return found


def _prompt(number: int, examples: Sequence[Example] | None, turns: Turns) -> Prompt:
    """A row's prompt, an empty one without a row."""
    if not examples:
        return Prompt(number, turns.opening(""))
    example = examples[number % len(examples)]
    return Prompt(number, turns.opening(example.prompt), example.columns, content=example.prompt)


def play(player: Player, toolbox: Toolbox, style: str, stop: int, by_hand: bool) -> Episode:
    """Play one episode, whose turns are random calls of the tools, or what somebody types. EOFError: no more is typed.

    A thought that the chat template opens is closed at once.
    """
    (episode,) = player.episodes
    draw = random.Random(episode.seed)
    thought = player.turns[episode.environment].opened_thought
    closing = END_OF_THOUGHT if thought and END_OF_THOUGHT not in thought else ""
    if by_hand:
        print(how_to_play(toolbox, style))
    while any(most for _, most, _ in player.collect([0], 1)):
        if by_hand:
            said = episode.turns[-1]["answers"] if episode.turns else [episode.opening or episode.prompt.content]
            print(*map(printable, said), sep="\n")
            text = closing + without_surrogates(input("> "))
        else:
            text = closing + random_turn(toolbox, style, draw)
        ids = player.tokenizer(text, add_special_tokens=False)["input_ids"] + [stop]
        player.ended(0, ids, [0.0] * len(ids), "stop")
    return player.finish()[0]


def how_to_play(toolbox: Toolbox, style: str) -> str:
    """Say how a call is written, by a call of the first tool, and what ends a turn and the episode."""
    without = "is answered by reply" if toolbox.has_reply else "ends the episode"
    ends = f"Enter ends a turn, one without a call {without}, Ctrl-D leaves."
    if not toolbox.tools:
        return ends
    call = _random_call(toolbox.schemas[0], style, random.Random(0))
    return f"A call is written {' '.join(call.split())}\n{ends}"


def random_turn(toolbox: Toolbox, style: str, draw: random.Random) -> str:
    """A call of some tool with arguments of the right types, or words where there are no tools."""
    return _random_call(draw.choice(toolbox.schemas), style, draw) if toolbox.tools else draw.choice(WORDS)


def _random_call(schema: dict[str, Any], style: str, draw: random.Random) -> str:
    function = schema["function"]
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


def _words(config: GRPOConfig, toolboxes: Mapping[str, Toolbox]) -> tuple[Any, list[int], str]:
    """Tokenizer, tokens that end a turn, and how calls are written: the model's, or a plain ChatML's."""
    if pathlib.Path(config.model.path).is_dir():
        tokenizer = load_tokenizer(config.model.path, config.data)
        stops = stop_token_ids(config.model.path, tokenizer, config.generator.stop_token_ids)
        return tokenizer, stops, call_style(tokenizer, config.environment, toolboxes)
    tokenizer = trained_tokenizer(WORDS, 300)
    style = "hermes" if config.environment.calls == "auto" else config.environment.calls
    return tokenizer, [tokenizer.eos_token_id], style


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
