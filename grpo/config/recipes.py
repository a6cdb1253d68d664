"""Recipe files and the command line -> a checked config, and back to the text of a recipe, which a run folder keeps."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from grpo.config.checks import cautions, check_effects, validate
from grpo.config.fields import OWN_LOSS_DEFAULTS, SHARED_GPU, AlgorithmConfig, Config, GRPOConfig, Json, SFTConfig
from grpo.config.user_files import cause_and_line, run_file
from grpo.config.values import Harmless, check_fields, field_paths

# They were meant for one start, and would continue, delete or slow down the run that a saved config describes
FOR_ONE_START = {"resume": False, "allow_changes": False, "overwrite": False, "profile": 0}


def load(
    config_type: type[Config] | tuple[type[Config], ...],
    default_recipe: str,
    arguments: list[str] | None = None,
    fit: Callable[[Config, Config], Config] | None = None,
) -> Config:
    """Read `[RECIPE.py] [--field value ...]` into a checked config. Prints what differs and what follows.

    config_type: what the recipe may bind; of several, its flags are those of the one that it binds. fit: gets the
    config as written and the recipe's, and returns the one that will run, which is then checked. Raises ValueError if
    the recipe or a flag cannot be used or a check failed, SystemExit for `--help`, which tyro prints.
    """
    import tyro  # not needed by code that gets its config as an object

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default_recipe
    default = load_recipe(recipe, *(config_type if isinstance(config_type, tuple) else (config_type,)))
    check_flags(arguments, default)
    is_first = os.environ.get("RANK", "0") == "0"  # help is wanted once, not once per rank
    refused, shown = io.StringIO(), sys.stdout if is_first else io.StringIO()
    try:
        with contextlib.redirect_stderr(refused), contextlib.redirect_stdout(shown):
            written = tyro.cli(type(default), default=default, args=arguments, registry=_value_parsers())
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub("[\u2500-\u257f]+|-{3,}", " ", refused.getvalue())  # without frame and rulers
        _title, *lines = filter(None, map(str.strip, text.splitlines()))
        message = " ".join(lines).partition(" For full helptext")[0]
        raise ValueError(_of_a_table(message, arguments) or message) from None
    config = fit(written, default) if fit else written
    validate(config)
    check_effects(config, default)
    if is_first:
        print("\n  ".join([f"recipe {recipe}", *differences(written, default), *derived(config)]), flush=True)
        for warning in cautions(config):
            print(f"warning: {warning}", flush=True)
    return config


def _of_a_table(message: str, arguments: list[str]) -> str:
    """Say what a table lacks that tyro's `message` is about; empty for other messages."""
    parts = re.match(r"Error parsing (--\S+): Failed to parse key-value pairs.* \1 \[STR (\w+) ", message)
    if not parts:
        return ""
    flag, kind = parts.groups()
    name = arguments[arguments.index(flag) + 1] if flag in arguments else "NAME"
    value = {"FLOAT": "1.0", "STR": "TEXT", "JSON": "VALUE"}[kind]
    of_type = "a number" if kind == "FLOAT" else "a value"
    return f"{flag} takes names, each with {of_type} behind it, and one is missing: such as {flag} {name} {value}"


def check_flags(words: list[str], config: Config) -> None:
    """Refuse a command line's first flag that `config` has no field for, and a field written as other tools do.

    Raises ValueError that says which flag was meant. What stands behind a flag is left to tyro.
    """
    fields, switches = settings(config), {}
    for path in (path for path, value in fields.items() if isinstance(value, bool)):
        section, dot, name = path.rpartition(".")
        pair = _flag(path), _flag(f"{section}{dot}no_{name}")
        switches |= dict.fromkeys(pair, " or ".join(pair))
    known, before = {"--help", *map(_flag, fields), *switches}, ""
    for word in itertools.chain.from_iterable(w.split("=", 1) if w.startswith("--") else [w] for w in words):
        flag = word.replace("_", "-") if re.fullmatch(r"--[A-Za-z][\w.-]*", word) else ""
        path, equals, value = word.partition("=")
        if flag and flag not in known:
            near = " or ".join(map(_flag, _near_fields(word.removeprefix("--").replace("-", "_"), fields)))
            raise ValueError(f"there is no flag {word}; " + (f"did you mean {near}?" if near else "--help lists all"))
        if equals and path in fields:
            raise ValueError(f"{word!r} is no flag; write {_flag(path)} {value}")
        if word.endswith(".py") and os.path.isfile(word):
            raise ValueError(f"{word}: a recipe stands before the first flag, and there is only one")
        if before in switches and not word.startswith("-"):
            raise ValueError(f"{before} takes no value; write {switches[before]}")
        before = flag


