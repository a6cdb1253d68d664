"""What fields of a config ask of each other. What a single field takes is written at the field."""

import dataclasses
import math
import re
from collections.abc import Iterable
from operator import attrgetter

from grpo.config.bounds import check_fields
from grpo.config.engine_options import check_engine_options, needing_texts, reshaping
from grpo.config.fields import (
    PAPER_DEFAULTS,
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    GRPOConfig,
    HeldOutConfig,
    SFTConfig,
)
from grpo.config.user_files import near_miss

# Fields of `environment` that functions alone, which have no state, do not need.
OF_A_CLASS = ("options", "reset_seconds", "hung_reward", "weight")
# Fields -> the field without which nothing reads them.
HEEDED_WITH = {
    "trainer.lora_alpha": "trainer.lora_rank",
    "trainer.lora_targets": "trainer.lora_rank",
    "trainer.min_lr_ratio": "trainer.schedule",
    "gpu_gib": "gpus",
    "show": "dry_run",
    "sampling.max_rounds": "sampling.dynamic",
    "algorithm.kl_estimator": "algorithm.kl_coef",
}


def validate(config: GRPOConfig | SFTConfig) -> None:
    """Refuse what cannot work, before anything is loaded. Raises ValueError with the numbers and the way out."""
    check_fields(config)
    _check_data(config.data)
    _check_trainers(config)
    if isinstance(config, SFTConfig):
        _check_held_out(config.validation, config.data)
    else:
        _check_roles(config)
        _check_algorithm(config.algorithm.resolved, config)
        _check_lag(config.algorithm.resolved, config)
        _check_sampling(config)
        _check_environment(config)
    _check_held_out(config.evaluation, config.data)
    if isinstance(config, GRPOConfig) or config.evaluation.interval:
        _check_engines(config)
    _check_rewards(config)
    _check_intervals(config)


def _check_data(data: DataConfig) -> None:
    _ = data.all_sources  # raises ValueError for one that is not written as it should be
    _check_sets("data.path", "" if data.path == DataConfig.path else data.path, "data.sources", data.sources)
    for label in data.weights.keys() - data.sources.keys():
        there = ", ".join(data.sources) or "empty"
        raise ValueError(f"data.weights has {label!r}, not in data.sources ({there}){near_miss(label, data.sources)}")
    if data.columns.get("answer", data.answer_column) != data.answer_column != DataConfig.answer_column:
        raise ValueError(
            f"data.answer_column={data.answer_column!r} and data.columns answer={data.columns['answer']!r} name the "
            "same argument of the reward functions; drop one"
        )
    if data.is_text_template and "{question}" not in data.prompt_template:
        raise ValueError(
            f"data.prompt_template={data.prompt_template!r} has no {{question}} for the text of column "
            f"{data.prompt_column!r}; add it, or give the path of a .jinja file"
        )


def _check_held_out(config: HeldOutConfig, data: DataConfig) -> None:
    if config.interval:
        config.held_out(data)
        _check_sets(f"{config.section}.path", config.path, f"{config.section}.sets", config.sets)


def _check_sets(path_field: str, path: str, sets_field: str, sets: Iterable[str]) -> None:
    """Refuse one path beside several by names, and names that cannot become a part of metrics' names."""
    if sets and path:
        raise ValueError(
            f"{path_field}={path!r} and {sets_field} ({', '.join(sets)}) both say the same; drop one "
            f'(--{path_field} "", or --{sets_field} with nothing behind it)'
        )
    for name in sets:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{sets_field} has the name {name!r}; use letters, digits, '_', '-' and '.', as in gsm8k")


def _check_trainers(config: GRPOConfig | SFTConfig) -> None:
    trainer, num_trainers = config.trainer, config.roles.num_trainers
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
    num_data_ranks = num_trainers // trainer.tensor_parallel
    if isinstance(config, GRPOConfig) and config.completions_per_step % num_data_ranks:
        multiple = num_data_ranks // math.gcd(num_data_ranks, config.group_size)
        lower = config.prompts_per_step // multiple * multiple
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} x group_size={config.group_size} = "
            f"{config.completions_per_step} completions do not divide over {num_data_ranks} data-parallel trainer "
            f"ranks; use --prompts-per-step {lower + multiple}" + (f" or {lower}" if lower else "")
        )


