"""What does this environment say? Whole episodes before a run: `python -m grpo.check_environment guess.py:Guess`.

    python -m grpo.check_environment path/file.py:Class [RECIPE.py] [--field value ...]       or :function, a tool
    python -m grpo.check_environment path/file.py:agent                          or "a command line": an agent
    python -m grpo.check_environment path/file.py:Class --play                                you are the model

It plays three episodes with random calls, within the limits of a run, and shows each turn with its answers, the reward,
how the episode ended and the seconds of a turn. Rows are the recipe's; without a recipe a row is empty. The chat
template is a plain one: what the model's own can carry, `--dry-run` says. An agent is a command line or a function with
an argument `base_url`, and is shown with the tree of its sequences. Exit code 1 if an episode is lost.
"""

import inspect
import pathlib
import sys

from grpo import features
from grpo.config import change
from grpo.config.user_files import load_function
from grpo.config.values import names_function
from grpo.data.rows import Example
from grpo.tools.command import first_rows, subject_of, tool_config
from grpo.watch.failures import refuse_bad_input, run_rank

NUM_EPISODES = 3
TOKENIZER = f"{pathlib.Path(__file__).parents[2]}/configs/examples/toys.py:trained_tokenizer"


def main(arguments: list[str] | None = None) -> int:
    """Play episodes, print them, and return the exit code."""
    subject, words = subject_of(__doc__, arguments)
    by_hand = "--play" in words
    number = NUM_EPISODES
    if by_hand:
        words.remove("--play")
        number = 1
    examples = [Example()] * number
    with refuse_bad_input():
        config = tool_config([*words, *flags_of(subject)])
        if words and not words[0].startswith("-"):  # a recipe
            examples = first_rows(config, number)
        if config.environment.calls == "auto":  # the plain template asks for no form of calls
            config = change(config, {"environment.calls": "hermes"})
        tokenizer = load_function(TOKENIZER, "the stand-in for a tokenizer")(["find", "go", "42"], 300)
        (lost,) = features.call(config, "rehearse", config, tokenizer, examples, by_hand)
    return int(lost)


def flags_of(subject: str) -> list[str]:
    """Return the flags that make the subject the run's environment. Raises ValueError if it cannot be loaded."""
    kind = "agent"
    is_file = subject.endswith(".py") and " " not in subject  # whose function is missing
    if names_function(subject) or is_file:
        loaded = load_function(subject, "environment")
        if inspect.isclass(loaded):
            kind = "name"
        elif "base_url" not in inspect.signature(loaded).parameters:
            kind = "tools"
    flags = ["--environment.agent=", "--environment.name="]
    if kind != "name":  # a class goes with the recipe's tools
        flags.append("--environment.tools")
    return [*flags, f"--environment.{kind}", subject]


if __name__ == "__main__":
    sys.exit(run_rank(main))
