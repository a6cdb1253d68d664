"""Recipe files and the command line -> a checked config: `load`, `validate`, and the layout arithmetic behind them.

Layer 0: imports nothing but the standard library (and tyro, when there is a command line), so that bad input is refused
before torch is even loaded. The fields are in config.py.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import sys
from typing import TypeVar

from grpo.config import (
    OWN_LOSS_DEFAULTS,
    PAPER_DEFAULTS,
    AlgorithmConfig,
    GRPOConfig,
    Options,
    Scalar,
    SFTConfig,
    check_loss_name,
)

Config = TypeVar("Config", GRPOConfig, SFTConfig)

# Far above the clips of its paper, for a ratio of whole sequences
WIDE_GSPO_CLIP = 0.05


def load(config_type: type[Config], default_recipe: str, arguments: list[str] | None = None) -> Config:
    """Read `[RECIPE.py] [--field value ...]` from the command line into a checked config.

    Raises:
        ValueError: the recipe does not exist or binds no `config` of `config_type`, or a check failed.
        SystemExit: `--help`, or an unknown field (tyro prints the near misses).
    """
    import tyro  # not needed by code that gets its config as an object

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default_recipe
    default = load_recipe(recipe, config_type)
    with contextlib.ExitStack() as silence:
        if os.environ.get("RANK", "0") != "0":  # help and errors are wanted once, not once per rank
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        parsed = tyro.cli(
            config_type, default=default, args=arguments, description=config_type.__doc__, registry=_value_parsers()
        )
        config = complete(parsed)
        validate(config)
        for warning in cautions(config):
            print(f"warning: {warning}", flush=True)
    return config


def _value_parsers():
    """How to read the two kinds of values that tyro does not know: JSON objects, and scalars as JSON."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info):
        if info.type == Options:
            return spec("JSON", json.loads, dict)
        if info.type == Scalar:
            return spec("VALUE", _scalar, (bool, int, float, str))
        return None

    def spec(metavar, parse, types):
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: parse(words[0]),
            is_instance=lambda value: isinstance(value, types),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return registry


def _scalar(word: str) -> Scalar:
    """`false` and `False` -> False, `3` -> 3, `low` -> "low"."""
    with contextlib.suppress(ValueError):
        value = json.loads({"True": "true", "False": "false"}.get(word, word))
        if isinstance(value, Scalar):
            return value
    return word


def load_recipe(path: str, config_type: type[Config]) -> Config:
    """Run a recipe file and return the `config` it binds."""
    if not pathlib.Path(path).is_file():
        there = sorted(str(p) for p in pathlib.Path(path).parent.glob("*.py")) or ["none"]
        raise ValueError(f"recipe {path} does not exist; recipes in that folder: {', '.join(there)}")
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, config_type):
        raise ValueError(f"{path} must bind `config` to a {config_type.__name__}, it binds {type(config).__name__}")
    return config


def complete(config: Config) -> Config:
    """Fill in what the loss's paper decides, wherever the user left it open (None)."""
    if isinstance(config, SFTConfig):
        return config
    algorithm = config.algorithm
    check_loss_name(algorithm.loss)
    defaults = dict(PAPER_DEFAULTS.get(algorithm.loss, OWN_LOSS_DEFAULTS))
    defaults["importance_correction"] = "truncate" if algorithm.old_logprobs == "policy" else "none"
    open_fields = {name: value for name, value in defaults.items() if getattr(algorithm, name) is None}
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, **open_fields))


