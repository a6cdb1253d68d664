"""Checks of fields against each other and against torchrun's ranks. The bounds of a single field stand at the field."""

import math
import os
import pathlib
from collections.abc import Iterator

from grpo import features
from grpo.config.engine_options import (
    RESHAPING_ENGINE,
    check_engine_options,
    inexact_options,
    needs_texts,
)
from grpo.config.fields import (
    PAPER_DEFAULTS,
    AlgorithmConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    GRPOConfig,
    RolesConfig,
    SFTConfig,
)
from grpo.config.user_files import near_miss
from grpo.config.values import check_fields, names_function, settings

# Fields -> switches, one of which must be on, or nothing reads the field
READ_WITH = {
    **dict.fromkeys(
        (f"environment.{field}" for field in vars(EnvironmentConfig())),
        "environment.name environment.tools environment.agent",
    ),
    # tools alone have no state
    **dict.fromkeys(("environment.hung_reward", "environment.weight"), "environment.name environment.agent"),
    "environment.options": "environment.name",
    "reward.model_weight": "reward.model",
    "trainer.lora_alpha": "trainer.lora_rank",
    "trainer.lora_targets": "trainer.lora_rank",
    "trainer.min_lr_ratio": "trainer.schedule",
    "gpus": "dry_run",
    "gpu_gib": "gpus",
    "show": "dry_run",
    "sampling.max_rounds": "sampling.dynamic",
    "algorithm.kl_estimator": "algorithm.kl_coef",
    "algorithm.kl_in": "algorithm.kl_coef",
    "algorithm.reference_interval": "algorithm.kl_coef algorithm.distill_coef",
    "algorithm.reference_mixture": "algorithm.reference_interval",
}
# Adapters need about ten times the learning rate of all weights, which is 1e-6 to 3e-6 in GRPO
LEAST_LORA_RATE = 5e-6
OFF: tuple = (False, "", {}, (), "constant")  # values of a switch


def validate(config: Config) -> None:
    """Refuse what cannot work, before anything is loaded. Raises ValueError with the numbers and the way out."""
    check_fields(config)
    for problem in _problems(config):
        raise ValueError(problem)
    if config.evaluation.interval:
        config.evaluation.held_out(config.data)  # raises ValueError if none is named
    if isinstance(config, SFTConfig) and config.validation.interval:
        config.validation.held_out(config.data)
    if isinstance(config, GRPOConfig) or config.evaluation.interval:
        check_replicas(config.roles.num_engine_ranks, config.generator.tensor_parallel)
        check_engine_options(config.generator)


def _problems(config: Config) -> Iterator[str]:
    """Yield what cannot work, a sentence each; the cheapest to see comes first."""
    yield from _data_problems(config.data)
    yield from _trainer_problems(config)
    if isinstance(config, GRPOConfig):
        algorithm = config.algorithm.resolved
        yield from _feature_problems(config)
        yield from _group_problems(algorithm, config)
        yield from _correction_problems(algorithm, config)
    yield from _reward_problems(config)
    yield from _step_problems(config)
    for problems in features.call(config, "problems", config):
        yield from problems


def _data_problems(data: DataConfig) -> Iterator[str]:
    """Yield sources and weights that draw nothing, and a prompt template without a place for the question."""
    sources = data.all_sources  # raises ValueError for one written wrongly
    labels = [source.label for source in sources]
    for label in data.weights.keys() - labels:
        yield f"data.weights has {label!r}, not in data.path{near_miss(label, labels)}"
    if not any(source.weight for source in sources):
        yield f"data.weights={data.weights} draw from no source; give one a weight above 0"
    if data.is_text_template and "{question}" not in data.prompt_template:
        yield f"data.prompt_template={data.prompt_template!r} has no {{question}}; add it, or give a .jinja file"


