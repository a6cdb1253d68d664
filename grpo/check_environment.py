"""What does this environment say? Episodes before a run: `python -m grpo.check_environment guess.py:Guess`.

    python -m grpo.check_environment path/file.py:Class [RECIPE.py] [--field value ...]       or :function, a tool
    python -m grpo.check_environment path/file.py:Class --play                                you are the model
    python -m grpo.check_environment RECIPE.py [--field value ...]                            all that the recipe names

It plays three episodes with random calls, within the limits of a run, and shows each conversation as its token ids have
it, what the model writes in green, with the reward, how it ended and the seconds of each turn. Chat template and rows
are the recipe's, if its model is a folder here; else a plain template and an empty row. Exit code 1 if an episode is
lost.
"""

import inspect
import itertools
import pathlib
import random
import sys
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo.config import GRPOConfig
from grpo.config.user_files import load_function
from grpo.data.chat import load_tokenizer
from grpo.data.encode import Encoded
from grpo.data.prepare import load_sources
from grpo.data.rows import Example, environment_of
from grpo.environments.calls import END_OF_THOUGHT, written_call
from grpo.environments.host import EnvironmentHost
from grpo.environments.play import Episode, Player
from grpo.environments.tools import Toolbox, load_toolboxes
from grpo.models.hf_folder import stop_token_ids
from grpo.report.samples import show_chat
from grpo.roles.engine.episodes import call_style, turns_of
from grpo.run.command_line import subject_of, tool_config
from grpo.text import one_line, printable, without_surrogates
from grpo.types import Prompt
from grpo.watch.failures import refuse_bad_input, run_rank

NUM_EPISODES = 3
STAND_IN = f"{pathlib.Path(__file__).parents[1]}/configs/examples/toys.py:trained_tokenizer"
NUM_ROWS = 1000  # of each source, among which there should be some of each environment
WORDS = ["attic", "box", "cellar", "door", "east", "find", "go", "7", "42"]
NUMBERS = range(1, 17)
VALUES = {"integer": NUMBERS, "number": NUMBERS, "boolean": [True, False], "array": [[]]}  # by JSON's types


def main(arguments: list[str] | None = None) -> int:
    """Play episodes of each environment, print them, and return the exit code."""
    subject, words = subject_of(__doc__, arguments)
    by_hand = "--play" in words
    words = [word for word in words if word != "--play"]
    has_recipe = ":" not in subject or bool(words and not words[0].startswith("-"))
    with refuse_bad_input():
        if ":" in subject:  # in place of what a recipe names
            is_class = inspect.isclass(load_function(subject, "environment"))
            words += ["--environment.name" if is_class else "--environment.tools", subject]
        else:
            words = [subject, *words]
        config = tool_config(words)
        toolboxes = load_toolboxes(config.environment)
        examples = find_rows(config, toolboxes) if has_recipe else {}
        for toolbox in {} if has_recipe else toolboxes.values():
            toolbox.check_columns([])
        folder = config.model.path
        max_prompt_tokens = config.data.max_prompt_tokens
        is_stand_in = not pathlib.Path(folder).is_dir()
        if not is_stand_in:
            tokenizer = load_tokenizer(folder, config.data)
            stops = stop_token_ids(folder, tokenizer, config.generator.stop_token_ids)
            style = call_style(tokenizer, config.environment, toolboxes)
        else:
            print(f"a plain chat template stands in for that of {folder}, which is not a folder here")
            tokenizer = load_function(STAND_IN, "the stand-in for a tokenizer")(WORDS, 300)
            stops = [tokenizer.eos_token_id]
            style = "hermes" if config.environment.calls == "auto" else config.environment.calls
            max_prompt_tokens = config.max_sequence_tokens  # its tokens are short
        turns = turns_of(tokenizer, config.environment, config.data, stops, toolboxes)
        host = EnvironmentHost(config.environment, style, num_processes=1, variables=config.reward.environment)

    console = Console(highlight=False, markup=False, soft_wrap=True)
    with closing(host):
        player = Player(config.environment, host, turns, tokenizer, max_prompt_tokens)
        num_lost = 0
        for name, toolbox in toolboxes.items():
            tools = ", ".join(toolbox.tools) or "none"
            note = "" if is_stand_in else turns[name].line  # about a template that a run would have
            console.print(f"{name or toolbox.name}: tools {tools}{note and f'; {note}'}")
            if toolbox.schemas:
                console.print_json(data=toolbox.schemas)
            rows = examples.get(name) or [Example()]
            for seed in range(1 if by_hand else NUM_EPISODES):
                example = rows[seed % len(rows)]
                ids = turns[name].opening(example.prompt)
                prompt = Prompt(seed, ids, example.columns, content=example.prompt)
                episode = Episode(prompt, 0, seed, 0, name)
                player.begin([episode], config.generator.max_completion_tokens)
                try:
                    play_turns(player, toolbox, style, stops, by_hand=by_hand)
                except EOFError:
                    print("\nleft before the end of the episode")
                    return 0
                show(console, episode, tokenizer)
                num_lost += bool(episode.failure)
    return int(num_lost > 0)