def as_recipe(config: GRPOConfig | SFTConfig) -> str:
    """The resolved config as the text of a recipe file, so that a run can be repeated from its own folder."""

    def lines(value, indent: int) -> str:
        if not dataclasses.is_dataclass(value):
            return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
        pad = "    " * (indent + 1)
        body = "".join(
            f"{pad}{f.name}={lines(getattr(value, f.name), indent + 1)},\n" for f in dataclasses.fields(value)
        )
        return f"{type(value).__name__}(\n{body}{'    ' * indent})"

    values = [config, *(getattr(config, f.name) for f in dataclasses.fields(config))]
    names = sorted(type(value).__name__ for value in values if dataclasses.is_dataclass(value))
    imports = "".join(f"    {name},\n" for name in names)
    return f"from grpo.config import (\n{imports})\n\nconfig = {lines(config, 0)}\n"


def validate(config: GRPOConfig | SFTConfig) -> None:
    """Refuse what cannot work, before anything is loaded. Raises ValueError with the numbers and the way out."""
    if isinstance(config, GRPOConfig):
        _validate_grpo(config)
    trainer, num_trainers = config.trainer, (config.roles if isinstance(config, GRPOConfig) else config).num_trainers
    prefix = "roles." if isinstance(config, GRPOConfig) else ""
    _at_least(1, num_steps=config.num_steps, **{f"{prefix}num_trainers": num_trainers})
    _at_least(
        1,
        **{
            "trainer.tensor_parallel": trainer.tensor_parallel,
            "trainer.data_replicas": trainer.data_replicas,
            "trainer.logprob_chunk_tokens": trainer.logprob_chunk_tokens,
            "checkpoint.keep": config.checkpoint.keep,
        },
    )
    if isinstance(config, SFTConfig):
        _at_least(1, sequences_per_step=config.sequences_per_step, max_sequence_tokens=config.max_sequence_tokens)
    shards = trainer.tensor_parallel * trainer.data_replicas
    if num_trainers % shards:
        raise ValueError(
            f"{num_trainers} trainer ranks do not split into trainer.tensor_parallel={trainer.tensor_parallel} x "
            f"trainer.data_replicas={trainer.data_replicas}; use a multiple of {shards} trainer ranks, "
            f"for example {max(shards, num_trainers - num_trainers % shards)}"
        )
    if config.max_sequence_tokens > trainer.micro_batch_tokens:
        raise ValueError(
            f"a sequence of up to {config.max_sequence_tokens} tokens does not fit into trainer.micro_batch_tokens="
            f"{trainer.micro_batch_tokens}; raise it to at least {config.max_sequence_tokens} or shorten the lengths"
        )
    intervals = {
        "metrics.samples_interval": config.metrics.samples_interval,
        "checkpoint.interval": config.checkpoint.interval,
    }
    if isinstance(config, GRPOConfig):
        intervals["evaluation.interval"] = config.evaluation.interval
        intervals["sync_check_interval"] = config.sync_check_interval
    for name, interval in intervals.items():
        if interval < 0:
            raise ValueError(f"{name}={interval} counts steps and cannot be negative; 0 turns it off")
    if trainer.learning_rate < 0 or not trainer.max_grad_norm > 0:
        raise ValueError(
            f"trainer.learning_rate={trainer.learning_rate} must be at least 0 and "
            f"trainer.max_grad_norm={trainer.max_grad_norm} above 0"
        )