def _check_engines(config: GRPOConfig | SFTConfig) -> None:
    roles, generator = config.roles, config.generator
    check_replicas(roles.num_trainers if roles.colocated else roles.num_generators, generator.tensor_parallel)
    check_engine_options(generator)


def check_replicas(num_generators: int, tensor_parallel: int) -> None:
    """Refuse generator ranks that do not make whole engines, or none. Raises ValueError with a number that does."""
    if not num_generators or num_generators % tensor_parallel:
        fit = num_generators - num_generators % tensor_parallel or tensor_parallel
        raise ValueError(
            f"{num_generators} generator ranks (num_generators) do not split into replicas of generator.tensor_parallel"
            f"={tensor_parallel}; use {fit}, or another tensor_parallel"
        )


def _check_roles(config: GRPOConfig) -> None:
    roles, generator = config.roles, config.generator
    if roles.num_references and not config.needs_reference:
        raise ValueError(
            f"roles.num_references={roles.num_references} ranks would idle, because algorithm.kl_coef=0 and "
            "distill_coef=0 need no reference; set --roles.num-references 0 or one of the two above 0"
        )
    if generator.sleep and not roles.colocated:
        raise ValueError(
            "generator.sleep drops the engine's weights until the next sync, in favour of a trainer on the same GPU: "
            "it needs --roles.colocated"
        )
    if not 1 <= len(generator.temperature) <= config.group_size:
        raise ValueError(
            f"{len(generator.temperature)} temperatures for group_size={config.group_size} completions; give at least "
            "one, and no more than there are completions"
        )


def _check_algorithm(algorithm: AlgorithmConfig, config: GRPOConfig) -> None:
    if config.prompts_per_step < algorithm.num_mini_batches:
        raise ValueError(
            f"algorithm.num_mini_batches={algorithm.num_mini_batches} mini-batches of whole groups need as many "
            f"prompts; raise prompts_per_step={config.prompts_per_step}"
        )
    has_ratio = algorithm.loss != "reinforce" or algorithm.loss_options.get("max_importance_weight")
    weighs = algorithm.importance_correction in ("truncate", "mask_tokens")
    if weighs and algorithm.old_logprobs == "generator" and has_ratio and algorithm.loss in PAPER_DEFAULTS:
        raise ValueError(
            "algorithm.old_logprobs=generator has the generator in the ratio already; "
            f"algorithm.importance_correction={algorithm.importance_correction} would count it twice; use none or "
            "mask_sequences"
        )
    masks = algorithm.importance_correction in ("mask_tokens", "mask_sequences")
    if masks and not algorithm.importance_correction_low <= 1 <= algorithm.importance_correction_high:
        raise ValueError(
            f"algorithm.importance_correction_low={algorithm.importance_correction_low} and importance_correction_high="
            f"{algorithm.importance_correction_high} must have 1 between them, where generator and policy agree"
        )
    if algorithm.kl_in == "reward" and not algorithm.kl_coef:
        raise ValueError("algorithm.kl_in=reward does nothing with algorithm.kl_coef=0; set it above 0")
    if algorithm.distill_coef and not config.model.reference_path:
        raise ValueError(
            f"algorithm.distill_coef={algorithm.distill_coef} has no teacher; name a --model.reference-path"
        )
    rewards = any(config.reward.functions.values()) or (config.environment.all_classes and config.environment.weight)
    only_teacher = algorithm.distill_coef > 0 and not rewards
    if config.group_size == 1 and algorithm.advantages != "none" and not only_teacher:
        raise ValueError(
            f"group_size=1 with algorithm.advantages={algorithm.advantages} makes every advantage 0; use a group_size "
            "of at least 2, advantages none, or rewards of weight 0 and a teacher"
        )


