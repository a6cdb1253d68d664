"""Configs from flags as a user writes them, for tests: without tyro, which takes 0.2 s each time."""

import operator
import re
import shlex

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.checks import check_effects, validate
from grpo.config.recipes import as_json


def started(flags: str, kind: type = GRPOConfig) -> GRPOConfig | SFTConfig:
    """The checked config of a script that is started with these flags and a recipe of nothing but defaults.

    There are 4 trainers, 4 generators, 32 prompts of 8 completions.
    """
    recipe = kind()
    changes = {}
    for flag in re.split("(?:^| )--", flags)[1:]:
        name, *words = shlex.split(flag)
        path = name.replace("-", "_").replace(".no_", ".")
        before = operator.attrgetter(path)(recipe)
        if isinstance(before, bool):
            changes[path] = ".no-" not in name
        elif isinstance(before, tuple):
            changes[path] = tuple(map(as_json, words))
        elif isinstance(before, dict) or len(words) != 1:
            changes[path] = dict(zip(words[::2], map(as_json, words[1::2]), strict=True))
        else:
            is_text = isinstance(before, str) and before != "auto"
            changes[path] = words[0] if is_text else as_json(words[0])
    config = change(recipe, changes)
    validate(config)
    check_effects(config, recipe)
    return config