def _validate_grpo(config: GRPOConfig) -> None:
    roles, generator = config.roles, config.generator
    _at_least(1, prompts_per_step=config.prompts_per_step, group_size=config.group_size)
    _at_least(
        1,
        **{
            "data.max_prompt_tokens": config.data.max_prompt_tokens,
            "generator.tensor_parallel": generator.tensor_parallel,
            "generator.max_completion_tokens": generator.max_completion_tokens,
            "generator.max_num_seqs": generator.max_num_seqs,
            "trainer.tensor_parallel": config.trainer.tensor_parallel,
            "roles.num_trainers": roles.num_trainers,
            "evaluation.num_prompts": config.evaluation.num_prompts,
        },
    )
    _at_least(0, **{"roles.num_references": roles.num_references})
    if not roles.timeout_minutes > 0:
        raise ValueError(f"roles.timeout_minutes={roles.timeout_minutes} must be above 0 and exceed the longest step")
    num_generators = roles.num_trainers if roles.colocated else roles.num_generators
    if num_generators < 1:
        raise ValueError(
            "roles.num_generators=0 leaves nobody to sample; use at least "
            f"{generator.tensor_parallel} (generator.tensor_parallel) or --roles.colocated"
        )
    if num_generators % generator.tensor_parallel:
        fit = num_generators - num_generators % generator.tensor_parallel or generator.tensor_parallel
        raise ValueError(
            f"{num_generators} generator ranks do not split into replicas of generator.tensor_parallel="
            f"{generator.tensor_parallel}; use {fit} generator ranks or another tensor_parallel"
        )
    if roles.num_references and not config.needs_reference:
        raise ValueError(
            f"roles.num_references={roles.num_references} ranks would idle, because algorithm.kl_coef=0 needs no "
            "reference; set --roles.num-references 0 or an algorithm.kl_coef above 0"
        )
    if generator.sleep and not roles.colocated:
        raise ValueError("generator.sleep frees memory for a trainer on the same GPU; it needs --roles.colocated")
    if generator.sleep and config.sync_interval > 1:
        raise ValueError(
            f"generator.sleep drops the engine's weights after each step, so sync_interval={config.sync_interval} must "
            "be 1: they come back with the sync"
        )
    data_parallel = max(1, roles.num_trainers // config.trainer.tensor_parallel)
    if config.completions_per_step % data_parallel:
        fit = math.ceil(config.completions_per_step / data_parallel) * data_parallel
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} x group_size={config.group_size} = "
            f"{config.completions_per_step} completions do not divide over {data_parallel} data-parallel trainer "
            f"ranks; the next number that does is {fit}"
        )
    temperatures = generator.temperature if isinstance(generator.temperature, tuple) else ()
    if not temperatures or not all(0 < temperature < math.inf for temperature in temperatures):
        raise ValueError(
            f"generator.temperature={generator.temperature} must be a tuple of numbers above 0, such as (1.0,): greedy "
            "samples cannot be compared"
        )
    if len(temperatures) > config.group_size:
        raise ValueError(
            f"{len(temperatures)} temperatures for group_size={config.group_size} completions of a prompt; the rest "
            "would never be used"
        )
    if "" in generator.stop:
        raise ValueError("generator.stop has an empty string, which would end every completion; leave it out")
    if not 0 < generator.top_p <= 1 or not 0 <= generator.min_p < 1 or generator.top_k < 0:
        raise ValueError(
            f"generator.top_p={generator.top_p} must lie in (0, 1], generator.min_p={generator.min_p} in [0, 1) and "
            f"generator.top_k={generator.top_k} must not be negative; 1, 0 and 0 turn them off"
        )
    if not 0 < generator.gpu_memory_utilization <= 1 or generator.kv_cache_gib < 0:
        raise ValueError(
            f"generator.gpu_memory_utilization={generator.gpu_memory_utilization} must lie in (0, 1] and "
            f"generator.kv_cache_gib={generator.kv_cache_gib} must not be negative"
        )
    _validate_algorithm(complete(config).algorithm, config)
    _validate_sampling(config)
    if not config.reward.functions:
        raise ValueError("reward.functions is empty; name at least one, such as --reward.functions math_reward 1.0")