def _check_lag(algorithm: AlgorithmConfig, config: GRPOConfig) -> None:
    """Refuse completions of older weights where a step cannot have them, or nothing makes up for them."""
    overlap, carried, generator = config.overlap_steps, config.sampling.carry_over, config.generator
    if overlap and config.roles.colocated:
        raise ValueError(
            f"overlap_steps={overlap} lets generators sample while other ranks train, and with roles.colocated every "
            "rank does both in turns; set --overlap-steps 0, or split the roles: --roles.no-colocated with "
            "--roles.num-trainers and --roles.num-generators"
        )
    if carried >= config.prompts_per_step:
        raise ValueError(
            f"sampling.carry_over={carried} must be below prompts_per_step={config.prompts_per_step}, so that a step "
            "samples at all; a quarter of it is a good deal"
        )
    for name, values in (("stop", generator.stop), ("sampling", needing_texts(generator.sampling))):
        if carried and values:
            raise ValueError(
                f"sampling.carry_over={carried} goes on with a completion as with a longer prompt, of which generator."
                f"{name} {', '.join(map(repr, values))} would see the end alone; drop one (generator.stop_token_ids "
                "may stay)"
            )
    # a mask of whole sequences weighs nothing, so the ratio must
    in_the_ratio = algorithm.old_logprobs == "generator" and algorithm.importance_correction == "mask_sequences"
    corrected = algorithm.importance_correction in ("truncate", "mask_tokens") or in_the_ratio
    if (overlap or carried) and not corrected:
        raise ValueError(
            f"overlap_steps={overlap} and sampling.carry_over={carried} train on completions of older weights, which "
            f"algorithm.importance_correction={algorithm.importance_correction} with old_logprobs="
            f"{algorithm.old_logprobs} does not make up for; use --algorithm.old-logprobs policy with "
            "--algorithm.importance-correction truncate (or mask_tokens), or old_logprobs generator with mask_sequences"
        )


def _check_sampling(config: GRPOConfig) -> None:
    if config.sampling.dynamic and config.group_size == 1:
        raise ValueError("sampling.dynamic drops groups of equal rewards, which every group of group_size=1 is")


def _check_environment(config: GRPOConfig) -> None:
    environment, generator = config.environment, config.generator
    if config.turns_earn and not environment.enabled:
        raise ValueError(
            "algorithm.advantages=return_to_go compares turns, and no environment plays; name one (--environment.name "
            "or --environment.tools), or use rloo, which it is for a single turn"
        )
    if config.turns_earn and config.algorithm.loss == "gspo":
        raise ValueError(
            "algorithm.loss=gspo has one ratio for a whole sequence, whose gradient would mix the turns that "
            "algorithm.advantages=return_to_go tells apart; use another loss, or rloo"
        )
    default, no_class = EnvironmentConfig(), not environment.all_classes
    for one in dataclasses.fields(environment):
        value = getattr(environment, one.name)
        if value != getattr(default, one.name) and (not environment.enabled or (no_class and one.name in OF_A_CLASS)):
            or_tools = "" if environment.enabled else ", --environment.tools path/file.py:function"
            raise ValueError(
                f"environment.{one.name}={value!r} does nothing without an environment; set --environment.name "
                f"path/file.py:Class{or_tools}, or drop it"
            )
    if bool(environment.classes) != bool(config.data.environment_column):
        raise ValueError(
            f"environment.classes ({', '.join(environment.classes) or 'none'}) and data.environment_column="
            f"{config.data.environment_column!r} need each other: the column says which class a row gets"
        )
    if environment.classes and environment.options:
        raise ValueError(
            "environment.options are for the class of environment.name; with environment.classes, write them as "
            "defaults of its __init__"
        )
    if not environment.enabled:
        return
    _check_sets("environment.name", environment.name, "environment.classes", environment.classes)
    for spec in environment.all_classes.values():
        if ":" not in spec:
            raise ValueError(
                f"environment.{'classes' if environment.classes else 'name'} has {spec!r}, which names no class in a "
                "file; write path/file.py:Class (functions and the built-in calculator and python belong in "
                "environment.tools)"
            )
    if environment.rounds and environment.answer_steps:
        raise ValueError(
            f"environment.rounds and answer_steps={environment.answer_steps} both say when an answer joins; drop one"
        )
    if environment.max_turn_tokens >= generator.max_completion_tokens:
        raise ValueError(
            f"environment.max_turn_tokens={environment.max_turn_tokens} must be below generator.max_completion_tokens="
            f"{generator.max_completion_tokens}, which all turns and answers share; lower it, or set 0 for what is left"
        )
    refused = {
        "sampling.carry_over": config.sampling.carry_over and "an environment does not outlive its step; set it to 0",
        "generator.stop": generator.stop and "a turn ends with the template's own token; use generator.stop_token_ids",
        "generator.sampling": needing_texts(generator.sampling) and "it would see each turn alone; drop it",
        "data.prompt_template": config.data.is_text_template
        and "text with placeholders has no turns; give a .jinja file, or a model with a chat template",
    }
    for name, why in refused.items():
        if why:
            raise ValueError(f"{name} does not go with environment.name and environment.tools: {why}")