def _trainer_problems(config: Config) -> Iterator[str]:
    """Yield trainer ranks that do not split, rows too short for a sequence, and moments that would never fall."""
    trainer = config.trainer
    num_trainers = config.roles.num_trainers
    longest = config.max_sequence_tokens
    shards = trainer.ranks_of_a_row * trainer.data_replicas
    if num_trainers % shards:
        yield (
            f"{num_trainers} trainer ranks do not split into trainer.tensor_parallel={trainer.tensor_parallel} x "
            f"trainer.context_parallel={trainer.context_parallel} x trainer.data_replicas={trainer.data_replicas}; use "
            f"{max(shards, num_trainers - num_trainers % shards)}"
        )
    per_replica = num_trainers // trainer.data_replicas
    if per_replica % trainer.expert_parallel:
        yield (
            f"{per_replica} trainer ranks of a replica do not split into trainer.expert_parallel="
            f"{trainer.expert_parallel}; use {math.gcd(per_replica, trainer.expert_parallel)}"
        )
    checkpointing = trainer.activation_checkpointing
    if trainer.expert_parallel > 1 and trainer.compile and checkpointing not in ("auto", "selective"):
        yield (  # torch would choose on each rank by itself what is sent again, and ranks would wait for each other
            f"trainer.expert_parallel={trainer.expert_parallel} does not go with trainer.activation_checkpointing="
            f"{checkpointing} in compiled blocks; take selective, or --trainer.no-compile"
        )
    if trainer.micro_batch_tokens != "auto" and longest > trainer.micro_batch_tokens:
        yield (
            f"a sequence of up to {longest} tokens does not fit into trainer.micro_batch_tokens="
            f"{trainer.micro_batch_tokens}; leave it at auto, raise it to at least {longest} or shorten the lengths"
        )
    lost = 1 - trainer.adam_beta2
    if trainer.moments == "bfloat16" and lost < 2**-8:  # the smallest change that bfloat16, with 8 bits, shows
        yield (
            f"trainer.adam_beta2={trainer.adam_beta2} takes {lost:.2g} of a second moment off in an update, which "
            "trainer.moments=bfloat16 may round away, so that it never falls; use an adam_beta2 of at most 0.996, or "
            "float32"
        )
    if trainer.optimizer == "muon" and trainer.lora_rank:
        yield (
            f"trainer.optimizer=muon does not go with trainer.lora_rank={trainer.lora_rank}: it makes the update of a "
            "whole matrix orthogonal, and adapters are two factors of one; set --trainer.optimizer adamw"
        )
    num_data_ranks = num_trainers // trainer.ranks_of_a_row
    if isinstance(config, GRPOConfig) and config.completions_per_step % num_data_ranks:
        multiple = num_data_ranks // math.gcd(num_data_ranks, config.group_size)
        higher = config.prompts_per_step // multiple * multiple + multiple
        yield (
            f"prompts_per_step={config.prompts_per_step} x group_size={config.group_size} = "
            f"{config.completions_per_step} completions do not divide over {num_data_ranks} data-parallel trainer "
            f"ranks; use --prompts-per-step {higher}"
        )


def check_replicas(num_generators: int, tensor_parallel: int) -> None:
    """Refuse generator ranks that do not make whole engines, or none. Raises ValueError with a number that does."""
    if not num_generators or num_generators % tensor_parallel:
        fit = num_generators - num_generators % tensor_parallel or tensor_parallel
        raise ValueError(
            f"{num_generators} generator ranks (num_generators) do not split into replicas of generator.tensor_parallel"
            f"={tensor_parallel}; use {fit}, or another tensor_parallel"
        )


def _feature_problems(config: GRPOConfig) -> Iterator[str]:
    """Yield features that exclude each other, and a feature without another that it needs."""
    algorithm = config.algorithm
    roles = config.roles
    sampling = config.sampling
    if config.overlap_steps and roles.colocated:
        yield (
            "overlap_steps does not go with roles.colocated: every rank samples and trains in turns; set "
            "--overlap-steps 0, or split the roles: --roles.no-colocated with --roles.num-trainers and "
            "--roles.num-generators"
        )
    if sampling.dynamic and config.group_size == 1:
        yield "sampling.dynamic needs a group_size of at least 2: it drops groups of equal rewards"
    if config.generator.sleep and not roles.colocated:
        yield "generator.sleep needs roles.colocated: it leaves the memory to a trainer on the same GPU"
    if roles.num_references and not (config.needs_reference or config.reward.model):
        yield (
            "nobody would read what roles.num_references and model.reference_path give; set --roles.num-references 0 "
            "and drop the other, or set algorithm.kl_coef, distill_coef or reward.model"
        )
    if needs_texts(config.generator) and sampling.carry_over:
        yield (
            "generator.stop, or generator.sampling other than top_p, top_k and min_p, does not go with "
            "sampling.carry_over: it would see the end of a completion alone; use generator.stop_token_ids"
        )

    if config.reference_moves:
        if config.trainer.lora_rank or config.model.reference_path:
            yield (
                "algorithm.reference_interval does not go with trainer.lora_rank or model.reference_path: what moves "
                "is a copy of the policy's start; drop one"
            )
        if roles.num_reference_ranks or config.trainer.data_replicas > 1:
            yield (
                "algorithm.reference_interval needs the reference sharded as the policy is, on the trainers; set "
                "--roles.num-references 0 and --trainer.data-replicas 1"
            )

    if algorithm.distill_coef and not config.model.reference_path:
        yield "algorithm.distill_coef needs model.reference_path: name a teacher"