def _validate_algorithm(algorithm: AlgorithmConfig, config: GRPOConfig) -> None:
    if algorithm.clip_low < 0 or algorithm.clip_low > 1 or algorithm.clip_high < 0:
        raise ValueError(
            f"algorithm.clip_low={algorithm.clip_low} must lie in [0, 1] and "
            f"algorithm.clip_high={algorithm.clip_high} must not be negative"
        )
    not_negative = ("kl_coef", "importance_correction_low")
    for name in not_negative:
        if getattr(algorithm, name) < 0:
            raise ValueError(f"algorithm.{name}={getattr(algorithm, name)} must not be negative")
    for name in ("importance_correction_high",):
        if not getattr(algorithm, name) > 0:
            raise ValueError(f"algorithm.{name}={getattr(algorithm, name)} must be above 0")
    _at_least(
        1,
        **{
            "algorithm.num_mini_batches": algorithm.num_mini_batches,
            "algorithm.num_epochs": algorithm.num_epochs,
        },
    )
    if config.prompts_per_step < algorithm.num_mini_batches:
        raise ValueError(
            f"algorithm.num_mini_batches={algorithm.num_mini_batches} mini-batches of whole groups need as many "
            f"prompts; raise prompts_per_step={config.prompts_per_step}"
        )
    if algorithm.kl_in == "reward" and algorithm.kl_estimator == "k3_k2_gradient":
        raise ValueError(
            "algorithm.kl_in=reward uses the value of the KL alone, which k3_k2_gradient takes from k3; "
            "use --algorithm.kl-estimator k3"
        )
    if algorithm.kl_in == "reward" and not algorithm.kl_coef:
        raise ValueError("algorithm.kl_in=reward does nothing with algorithm.kl_coef=0; set it above 0")
    own = algorithm.loss not in PAPER_DEFAULTS
    has_ratio = algorithm.loss != "reinforce" or algorithm.loss_options.get("max_importance_weight", 0) > 0
    weighs = algorithm.importance_correction in ("truncate", "mask_tokens")
    if weighs and algorithm.old_logprobs == "generator" and has_ratio and not own:
        raise ValueError(
            "algorithm.old_logprobs=generator has the generator in the ratio already; weighing with "
            f"algorithm.importance_correction={algorithm.importance_correction} would count it twice; use none or "
            "mask_sequences"
        )
    masks = algorithm.importance_correction in ("mask_tokens", "mask_sequences")
    if masks and not algorithm.importance_correction_low <= 1 <= algorithm.importance_correction_high:
        raise ValueError(
            f"algorithm.importance_correction_low={algorithm.importance_correction_low} and "
            f"importance_correction_high={algorithm.importance_correction_high} must have 1 between them, the weight of "
            "a token on which generator and policy agree"
        )
    if config.group_size == 1 and algorithm.advantages != "none":
        raise ValueError(
            f"group_size=1 with algorithm.advantages={algorithm.advantages} makes every advantage 0, so nothing would "
            "be learned; use a group_size of at least 2, or advantages none"
        )


def _validate_sampling(config: GRPOConfig) -> None:
    sampling, reward = config.sampling, config.reward
    _at_least(
        1,
        **{
            "sampling.max_rounds": sampling.max_rounds,
            "sampling.filter_epochs": sampling.filter_epochs,
            "reward.num_workers": reward.num_workers,
            "sync_interval": config.sync_interval,
        },
    )
    if not 0 <= sampling.min_pass_rate < sampling.max_pass_rate <= 1:
        raise ValueError(
            f"sampling.min_pass_rate={sampling.min_pass_rate} and max_pass_rate={sampling.max_pass_rate} must be "
            "shares with min below max; 0 and 1 turn the filter off"
        )
    if sampling.dynamic and config.group_size == 1:
        raise ValueError("sampling.dynamic drops groups of equal rewards, which every group of group_size=1 is")
    if not reward.timeout_seconds > 0 or not reward.memory_gib > 0:
        raise ValueError(
            f"reward.timeout_seconds={reward.timeout_seconds} and reward.memory_gib={reward.memory_gib} must be above 0"
        )
    if config.evaluation.num_samples < 0 or not config.evaluation.temperature > 0:
        raise ValueError(
            f"evaluation.num_samples={config.evaluation.num_samples} must be at least 0 and "
            f"evaluation.temperature={config.evaluation.temperature} above 0"
        )
    for name, interval in {
        "evaluation.interval": config.evaluation.interval,
        "checkpoint.interval": config.checkpoint.interval,
    }.items():
        if interval % config.sync_interval:
            raise ValueError(
                f"{name}={interval} must be a multiple of sync_interval={config.sync_interval}: between syncs the "
                "generators hold older weights than the policy's"
            )