def settings(config: Any) -> dict[str, Any]:
    """Return the value of each field that is no section, by its dotted path (`algorithm.kl_coef`)."""
    values = {path: attrgetter(path)(config) for path in field_paths(config)}
    return {path: value for path, value in values.items() if not dataclasses.is_dataclass(value)}


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _near_fields(path: str, fields: Iterable[str]) -> list[str]:
    """The fields that may be meant by `path`: of its last name or of these initials (`lr`), else of a similar name."""
    meant, names = path.rpartition(".")[2], {field: field.rpartition(".")[2] for field in fields}
    same = [field for field, name in names.items() if meant in (name, "".join(part[0] for part in name.split("_")))]
    close = difflib.get_close_matches(meant, names.values(), n=1)
    return same or [field for field, name in names.items() if name in close]


def as_json(word: str) -> Json:
    """`{"tokens": 256}` -> a dict, `false` and `False` -> False, `3` -> 3; what is no JSON stays text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except ValueError:
        return word


def _value_parsers():
    """Tell tyro how to read a value that may be any JSON."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: as_json(words[0]),
        is_instance=lambda value: isinstance(value, Json),
        str_from_instance=lambda value: [json.dumps(value)],
    )
    registry.primitive_rule(lambda info: spec if info.type == Json else None)
    return registry


def load_recipe(path: str, *config_types: type[Config]) -> Config:
    """Run a recipe file and return the `config` it binds, which must be of one of the types.

    Raises ValueError if there is none, a field does not take its value, or a line raised, which the message names.
    """
    if not pathlib.Path(path).is_file():
        there = sorted(str(p) for p in pathlib.Path(path).parent.glob("*.py")) or ["none"]
        raise ValueError(f"recipe {path} does not exist; recipes in that folder: {', '.join(there)}")
    if not path.endswith(".py"):
        raise ValueError(f"{path} is no recipe, which is a Python file that binds `config`; see configs/README.md")
    try:
        config = getattr(run_file(path), "config", None)
        if isinstance(config, config_types):
            check_fields(config)
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise ValueError(f"{path}{cause_and_line(error, path)}") from error
    if config is None:
        raise ValueError(f"{path} binds no `config`, which makes a Python file a recipe; see configs/README.md")
    if not isinstance(config, config_types):
        names = " or ".join(config_type.__name__ for config_type in config_types)
        script = {GRPOConfig: "train_grpo.py", SFTConfig: "train_sft.py"}.get(type(config))
        raise ValueError(
            f"{path} must bind `config` to a {names}, it binds {type(config).__name__}"
            + (f", which is for {script}" if script else "")
        )
    return config


