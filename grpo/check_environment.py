"""What does this environment say? Episodes before a run: `python -m grpo.check_environment guess.py:Guess`.

    python -m grpo.check_environment path/file.py:Class [RECIPE.py] [--field value ...]       or :function, a tool
    python -m grpo.check_environment path/file.py:Class --play                                you are the model
    python -m grpo.check_environment RECIPE.py [--field value ...]                            all that the recipe names

It plays three episodes with random calls, within the limits of a run, and shows each conversation as its token ids have
it, what the model writes in green, with the reward, how it ended and the seconds of each turn. Then it plays the first
one once more, in the same process and in a fresh one, where the texts must be the same. Chat template and rows are the
recipe's, if its model is a folder here; else a plain template and an empty row. Exit code 1 if an episode is lost or
differs.
"""

import inspect
import itertools
import pathlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
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
from grpo.environments.suffix import Turns
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
VALUES = {  # by JSON's types
    "integer": NUMBERS,
    "number": NUMBERS,
    "boolean": [True, False],
    "array": [[]],
}


@dataclass(frozen=True)
class Stage:
    """What all episodes of a check have in common. Dicts are by the names of environments."""

    config: GRPOConfig
    by_hand: bool
    """Somebody types what the model would write."""
    toolboxes: dict[str, Toolbox]
    examples: dict[str, list[Example]]
    """Rows to begin with; empty without a recipe."""
    tokenizer: Any
    has_stand_in: bool
    """The tokenizer and its plain chat template stand in for the model's, which is not a folder here."""
    stop_token_ids: list[int]
    style: str
    """How calls are written."""
    turns: dict[str, Turns]
    max_prompt_tokens: int


def main(arguments: list[str] | None = None) -> int:
    """Play episodes of each environment, print them, and return the exit code."""
    subject, words = subject_of(__doc__, arguments)
    by_hand = "--play" in words
    words = [word for word in words if word != "--play"]
    names_environment = ":" in subject
    starts_with_flag = not words or words[0].startswith("-")
    has_recipe = not (names_environment and starts_with_flag)
    with refuse_bad_input():
        if names_environment:  # in place of what a recipe names
            is_class = inspect.isclass(load_function(subject, "environment"))
            flag = "--environment.name" if is_class else "--environment.tools"
            words += [flag, subject]
        else:
            words = [subject, *words]
        config = tool_config(words)
        stage = set_stage(config, by_hand=by_hand, has_recipe=has_recipe)
        try:
            holds = [check(name, stage) for name in stage.toolboxes]
            return int(not all(holds))
        except EOFError:
            print("\nleft before the end of the episode")
            return 0


def set_stage(
    config: GRPOConfig,
    *,
    by_hand: bool,
    has_recipe: bool,
) -> Stage:
    """Load the tools, the rows and the tokenizer; if the model is not a folder here, a plain ChatML tokenizer."""
    toolboxes = load_toolboxes(config.environment)
    examples = {name: [] for name in toolboxes}
    if has_recipe:
        for source in load_sources(config.data):
            for example in itertools.islice(source.examples(), NUM_ROWS):
                environment = environment_of(example.columns, config.data, examples)
                examples[environment].append(example)
    else:
        for toolbox in toolboxes.values():
            toolbox.check_columns([])

    has_stand_in = not pathlib.Path(config.model.path).is_dir()
    if not has_stand_in:
        tokenizer = load_tokenizer(config.model.path, config.data)
        stops = stop_token_ids(config.model.path, tokenizer, config.generator.stop_token_ids)
        style = call_style(tokenizer, config.environment, toolboxes)
        max_prompt_tokens = config.data.max_prompt_tokens
    else:
        tokenizer = load_function(STAND_IN, "the stand-in for a tokenizer")(WORDS, 300)
        stops = [tokenizer.eos_token_id]
        style = config.environment.calls
        if style == "auto":
            style = "hermes"
        max_prompt_tokens = config.max_sequence_tokens  # its tokens are short
    return Stage(
        config=config,
        by_hand=by_hand,
        toolboxes=toolboxes,
        examples=examples,
        tokenizer=tokenizer,
        has_stand_in=has_stand_in,
        stop_token_ids=stops,
        style=style,
        turns=turns_of(tokenizer, config.environment, config.data, stops, toolboxes),
        max_prompt_tokens=max_prompt_tokens,
    )