def cautions(config: GRPOConfig | SFTConfig) -> list[str]:
    """What is allowed but may surprise, one sentence each; `load` prints them once."""
    if not isinstance(config, GRPOConfig):
        return []
    generator, algorithm, found = config.generator, config.algorithm, []
    if algorithm.loss == "gspo" and (algorithm.clip_high or 0) > WIDE_GSPO_CLIP:
        found.append(
            f"algorithm.clip_high={algorithm.clip_high} hardly ever clips a sequence's ratio; gspo's paper has 4e-4 (a "
            "recipe saved from another loss names its clips)"
        )
    if (
        algorithm.loss_options.get("max_importance_weight")
        and config.updates_per_step == 1
        and algorithm.old_logprobs == "policy"
    ):
        found.append(
            "algorithm.max_importance_weight does nothing with one update per batch and old_logprobs=policy: every "
            "weight is 1"
        )
    if generator.top_p < 1 or generator.top_k > 0 or generator.min_p > 0:
        found.append(
            f"generator.top_p={generator.top_p}, top_k={generator.top_k}, min_p={generator.min_p} sample from another "
            "distribution than the one that is trained; mismatch/mean says by how much, and the canary may stop "
            "the run (--sync-check-interval 0 turns it off)"
        )
    return found


def check_world_size(config: GRPOConfig | SFTConfig, world_size: int) -> None:
    """Compare torchrun's number of processes with the layout. Raises ValueError that names both and a way out."""
    if world_size == config.num_ranks:
        return
    if isinstance(config, SFTConfig):
        raise ValueError(
            f"num_trainers={config.num_trainers}, but torchrun started {world_size} processes; "
            f"use --nproc_per_node={config.num_ranks} or --num-trainers {world_size}"
        )
    raise ValueError(
        f"the layout ({describe_layout(config)}) needs {config.num_ranks} processes, but torchrun started "
        f"{world_size}; use --nproc_per_node={config.num_ranks} (times nnodes), or for {world_size} processes: "
        f"{suggest_layout(config, world_size)}"
    )


def describe_layout(config: GRPOConfig) -> str:
    """One phrase that names the ranks of each role, such as `2 trainer + 1 reference + 1 generator`."""
    roles = config.roles
    if roles.colocated:
        return f"{roles.num_trainers} colocated"
    parts = [(roles.num_trainers, "trainer"), (roles.num_references, "reference"), (roles.num_generators, "generator")]
    return " + ".join(f"{count} {name}" for count, name in parts if count)


def suggest_layout(config: GRPOConfig, world_size: int) -> str:
    """Command-line flags of a layout that `world_size` ranks can run with this config's parallel degrees."""
    shards = config.trainer.tensor_parallel * config.trainer.data_replicas
    for references in dict.fromkeys([config.roles.num_references, 0]):
        for generators in range(config.generator.tensor_parallel, world_size, config.generator.tensor_parallel):
            trainers = world_size - references - generators
            fits = trainers >= 1 and trainers % shards == 0
            if (
                fits
                and trainers <= max(generators, shards)
                and config.completions_per_step % (trainers // config.trainer.tensor_parallel) == 0
            ):
                return (
                    f"--roles.no-colocated --roles.num-trainers {trainers} --roles.num-references {references} "
                    f"--roles.num-generators {generators}"
                )
    if world_size % shards == 0 and world_size % config.generator.tensor_parallel == 0:
        return f"--roles.colocated --roles.num-trainers {world_size} --roles.num-references 0"
    return "no layout fits these tensor_parallel degrees; lower them"


def _at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}")
