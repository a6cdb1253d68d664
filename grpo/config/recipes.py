"""A recipe file and the command line become a checked config; a config becomes the recipe that a run folder keeps."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.config.checks import cautions, check_effects, validate
from grpo.config.fields import SHARED_GPU, Config, GRPOConfig, Json, SFTConfig
from grpo.config.user_files import cause_and_line, near_miss, run_file
from grpo.config.values import check_fields, field_paths, settings

SCRIPTS = {GRPOConfig: "train_grpo.py", SFTConfig: "train_sft.py"}
# Fields meant for one start: in a saved config they would continue or delete the run that it describes
FOR_ONE_START: dict[str, Any] = dict.fromkeys(("resume", "allow_changes", "overwrite"), False)

# Sections and fields that a resume may change. Samples and gradients do not depend on them, except through the order in
# which floating point numbers are added and, with sampling.carry_over, through which groups are complete when a step
# ends.
RESUME_SAFE = (
    "roles evaluation validation checkpoint metrics run_dir deadline_minutes dry_run gpus gpu_gib record show "
    "num_trainers stop_at_loss sync_check_interval model.attention trainer.tensor_parallel "
    "trainer.context_parallel trainer.expert_parallel trainer.data_replicas "
    "trainer.micro_batch_tokens trainer.share_prompts trainer.activation_checkpointing trainer.compile "
    "trainer.logprob_chunk_tokens generator.tensor_parallel generator.gpu_memory_utilization generator.sleep "
    "reward.num_workers reward.timeout_seconds reward.memory_gib reward.allow_without_landlock reward.passes "
    "reward.pass_value reward.environment environment.call_seconds environment.reset_seconds "
    "environment.num_processes environment.memory_gib"
)

# Flags of other tools, for which tyro would suggest another field or none
FIELDS_OF_FLAGS = {
    "--lr": "trainer.learning_rate",
    "--beta": "algorithm.kl_coef",
    "--max-steps": "num_steps",
    "--num-generations": "group_size",
    "--output-dir": "run_dir",
    "--model-name-or-path": "model.path",
    "--model-revision": "model.path",
    "--dataset-name": "data.path",
    "--max-prompt-length": "data.max_prompt_tokens",
    "--max-completion-length": "generator.max_completion_tokens",
    "--max-length": "max_sequence_tokens",
    "--lr-scheduler-type": "trainer.schedule",
    "--loss-type": "algorithm.loss",
    "--epsilon": "algorithm.clip_low",
    "--epsilon-high": "algorithm.clip_high",
    "--scale-rewards": "algorithm.advantages",
    "--num-iterations": "algorithm.num_epochs",
    "--reward-funcs": "reward.functions",
    "--reward-weights": "reward.functions",
    "--save-steps": "checkpoint.interval",
    "--eval-steps": "evaluation.interval",
    "--mask-truncated-completions": "algorithm.mask_truncated",
    "--vllm-gpu-memory-utilization": "generator.gpu_memory_utilization",
}
OF_OTHER_TOOLS = "docs/from-trl.md and docs/from-verl.md have their names beside ours, --help has all of ours"


def load(
    config_type: type | tuple[type, ...],
    default_recipe: str,
    arguments: list[str] | None = None,
    fit: Callable[[Config, Config], Config] | None = None,
) -> Config:
    """Read `[RECIPE.py] [--field value ...]` into a checked config. Print what differs from the recipe.

    config_type: the type that the recipe must bind, or several types; flags are then those of the type that it binds.
    fit: a function of the config as written and the recipe's, which returns the config that will run. Raises ValueError
    if the recipe, a flag or the config cannot be used, and SystemExit for `--help`, which tyro prints.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    recipe = default_recipe
    first = (arguments or ["-"])[0]
    if not first.startswith("-") and (first.endswith(".py") or "=" not in first):
        recipe = arguments.pop(0)
    default: Any = load_recipe(recipe, config_type)
    is_first = os.environ.get("RANK", "0") == "0"
    flags = [_checked_flag(word, default) for word in arguments]
    written: Any = _apply_flags(flags, default, prints_help=is_first)
    config: Any = fit(written, default) if fit else written
    validate(config)
    check_effects(config, default)
    if is_first:
        lines = [f"recipe {recipe}", *differences(written, default), *derived(config)]
        print("\n  ".join(lines))
        for warning in cautions(config):
            print(f"warning: {warning}")
    return config