def check(name: str, stage: Stage) -> bool:
    """Play episodes of an environment, the first one twice. Return whether none is lost and none differs."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    toolbox = stage.toolboxes[name]
    tools = ", ".join(toolbox.tools) or "none"
    note = stage.turns[name].line
    if stage.has_stand_in:
        note = f"a plain chat template stands in for that of {stage.config.model.path}, which is not a folder here"
    console.print(f"{name or toolbox.name}: tools {tools}{note and f'; {note}'}")
    if toolbox.schemas:
        console.print_json(data=toolbox.schemas)
    seeds = [0] if stage.by_hand else [*range(NUM_EPISODES), 0]
    episodes = []
    for episode in play_episodes(name, seeds, stage):
        if len(episodes) < NUM_EPISODES:
            show(console, episode, stage.tokenizer)
        episodes.append(episode)
    is_lost = any(episode.failure for episode in episodes)
    if is_lost or stage.by_hand:
        return not is_lost
    (fresh,) = play_episodes(name, [0], stage)
    first = (episodes[0].opening, episodes[0].turns)
    are_equal = True
    for place, episode in {"the same process": episodes[-1], "a fresh process": fresh}.items():
        again = (episode.opening, episode.turns)
        verdict = "the same texts" if first == again else f"OTHER TEXTS: {first} and {again}"
        console.print(f"seed 0 once more, in {place}: {verdict}")
        are_equal &= first == again
    return are_equal


def play_episodes(
    name: str,
    seeds: Iterable[int],
    stage: Stage,
) -> Iterator[Episode]:
    """Play an episode with each seed, in a process of their own, each from a row of the environment."""
    config = stage.config
    turns = stage.turns[name]
    examples = stage.examples[name] or [Example()]
    host = EnvironmentHost(
        config.environment,
        stage.style,
        num_processes=1,
        variables=config.reward.environment,
    )
    with closing(host):
        player = Player(
            config.environment,
            host,
            stage.turns,
            stage.tokenizer,
            stage.max_prompt_tokens,
        )
        for seed in seeds:
            example = examples[seed % len(examples)]
            prompt = Prompt(
                index=seed,
                ids=turns.opening(example.prompt),
                columns=example.columns,
                content=example.prompt,
            )
            episode = Episode(prompt, 0, seed, 0, name)
            player.begin([episode], config.generator.max_completion_tokens)
            play_turns(player, stage)
            yield episode


def play_turns(player: Player, stage: Stage) -> None:
    """Play the player's one episode to its end. Its turns are random calls of the tools, or what somebody types.

    A thought that the chat template opens is closed at once. Raises EOFError if no more is typed.
    """
    (episode,) = player.episodes
    toolbox = stage.toolboxes[episode.environment]
    draw = random.Random(episode.seed)
    thought = player.turns[episode.environment].opened_thought
    beginning = ""
    if thought and END_OF_THOUGHT not in thought:
        beginning = END_OF_THOUGHT

    if stage.by_hand:
        print(how_to_play(toolbox, stage.style))
    while any(decision.max_tokens for decision in player.collect([0], 1)):
        if stage.by_hand:
            texts = [episode.opening or episode.prompt.content]
            if episode.turns:
                texts = episode.turns[-1]["answers"]
            for text in texts:
                print(printable(text))
            text = without_surrogates(input("> "))
        elif toolbox.tools:
            schema = draw.choice(toolbox.schemas)
            text = random_call(schema, stage.style, draw)
        else:
            text = draw.choice(WORDS)
        encoded = player.tokenizer(beginning + text, add_special_tokens=False)
        ids = encoded["input_ids"] + stage.stop_token_ids[:1]
        player.add_turn(0, ids, [0.0] * len(ids), "stop")
    player.finish()


def how_to_play(toolbox: Toolbox, style: str) -> str:
    """Explain how a call is written, by a call of the first tool, and what ends a turn and the episode."""
    without_call = "is answered by reply" if toolbox.has_reply else "ends the episode"
    ends = f"Enter ends a turn, one without a call {without_call}, Ctrl-D leaves."
    if not toolbox.tools:
        return ends
    call = random_call(toolbox.schemas[0], style, random.Random(0))
    return f"A call is written {one_line(call)}\n{ends}"


def random_call(
    schema: dict[str, Any],
    style: str,
    draw: random.Random,
) -> str:
    """Write a call of a tool, with arguments of the right types."""
    function = schema["function"]
    arguments = {}
    for name, parameter in function["parameters"]["properties"].items():
        of_type = VALUES.get(parameter.get("type"), WORDS)
        arguments[name] = draw.choice(parameter.get("enum") or of_type)
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
    conversation = Encoded(ids=ids, mask=mask)
    console.print(show_chat(conversation, tokenizer))
    num_turns = len(episode.turns)
    seconds = episode.waited / max(1, num_turns)
    reward = f"lost: {episode.failure}" if episode.failure else f"reward {episode.reward}"
    ending = f"ended by {episode.ended_by} after {num_turns} turns, each answered in {seconds:.4f} s"
    counts = [f"{name} {count}" for name, count in episode.counts.items() if count]
    outcome = "; ".join([reward, ending, *counts])
    console.print(Text(printable(outcome), "bold"))


if __name__ == "__main__":
    sys.exit(run_rank(main))
