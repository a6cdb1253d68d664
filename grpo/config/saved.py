"""What a config changes about the run whose `config.py` lies in the run folder.

That file is parsed and never run, so that a run folder can be resumed that one would not run programs from.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args, get_type_hints

from grpo.config.bounds import Harmless, HarmlessInSFT
from grpo.config.fields import GRPOConfig, SFTConfig
from grpo.config.recipes import as_recipe

NOT_THERE = "not there"  # in the config of another version


@dataclass(frozen=True)
class Change:
    """A field that is written in another way than in the saved config."""

    path: str
    old: str
    """What the saved config says, as Python writes it."""
    new: str
    """What this run's config says, as Python writes it."""
    breaks_exactness: bool
    """Whether what the run samples or learns depends on it."""


def changes_since(saved: str, config: GRPOConfig | SFTConfig) -> list[Change]:
    """Return what `config` has other than `saved`, the text of a config that `as_recipe` wrote.

    Raises ValueError if it is no such text.
    """
    before, now = written_fields(saved), written_fields(as_recipe(config))  # so, without the flags of a single start
    return [
        Change(path, old, new, path not in now or not is_harmless(path, config))
        for path in dict.fromkeys([*now, *before])
        if (old := before.get(path, NOT_THERE)) != (new := now.get(path, NOT_THERE))
    ]


def is_harmless(path: str, config: GRPOConfig | SFTConfig) -> bool:
    """Tell whether a run may go on with another value of that field and still be the same run."""
    if path == "num_steps":  # the other schedules end where the steps do
        return config.trainer.schedule == "constant"
    marks = {Harmless, HarmlessInSFT} if isinstance(config, SFTConfig) else {Harmless}
    section = config
    for name in path.split("."):
        hint = get_type_hints(type(section), include_extras=True)[name]
        if any(mark in get_args(hint) for mark in marks):
            return True
        section = getattr(section, name)
    return False


def written_fields(text: str) -> dict[str, str]:
    """Return each field by its dotted path, as Python writes its value.

    Raises ValueError if the text is not what `as_recipe` writes.
    """
    try:
        *_, last = ast.parse(text).body or [None]
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"it is no config that a run wrote ({error})") from error
    if not (isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == "config" and _is_section(last.value)):
        raise ValueError("it is no config that a run wrote")
    return dict(_written(last.value, ""))


def _written(section: ast.Call, path: str) -> Iterator[tuple[str, str]]:
    for keyword in section.keywords:
        if _is_section(keyword.value):
            yield from _written(keyword.value, f"{path}{keyword.arg}.")
        else:
            yield f"{path}{keyword.arg}", ast.unparse(keyword.value)


def _is_section(node: ast.expr) -> bool:
    """Tell whether it is `c.TrainerConfig(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