def change(base: Config | str | os.PathLike, changes: dict[str, Any]) -> Config:
    """Return a config with other values: `config = change("qwen3_1_7b_gsm8k.py", {"algorithm.loss": "dapo"})`.

    `base` is a config, or a recipe file; a relative path starts in the folder of the file that calls. `changes` has new
    values by the dotted paths of their fields. Raises ValueError if there is no such field or recipe.
    """
    if not dataclasses.is_dataclass(base):
        caller = sys._getframe(1).f_globals.get("__file__", "")  # "" at an interactive prompt
        base = load_recipe(os.path.join(os.path.dirname(caller), base), GRPOConfig, SFTConfig)
    for path, value in changes.items():
        if path not in (paths := list(field_paths(base))):
            near = _near_fields(path, paths)
            raise ValueError(f"there is no field {path}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        section, _, name = path.rpartition(".")
        if section:
            value = dataclasses.replace(getattr(base, section), **{name: value})
        base = dataclasses.replace(base, **{section or name: value})
    return base


def for_one_process(config: Config, recipe: Config | None = None) -> Config:
    """Return the config with all roles on one rank, which is what a script is without torchrun.

    On a GPU the engine then takes a smaller part of the memory, because a trainer has the rest. A part that a flag set
    stays: it differs from the one in `recipe`. A config that needs one rank is returned as it is.
    """
    if config.num_ranks == 1:
        return config
    changes = {"trainer.tensor_parallel": 1, "trainer.data_replicas": 1, "generator.tensor_parallel": 1}
    if isinstance(config, SFTConfig):
        return change(config, changes | {"num_trainers": 1})
    changes |= {"roles.colocated": True, "roles.num_trainers": 1, "roles.num_references": 0, "overlap_steps": 0}
    share = config.generator.gpu_memory_utilization
    if recipe is None or share == recipe.generator.gpu_memory_utilization:
        changes["generator.gpu_memory_utilization"] = min(share, SHARED_GPU)
    return change(config, changes)


def differences(config: Config, recipe: Config) -> list[str]:
    """`num_steps = 2, not 170` for each field that has another value than in the recipe."""
    before = settings(recipe)
    return [f"{p} = {value!r}, not {before[p]!r}" for p, value in settings(config).items() if value != before[p]]


def derived(config: Config) -> list[str]:
    """Say what follows from the loss in fields that are None, and what is set to another value than would follow."""
    if isinstance(config, SFTConfig):
        return []
    resolved, paper = config.algorithm.resolved, AlgorithmConfig(loss=config.algorithm.loss).resolved
    values = [f"{name}={getattr(resolved, name)!r}" for name, value in vars(config.algorithm).items() if value is None]
    told = [f"from algorithm.loss={resolved.loss} follow {', '.join(values)}"] if values else []
    own = [f"{n}={getattr(resolved, n)!r}" for n in OWN_LOSS_DEFAULTS if getattr(resolved, n) != getattr(paper, n)]
    return told + ([f"set to another value than follows: {', '.join(own)}"] if own else [])


def as_recipe(config: GRPOConfig | SFTConfig) -> str:
    """Return the config as the text of a recipe file, without what is FOR_ONE_START.

    What was left open (None) stays open, so that `runs/a/config.py --algorithm.loss dapo` is all of DAPO.
    """

    def lines(value: Any, indent: str) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name!r}: {lines(entry, indent)}' for name, entry in value.items())}}}"
        if not dataclasses.is_dataclass(value):
            return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
        entries = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        body = "".join(f"{indent}    {name}={lines(entry, indent + '    ')},\n" for name, entry in entries)
        return f"c.{type(value).__name__}(\n{body}{indent})"

    return f"from grpo import config as c\n\nconfig = {lines(dataclasses.replace(config, **FOR_ONE_START), '')}\n"


def written_fields(config: GRPOConfig | SFTConfig) -> dict[str, str]:
    """Return each field by its dotted path, as Python writes its value; those for one start as in `as_recipe`."""
    return {path: repr(value) for path, value in settings(dataclasses.replace(config, **FOR_ONE_START)).items()}


def changes_since(before: dict[str, str], config: GRPOConfig | SFTConfig) -> dict[str, bool]:
    """Return `path: old -> new` for what differs from the config of which `before` are the `written_fields`.

    True where what the run samples or learns depends on that field.
    """
    now = written_fields(config)
    return {
        f"{path}: {old} -> {new}": path not in now or not is_harmless(path, config)
        for path in dict.fromkeys([*now, *before])
        if (old := before.get(path, "not there")) != (new := now.get(path, "not there"))
    }


def is_harmless(path: str, config: GRPOConfig | SFTConfig) -> bool:
    """Tell whether a run may go on with another value of that field and still be the same run."""
    if path == "num_steps":  # the other schedules end where the steps do
        return config.trainer.schedule == "constant"
    section = config
    for name in path.split("."):
        if Harmless in get_args(get_type_hints(type(section), include_extras=True)[name]):
            return True
        section = getattr(section, name)
    return False
