"""What the tools' command lines have in common: a subject, then the recipe and the flags of a run."""

import itertools
import sys

from grpo.config.fields import GRPOConfig
from grpo.config.recipes import for_one_process, load
from grpo.data.prepare import load_sources
from grpo.data.rows import Example
from grpo.libraries import keep_caches, quiet_libraries
from grpo.run.command_line import DEFAULT_RECIPES


def subject_of(doc: str, words: list[str] | None = None) -> tuple[str, list[str]]:
    """Return the first word of a tool's command line, such as the folder of a run, and the words that follow.

    With --help, or if there is no such word, it prints the tool's docstring and ends the process.
    """
    if words is None:
        words = sys.argv[1:]
    subject, *further_words = words or ["-"]
    if subject.startswith("-"):
        print(doc)
        raise SystemExit(0 if subject in ("--help", "-h") else 2)
    quiet_libraries()
    keep_caches()
    return subject, further_words


def tool_config(words: list[str]) -> GRPOConfig:
    """Return the config of a tool's `[RECIPE.py] [--field value ...]`, with all roles in one process."""
    return load(
        GRPOConfig,
        DEFAULT_RECIPES[GRPOConfig],
        words,
        for_one_process,
    )


def first_rows(config: GRPOConfig, number: int) -> list[Example]:
    """Return the first rows of the run's data, up to this number. Raises ValueError if none can be used."""
    examples = list(itertools.islice(load_sources(config.data)[0].examples(), number))
    if not examples:
        raise ValueError("no row of the data can be used; a --dry-run of the recipe says why")
    return examples
