"""Names of fields as dotted paths (`algorithm.kl_coef`): those of today, those of before, what a wrong one meant."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterator
from typing import Any

from grpo.config.fields import GRPOConfig, SFTConfig

# Old path -> new path. What is now an entry of a table of options: the table's path, then the names that lead to it.
RENAMED = {
    "algorithm.updates_per_batch": "algorithm.num_mini_batches",
    "algorithm.epochs_per_batch": "algorithm.num_epochs",
    "algorithm.correction": "algorithm.importance_correction",
    "algorithm.correction_low": "algorithm.importance_correction_low",
    "algorithm.correction_high": "algorithm.importance_correction_high",
    "algorithm.dual_clip": "algorithm.loss_options dual_clip",
    "algorithm.sapo_temperature_positive": "algorithm.loss_options temperature_positive",
    "algorithm.sapo_temperature_negative": "algorithm.loss_options temperature_negative",
    "algorithm.max_importance_weight": "algorithm.loss_options max_importance_weight",
    "sampling.rest_epochs": "sampling.filter_epochs",
    "reward.tolerance": "reward.options math_reward tolerance",
    "reward.partial_credit": "reward.options math_reward partial_credit",
    "reward.pattern": "reward.options regex_match pattern",
    "reward.target_tokens": "reward.options length_penalty target_tokens",
    "reward.overlong_tokens": "reward.options overlong_penalty tokens",
    "reward.repetition_ngram": "reward.options repetition_penalty ngram",
    "reward.language": "reward.options language_reward language",
    "reward.code_timeout_seconds": "reward.options code_reward timeout_seconds",
    "reward.code_memory_gib": "reward.options code_reward memory_gib",
}


def check_flags(arguments: list[str]) -> None:
    """Refuse an old flag of the command line with a ValueError that names the new one; tyro refuses the unknown."""
    for flag in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        if new := RENAMED.get(flag[2:].replace("-", "_")):
            path, *table = new.split()
            if table:
                table[-1] = f"'{{\"{table[-1]}\": ...}}'"
            raise ValueError(f"{flag} is now {' '.join(['--' + path.replace('_', '-'), *table])}")


def no_such_field(path: str, config: GRPOConfig | SFTConfig) -> str:
    """What to tell the user who set a field that `config` does not have, by its dotted path."""
    if path in RENAMED:
        new, *table = RENAMED[path].split()
        value = "..."
        for name in reversed(table):
            value = f'{{"{name}": {value}}}'
        return f"{path} is now {new}" + (f"={value}" if table else "")
    paths = list(field_paths(config))
    name = path.rpartition(".")[2]
    near = [p for p in paths if p.rpartition(".")[2] == name] or difflib.get_close_matches(path, paths, n=1)
    return f"there is no field {path}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def explain_type_error(error: TypeError, recipe: str) -> str:
    """The same for Python's own message about an unexpected keyword of a config class; other messages as they are.

    Of old names, all that `recipe` (its text) has are listed, because a config saved by an old run has many.
    """
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    for config in (GRPOConfig(), SFTConfig()) if found else ():
        prefixes = {type(value).__name__: f"{name}." for name, value in vars(config).items()}
        prefixes[type(config).__name__] = ""
        if found[1] in prefixes:
            path = prefixes[found[1]] + found[2]
            calls = [node for node in ast.walk(ast.parse(recipe)) if isinstance(node, ast.Call)]
            given = [(ast.unparse(call.func).rpartition(".")[2], k.arg) for call in calls for k in call.keywords]
            old = [p for name, field in given if (p := f"{prefixes.get(name, '')}{field}") in RENAMED]
            return "; ".join(no_such_field(p, config) for p in dict.fromkeys([path, *old]))
    return f"TypeError: {error}"


def field_paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields, sections after their fields."""
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from field_paths(value, f"{prefix}{field.name}.")
        yield f"{prefix}{field.name}"