def find_rows(config: GRPOConfig, toolboxes: dict[str, Toolbox]) -> dict[str, list[Example]]:
    """Return the first rows of all sources, by the name of their environment."""
    examples = {name: [] for name in toolboxes}
    for source in load_sources(config.data):
        for example in itertools.islice(source.examples(), NUM_ROWS):
            examples[environment_of(example.columns, config.data, examples)].append(example)
    return examples


def play_turns(
    player: Player,
    toolbox: Toolbox,
    style: str,
    stops: list[int],
    *,
    by_hand: bool,
) -> None:
    """Play the player's one episode to its end. Its turns are random calls of the tools, or what somebody types.

    A thought that the chat template opens is closed at once. Raises EOFError if no more is typed.
    """
    (episode,) = player.episodes
    draw = random.Random(episode.seed)
    thought = player.turns[episode.environment].opened_thought
    beginning = END_OF_THOUGHT if thought and END_OF_THOUGHT not in thought else ""
    if by_hand:
        if toolbox.tools:
            print(f"A call is written {one_line(random_call(toolbox, style, random.Random(0)))}")
        without_call = "is answered by reply" if toolbox.has_reply else "ends the episode"
        print(f"Enter ends a turn, one without a call {without_call}, Ctrl-D leaves.")
    while any(decision.max_tokens for decision in player.collect([0], 1)):
        if by_hand:
            texts = episode.turns[-1]["answers"] if episode.turns else [episode.opening or episode.prompt.content]
            for text in texts:
                print(printable(text))
            text = without_surrogates(input("> "))
        else:
            text = random_call(toolbox, style, draw) if toolbox.tools else draw.choice(WORDS)
        ids = player.tokenizer(beginning + text, add_special_tokens=False)["input_ids"] + stops[:1]
        player.add_turn(0, ids, [0.0] * len(ids), "stop")
    player.finish()


def random_call(toolbox: Toolbox, style: str, draw: random.Random) -> str:
    """Write a call of one of the tools, with arguments of the right types."""
    function = draw.choice(toolbox.schemas)["function"]
    arguments = {}
    for name, parameter in function["parameters"]["properties"].items():
        arguments[name] = draw.choice(parameter.get("enum") or VALUES.get(parameter.get("type"), WORDS))
    return written_call(function["name"], arguments, style)


def show(console: Console, episode: Episode, tokenizer: Any) -> None:
    """Print a conversation, with the model's tokens in colour, and what came of it."""
    ids = []
    mask = []
    if episode.opening is None:  # else the pieces contain the prompt
        ids += episode.prompt.ids
        mask += [False] * len(ids)
    for piece in episode.pieces:
        ids += piece.ids_T.tolist()
        mask += piece.loss_mask_T.tolist()
    console.rule(f"seed {episode.seed}", align="left")
    console.print(show_chat(Encoded(ids=ids, mask=mask), tokenizer))
    num_turns = len(episode.turns)
    seconds = episode.waited / max(1, num_turns)
    reward = f"lost: {episode.failure}" if episode.failure else f"reward {episode.reward}"
    ending = f"ended by {episode.ended_by} after {num_turns} turns, each answered in {seconds:.4f} s"
    counts = [f"{name} {count}" for name, count in episode.counts.items() if count]
    console.print(Text(printable("; ".join([reward, ending, *counts])), "bold"))


if __name__ == "__main__":
    sys.exit(run_rank(main))