def _checked_flag(word: str, default: Config) -> str:
    """Return a word of the command line, a flag with dashes for underscores.

    Raises ValueError with what to write for a flag of another tool, and for a recipe.
    """
    flag, sign, value = word.partition("=")
    flag = flag.replace("_", "-")
    field = FIELDS_OF_FLAGS.get(flag)
    if field in field_paths(default):
        raise ValueError(f"there is no flag {word}; write --{field.replace('_', '-')} VALUE")
    if word.endswith(".py") and os.path.isfile(word):  # which a flag of many words would take for one of them
        raise ValueError(f"{word}: a recipe stands before the first flag; a function is written {word}:NAME")
    if flag.startswith("--"):  # tyro takes either spelling, but looks for a near name only among dashes
        return flag + sign + value
    return word


def _apply_flags(flags: list[str], default: Config, *, prints_help: bool) -> Config:
    """Return the recipe's config with the values of the flags.

    prints_help: true on one rank, so that `--help` is not printed by each. Raises ValueError if tyro does not take the
    flags, and SystemExit after help.
    """
    if not flags:
        return default
    import tyro  # not needed by code that gets its config as an object

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                type(default),
                default=default,
                args=flags,
                console_outputs=prints_help,
                registry=_value_parsers(),
                # fields have docstrings, and to look for comments takes a fifth of the time or more
                config=(tyro.conf.HelptextFromCommentsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_in_one_line(complaint.getvalue())) from None


def _in_one_line(complaint: str) -> str:
    """Return what tyro complains about, without its frame and title, and what to write instead."""
    _title, _, text = complaint.partition("\n")
    text = re.sub("[\u2500-\u257f]+|-{3,}", " ", text)  # without frame and rulers
    message = " ".join(text.split()).partition(" For full helptext")[0].removesuffix(".")
    if re.match(r"Unrecognized options: (--|\S+\.)", message):  # verl writes a setting as name=value
        return f"{message}; {OF_OTHER_TOOLS}"
    return f"{message}; write --field VALUE, --field NAME VALUE NAME VALUE .., or for a switch --field or --no-field"


def as_json(word: str) -> Json:
    """Read a word as JSON: `{"tokens": 256}` is a dict, `false` and `False` are False. Other words stay text."""
    of_python = {"True": "true", "False": "false", "None": "null"}
    try:
        return json.loads(of_python.get(word, word))
    except ValueError:
        return word


def _value_parsers():
    """Return the registry by which tyro reads a value that may be any JSON."""
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