def _check_rewards(config: GRPOConfig | SFTConfig) -> None:
    asks = {"evaluation.interval": config.evaluation.interval}
    if isinstance(config, GRPOConfig):
        asks |= {"sampling.dynamic": config.sampling.dynamic}
        asks |= {"training without a teacher (algorithm.distill_coef=0)": not config.algorithm.distill_coef}
    for name, asked in asks.items():
        if asked and not config.reward.functions and not config.environment.all_classes:
            raise ValueError(
                f"{name} needs a reward function, and reward.functions is empty; name one, such as --reward.functions "
                "math_reward 1 (weight 0 measures without teaching), or an environment"
            )


def _check_intervals(config: GRPOConfig | SFTConfig) -> None:
    """Refuse a step that comes too late, and steps at which something that is needed does not happen."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if config.profile > config.num_steps:
        raise ValueError(f"profile={config.profile} is no step of a run of num_steps={config.num_steps}; lower it")
    if checkpoint.keep_best and (not evaluation.interval or checkpoint.interval % evaluation.interval):
        raise ValueError(
            f"checkpoint.keep_best={checkpoint.keep_best} needs an evaluation wherever a checkpoint is saved: "
            f"checkpoint.interval={checkpoint.interval} must be a multiple of "
            f"evaluation.interval={evaluation.interval}, and that not 0"
        )


def check_effects(config: GRPOConfig | SFTConfig, recipe: GRPOConfig | SFTConfig) -> None:
    """Raise ValueError for a field of HEEDED_WITH that differs from the recipe's, while nothing reads it."""
    for path, switch in HEEDED_WITH.items():
        if not hasattr(config, path.partition(".")[0]):
            continue
        value, off = attrgetter(path)(config), attrgetter(switch)(config)
        if off in (0, "constant") and value != attrgetter(path)(recipe):
            raise ValueError(f"{path}={value!r} does nothing with {switch}={off!r}; set that too, or drop it")


def cautions(config: GRPOConfig | SFTConfig) -> list[str]:
    """What is allowed but may surprise, one sentence each; `load` prints them once."""
    data, found = config.data, []
    if data.is_text_template and data.system_prompt and "{system_prompt}" not in data.prompt_template:
        found.append("data.system_prompt is not used, because data.prompt_template has no {system_prompt}")
    if not isinstance(config, GRPOConfig):
        return found
    if names := reshaping(config.generator.sampling):
        found.append(
            f"generator.sampling {', '.join(names)}: tokens are drawn from another distribution than the one that is "
            "trained; mismatch/mean says by how much, and the sync check may stop the run (--sync-check-interval 0 "
            "turns it off)"
        )
    return found