def _group_problems(algorithm: AlgorithmConfig, config: GRPOConfig) -> Iterator[str]:
    """Yield groups that do not fill a step's mini-batches, or whose advantages are all 0."""
    group_size = config.group_size
    temperatures = config.generator.temperature
    prompts = f"prompts_per_step={config.prompts_per_step}"
    if config.prompts_per_step < algorithm.num_mini_batches:
        yield f"num_mini_batches={algorithm.num_mini_batches} need as many prompts; raise {prompts}"
    if config.sampling.carry_over >= config.prompts_per_step:
        yield f"carry_over={config.sampling.carry_over} must be below {prompts}; a quarter of it is a lot"
    if not 1 <= len(temperatures) <= group_size:
        yield f"{len(temperatures)} values in generator.temperature; give 1 to group_size={group_size}"
    only_teacher = algorithm.distill_coef > 0 and not any(config.reward_weights.values())
    if group_size == 1 and algorithm.advantages != "none" and not only_teacher:
        yield (
            f"group_size=1 with algorithm.advantages={algorithm.advantages} makes every advantage 0; use 2 or more, "
            "advantages none, or rewards of weight 0 and a teacher"
        )


def _correction_problems(algorithm: AlgorithmConfig, config: GRPOConfig) -> Iterator[str]:
    """Yield completions of older weights without a correction, and a correction that counts the generator twice."""
    kind = algorithm.importance_correction
    from_generator = algorithm.old_logprobs == "generator"
    low = algorithm.importance_correction_low
    high = algorithm.importance_correction_high
    weighs = kind in ("truncate", "mask_tokens")
    has_ratio = algorithm.loss in PAPER_DEFAULTS and algorithm.loss != "reinforce"
    if weighs and from_generator and has_ratio:
        yield (
            f"algorithm.importance_correction={kind} would count the generator twice, which is in the ratio already "
            "with old_logprobs=generator; use none or mask_sequences"
        )
    if kind in ("mask_tokens", "mask_sequences") and not low <= 1 <= high:
        yield f"1 must lie between importance_correction_low={low} and importance_correction_high={high}"
    # mask_sequences drops or keeps but does not reweigh, so the ratio must be taken against the generator; a loss of
    # the user's has its own way with the ratio
    by_ratio = from_generator and (kind == "mask_sequences" or algorithm.loss not in PAPER_DEFAULTS)
    if config.has_lag and not weighs and not by_ratio:
        yield (
            f"overlap_steps={config.overlap_steps} and sampling.carry_over={config.sampling.carry_over} train on "
            f"completions of older weights, which algorithm.importance_correction={kind} with old_logprobs="
            f"{algorithm.old_logprobs} does not make up for; use truncate or mask_tokens with policy, or with "
            "generator mask_sequences or your own loss"
        )


def _reward_problems(config: Config) -> Iterator[str]:
    """Yield that rewards are compared and there are none."""
    compares = config.evaluation.interval > 0
    if isinstance(config, GRPOConfig):
        compares |= config.sampling.dynamic or bool(config.data.curriculum) or not config.algorithm.distill_coef
    elif config.data.curriculum:
        yield "data.curriculum weighs rows by their pass rates, which supervised examples lack; drop it"
    if compares and not config.reward_weights:
        yield (
            "reward.functions is empty; name one, such as --reward.functions math_reward 1, or a reward.model, or an "
            "environment; only training with a teacher, without evaluation, sampling.dynamic and curriculum, needs "
            "none"
        )
    passes = config.reward.passes
    if passes and passes not in config.reward_weights:
        yield f"reward.passes={passes!r} is no part of the reward; name one of {', '.join(config.reward_weights)}"