def load_recipe(path: str, *config_types: type | tuple[type, ...]) -> Any:
    """Run a recipe file and return the `config` it binds, which must be of one of the types.

    A relative path in it starts in the folder that the run starts in.

    Raises ValueError if there is none, a field does not take its value, or a line raised, which the message names.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = sorted(map(str, file.parent.glob("*.py"))) or ["none"]
        raise ValueError(f"recipe {path} is no file; Python files beside it: {', '.join(neighbours)}")
    if not path.endswith(".py"):
        raise ValueError(f"{path} is no recipe, which is a Python file that binds `config`; see configs/README.md")
    try:
        config = getattr(run_file(path), "config", None)
        if isinstance(config, config_types):
            check_fields(config)
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise ValueError(f"{path}{cause_and_line(error, path)}") from error
    if not isinstance(config, config_types):
        script = SCRIPTS.get(type(config), "no script")
        raise ValueError(
            f"{path} must bind `config` to a config of this script, see configs/README.md; it binds "
            f"{type(config).__name__}, which is for {script}"
        )
    return config


def change(base: Config | str | os.PathLike, changes: dict[str, Any]) -> Config:
    """Return a config with other values: `config = change("qwen3_1_7b_gsm8k.py", {"algorithm.loss": "dapo"})`.

    `base` is a config, or a recipe file; a relative path starts in the folder of the file that calls. `changes` has new
    values by the dotted paths of their fields. Raises ValueError if there is no such field or recipe.
    """
    config: Any = base
    if isinstance(base, (str, os.PathLike)):
        caller = sys._getframe(1).f_globals.get("__file__", "")  # "" at an interactive prompt
        path = os.path.join(os.path.dirname(caller), base)
        config = load_recipe(path, GRPOConfig, SFTConfig)
    for path, value in changes.items():
        paths = list(field_paths(config))
        section, _, name = path.rpartition(".")
        if path not in paths:
            siblings = [other for other in paths if other.rpartition(".")[0] == section]
            hint = near_miss(path, paths) or f"; there are {', '.join(siblings or paths)}"
            raise ValueError(f"there is no field {path}{hint}")
        if section:
            value = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section or name: value})
    return config


def for_one_process(config: Config, recipe: Config | None = None) -> Config:
    """Return the config with all roles on one rank, for a script that runs without torchrun.

    The engine's share of a GPU is lowered, because a trainer needs the rest, except if a flag changed the share in
    `recipe`. A config that needs one rank is returned as it is.
    """
    if config.num_ranks == 1:
        return config
    changes: dict[str, Any] = {
        "trainer.tensor_parallel": 1,
        "trainer.context_parallel": 1,
        "trainer.expert_parallel": 1,
        "trainer.data_replicas": 1,
        "generator.tensor_parallel": 1,
    }
    if isinstance(config, SFTConfig):
        return change(config, changes | {"num_trainers": 1})
    changes |= {
        "roles.colocated": True,
        "roles.num_trainers": 1,
        "roles.num_references": 0,
        "overlap_steps": 0,
    }
    share = config.generator.gpu_memory_utilization
    if recipe is None or share == recipe.generator.gpu_memory_utilization:
        changes["generator.gpu_memory_utilization"] = min(share, SHARED_GPU)
    return change(config, changes)


def differences(config: Config, recipe: Config) -> list[str]:
    """List the fields that differ from the recipe's, as `num_steps = 2, not 170`."""
    before = settings(recipe)
    return [
        f"{path} = {value!r}, not {before[path]!r}" for path, value in settings(config).items() if value != before[path]
    ]


def derived(config: Config) -> list[str]:
    """Say in a line which values the loss gives to fields left at None."""
    if isinstance(config, SFTConfig):
        return []
    resolved = vars(config.algorithm.resolved)
    filled = [f"{name}={resolved[name]!r}" for name, value in vars(config.algorithm).items() if value is None]
    return [f"from algorithm.loss={config.algorithm.loss} follow {', '.join(filled)}"] if filled else []


def as_recipe(config: Config) -> str:
    """Return the config as the text of a recipe file, without what is FOR_ONE_START.

    A field left at None stays None, so that `runs/a/config.py --algorithm.loss dapo` is all of DAPO.
    """

    def lines(value: Any, indent: str) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name!r}: {lines(entry, indent)}' for name, entry in value.items())}}}"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if not dataclasses.is_dataclass(value):
            return repr(value)
        body = "".join(f"{indent}    {name}={lines(entry, indent + '    ')},\n" for name, entry in vars(value).items())
        return f"c.{type(value).__name__}(\n{body}{indent})"

    return f"from grpo import config as c\n\nconfig = {lines(dataclasses.replace(config, **FOR_ONE_START), '')}\n"


def written_fields(config: Config) -> dict[str, str]:
    """Return each field by its dotted path, as Python writes its value; fields for one start as in `as_recipe`."""
    saved = dataclasses.replace(config, **FOR_ONE_START)
    return {path: repr(value) for path, value in settings(saved).items()}


def is_resume_safe(path: str, config: Config) -> bool:
    """Tell whether a run may continue with another value of that field and still be the same run."""
    section, _, _ = path.partition(".")
    if path == "num_steps":  # other schedules end with the last step
        return config.trainer.schedule == "constant"
    if path in ("reward.passes", "reward.pass_value") and config.data.curriculum:  # which weighs rows by what passes
        return False
    if isinstance(config, SFTConfig) and section in ("reward", "generator"):  # only evaluation reads them
        return True
    return section in RESUME_SAFE.split() or path in RESUME_SAFE.split()