def _step_problems(config: Config) -> Iterator[str]:
    """Yield a best checkpoint of none."""
    saved = config.checkpoint.interval
    evaluated = config.evaluation.interval
    if config.checkpoint.keep_best and (not evaluated or saved % evaluated):
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} needs an evaluation wherever a checkpoint is saved: "
            f"checkpoint.interval={saved} must be a multiple of evaluation.interval={evaluated}, and that not 0"
        )


def check_effects(config: Config, recipe: Config) -> None:
    """Raise ValueError for a field that a flag changed although nothing reads it."""
    values = settings(config)
    before = settings(recipe)
    for path, switches in READ_WITH.items():
        is_read = any(values.get(switch, "") not in OFF for switch in switches.split())
        value = values.get(path)
        if value != before.get(path) and path not in switches.split() and not is_read:
            raise ValueError(f"{path}={value!r} does nothing without {switches}; set that too, or drop it")


def cautions(config: Config) -> Iterator[str]:
    """Yield warnings of what is allowed but may surprise, one sentence each; `load` prints them once."""
    data = config.data
    if data.is_text_template and data.system_prompt and "{system_prompt}" not in data.prompt_template:
        yield "data.system_prompt is not used, because data.prompt_template has no {system_prompt}"
    trainer = config.trainer
    if trainer.lora_rank and 0 < trainer.learning_rate < LEAST_LORA_RATE:
        yield (
            f"trainer.learning_rate={trainer.learning_rate:g} hardly moves adapters, which need about ten times the "
            "rate of all weights, and bfloat16 rounds most of so small a change away; set --trainer.learning-rate 1e-5 "
            "or more"
        )
    if isinstance(config, SFTConfig):
        return
    algorithm = config.algorithm.resolved
    is_coarser = {"quantization", "kv_cache_dtype"} & {*config.generator.engine}
    if is_coarser and algorithm.importance_correction == "none" and algorithm.old_logprobs == "policy":
        yield (
            "generator.engine may sample from a coarser policy than the trained one, which "
            "algorithm.importance_correction=none does not make up for; use truncate"
        )
    reshaping = [name for name in RESHAPING_ENGINE if config.generator.engine.get(name)]
    reshaping += inexact_options(config.generator.sampling)
    if reshaping:
        yield (
            f"with {', '.join(reshaping)} the engine draws from another distribution than the one that is trained, so "
            "ratios of policy to generator are off, as mismatch/mean shows; leave it out, or use "
            "generator.temperature, top_p, top_k or min_p, which the trainer takes into account"
        )


def check_model_path(path: str) -> None:
    """Raise FileNotFoundError if `path` is a folder without config.json, or neither a folder nor a hub name.

    It reads no file, so it can come before rows are read. A function that builds a model is not looked at.
    """
    folder = pathlib.Path(path)
    if not path or names_function(path):
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            way_out = "it must be a Hugging Face folder"
            if (folder / "model" / "config.json").is_file():
                way_out = f"name {folder / 'model'}, its model"
            elif (folder / "adapter_config.json").is_file():
                way_out = "it is an adapter of PEFT: merge it into its base (merge_and_unload) and name that folder"
            raise FileNotFoundError(f"model folder {folder.resolve()} has no config.json; {way_out}")
        return
    if path.startswith((".", "/", "~", "runs/")) or path.count("/") != 1:
        raise FileNotFoundError(f"model folder {folder.absolute()} does not exist")


# ---- Who runs where


def num_processes() -> int:
    """Return the number of processes that torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world_size(config: Config, world_size: int) -> None:
    """Compare torchrun's number of processes with the config's. Raises ValueError that names both and a way out."""
    if world_size == config.num_ranks:
        return
    raise ValueError(
        f"the layout ({describe_roles(config.roles)}) needs {config.num_ranks} processes, but torchrun started "
        f"{world_size}; use --nproc_per_node={config.num_ranks} (times nnodes), or roles of other numbers of ranks, "
        f"which for fewer --dry-run --gpus {world_size} names"
    )


def describe_roles(roles: RolesConfig) -> str:
    """Name the ranks of each role in one phrase, such as `2 trainer + 1 reference + 1 generator`."""
    if roles.colocated:
        return f"{roles.num_trainers} colocated"
    counts = {"trainer": roles.num_trainers, "reference": roles.num_references, "generator": roles.num_generators}
    return " + ".join(f"{count} {name}" for name, count in counts.items() if count)
