"""The configuration a user fills in: dataclasses with one sentence per field, checks, and derived values as properties.

Layer 0: imports nothing but the standard library, so that bad input is refused before torch is even loaded.
A recipe is a Python file that binds `config`; `load` reads it, lets the command line override any field and returns the
checked result.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Value = TypeVar("Value")
# A dict from names. Not written dict, of which tyro makes one flag per name of the recipe's, so that a command line
# could not give other names; this way it is `--field NAME VALUE NAME VALUE ...`, which replaces the recipe's.
Table = MutableMapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: any dense Qwen3 or Llama-3 checkpoint."""

    path: str = "Qwen/Qwen3-1.7B"
    """Hugging Face folder or hub name (config.json, safetensors, tokenizer); `toy:NAME` builds a tiny random model."""
    reference_path: str = ""
    """Folder or hub name of the frozen reference; empty takes the policy's starting weights."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision of trainer, reference and generator; master weights and optimizer are always float32."""
    attention: Literal["auto", "flex", "documents"] = "auto"
    """Packed attention: flex (GPU), documents (SDPA per document, any device); auto picks by device."""


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """How many ranks do what. The ranks of one torchrun are, in order: trainers, references, generators."""

    num_trainers: int = 4
    """Trainer ranks; with `colocated` every rank is trainer, reference and generator at once."""
    num_references: int = 0
    """Reference ranks; 0 puts the reference on the trainer ranks (it exists only when `grpo.kl_coef` is above 0)."""
    num_generators: int = 4
    """Generator ranks, split into replicas of `generator.tensor_parallel`; ignored when `colocated`."""
    colocated: bool = False
    """Every rank holds every role (one GPU is enough); `num_references` and `num_generators` do not apply."""
    timeout_minutes: float = 60.0
    """A rank that waits longer than this for another one fails; must exceed the longest step."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from and how they become token ids."""

    path: str = "openai/gsm8k"
    """Hub data set, a local .jsonl file, or a built-in task such as `toy:addition`."""
    name: str = "main"
    """Configuration name of a hub data set (ignored for files and toy tasks)."""
    split: str = "train"
    """Split of a hub data set or toy task."""
    prompt_column: str = "question"
    """Column that holds the user's message."""
    columns: tuple[str, ...] = ("answer",)
    """Columns handed to the reward functions beside the completions; each must exist."""
    system_prompt: str = (
        "Think first inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
    )
    """System message put before every prompt; empty leaves it out."""
    chat_template_kwargs: Table[str] = field(default_factory=dict)
    """Extra keyword arguments for the tokenizer's chat template, e.g. enable_thinking false."""
    max_prompt_tokens: int = 512
    """Prompts longer than this many tokens are left out, counted and reported once."""
    shuffle: bool = True
    """Draw prompts in a new random order (from `seed`) each epoch, else in file order."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a completion is worth: a weighted sum of functions."""

    functions: Table[float] = field(default_factory=lambda: {"math_reward": 1.0, "thinking_reward": 0.2})
    """Weights by name: `math_reward`, `thinking_reward`, or your own `path/file.py:function`."""
    answer_format: Literal["answer_tag", "boxed", "hashes"] = "answer_tag"
    """Where math_reward looks for the answer: last <answer>..</answer>, last \\boxed{}, or after the last ####."""
    tolerance: float = 1e-6
    """Largest relative (below 1: absolute) difference at which math_reward takes two numbers as equal."""
    partial_credit: float = 0.0
    """What math_reward gives for a well-formed but wrong answer (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """vLLM engines and sampling."""

    tensor_parallel: int = 1
    """Ranks per vLLM engine replica."""
    max_completion_tokens: int = 1024
    """Longest completion in tokens; one that reaches it is `truncated`."""
    temperature: float = 1.0
    """Sampling temperature, also applied to the trainer's and reference's log-probs."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 the trained distribution is no longer the sampled one (a warning says so once)."""
    top_k: int = 0
    """Sample among the k likeliest tokens, 0 for all; the same warning applies."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's probability; the same warning applies."""
    max_num_seqs: int = 256
    """Most sequences one engine decodes at once."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory vLLM may use for weights and KV cache (colocated: leave room for the trainer)."""
    kv_cache_gib: float = 0.0
    """Size of the KV cache in GiB; 0 lets vLLM fill `gpu_memory_utilization` (on CPU: 1/16 GiB)."""
    enforce_eager: bool = False
    """Skip CUDA graphs and compilation: faster start, slower decoding (always so on CPU)."""
    sleep: bool = False
    """Colocated only: give the engine's memory back while training."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the policy is sharded, batched and optimized (torchtitan)."""

    tensor_parallel: int = 1
    """Ranks that share each layer (TP); the rest of the trainer ranks is data parallel (FSDP2)."""
    data_replicas: int = 1
    """HSDP: FSDP groups that each hold a full copy of the parameters; 1 is plain FSDP."""
    micro_batch_tokens: int = 16384
    """Most tokens in one forward and backward; a step takes as many micro-batches as its tokens need."""
    packing: bool = True
    """Pack several sequences into one row; off pads one sequence per row."""
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    """What the backward recomputes instead of keeping: nothing, cheap operations, or every block."""
    compile: bool = True
    """torch.compile each transformer block and the log-prob chunks (GPU only)."""
    logprob_chunk_tokens: int = 4096
    """Tokens whose logits exist at one time in the chunked LM head."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    adam_beta1: float = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: float = 0.95
    """AdamW's second-moment decay."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to `min_lr_ratio` at the last step."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of a linear or cosine schedule, as a share of the peak."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO: Shao et al. 2024, arXiv:2402.03300."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high (DAPO: 0.28)."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the reference in the loss; 0 needs no reference."""
    advantages: Literal["group", "group_mean"] = "group"
    """Reward minus the group's mean, over the group's std (group) or not (group_mean)."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_horizon"] = "sequence_mean"
    """Mean over all tokens of the step, over sequences of their token means, or tokens over max length."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """The ratio's denominator: the policy at the start of the step, or the log-probs seen at sampling time."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy accuracy on held-out prompts: before the first step, every `interval` steps and at the end."""

    interval: int = 0
    """Steps between evaluations; 0 never evaluates."""
    path: str = ""
    """Held-out data set (hub name, .jsonl or toy task); empty takes `data.path` (and `data.name`)."""
    name: str = ""
    """Configuration name of that hub data set."""
    split: str = "test"
    """Split of the held-out hub data set or toy task."""
    num_prompts: int = 256
    """Held-out prompts per evaluation, always the same ones."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving, resuming and the exported model."""

    interval: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write a Hugging Face folder (`RUN_DIR/model`) at the end."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What a run shows and writes. Everything lands in the run folder."""

    tensorboard: bool = True
    """Write TensorBoard event files to `RUN_DIR/tensorboard`."""
    samples_interval: int = 10
    """Steps between readable samples of completions with their rewards; 0 writes none."""
    num_samples: int = 4
    """Completions per such sample."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Everything `train_grpo.py` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    grpo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    run_dir: str = "runs/grpo"
    """Folder of the run: config, checkpoints, metrics, samples, exported model."""
    resume: bool = False
    """Continue exactly from the newest checkpoint in `run_dir` (start fresh if there is none)."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`."""
    num_steps: int = 200
    """Optimizer steps in total."""
    prompts_per_step: int = 32
    """Prompts drawn for each step."""
    group_size: int = 8
    """Completions per prompt."""
    seed: int = 0
    """Data order and sampling follow from this."""
    sync_check_interval: int = 20
    """Steps between canaries that compare trainer and generator log-probs (also after the first sync); 0 is never."""
    sync_check_tolerance: float = 0.0
    """Largest mean absolute log-prob difference the canary accepts; 0 takes 1e-3 in float32, 0.1 in bfloat16."""

    @property
    def completions_per_step(self) -> int:
        """Rollouts per optimizer step, over all generators."""
        return self.prompts_per_step * self.group_size

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.data.max_prompt_tokens + self.generator.max_completion_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether any rank holds a frozen reference."""
        return self.grpo.kl_coef > 0

    @property
    def largest_tensor_parallel(self) -> int:
        """What the model's heads and vocabulary must divide by."""
        return math.lcm(self.trainer.tensor_parallel, self.generator.tensor_parallel)

    @property
    def reference_tensor_parallel(self) -> int:
        """The reference is sharded like the trainer as far as its ranks allow."""
        num_references = self.roles.num_trainers if self.roles.colocated else self.roles.num_references
        return math.gcd(num_references or self.roles.num_trainers, self.trainer.tensor_parallel)

    @property
    def logprob_tolerance(self) -> float:
        """Mean absolute log-prob difference between trainer and generator at which the canary stops the run."""
        return self.sync_check_tolerance or (1e-3 if self.model.dtype == "float32" else 0.1)

    @property
    def num_ranks(self) -> int:
        """Processes torchrun must start for this layout."""
        roles = self.roles
        return (
            roles.num_trainers if roles.colocated else roles.num_trainers + roles.num_references + roles.num_generators
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything `train_sft.py` needs: supervised fine-tuning with one role."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    run_dir: str = "runs/sft"
    """Folder of the run."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`."""
    num_trainers: int = 1
    """Trainer ranks (all of torchrun's)."""
    num_steps: int = 100
    """Optimizer steps in total."""
    completion_column: str = "completion"
    """Column that holds what the model shall answer to `data.prompt_column`."""
    stop_at_loss: float = 0.0
    """End early, with export, once the mean loss of the last 10 steps is below this; 0 runs all steps."""
    sequences_per_step: int = 128
    """Prompt and answer pairs per step."""
    max_sequence_tokens: int = 2048
    """Longer examples are left out, counted and reported once."""
    seed: int = 0
    """Data order and, for a toy model, its first weights follow from this."""

    @property
    def num_ranks(self) -> int:
        """Processes torchrun must start."""
        return self.num_trainers


Config = TypeVar("Config", GRPOConfig, SFTConfig)


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
        config = tyro.cli(config_type, default=default, args=arguments, description=config_type.__doc__)
        validate(config)
        for warning in cautions(config):
            print(f"warning: {warning}", flush=True)
    return config


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
            f"roles.num_references={roles.num_references} ranks would idle, because grpo.kl_coef=0 needs no reference; "
            "set --roles.num-references 0 or a grpo.kl_coef above 0"
        )
    if generator.sleep and not roles.colocated:
        raise ValueError("generator.sleep frees memory for a trainer on the same GPU; it needs --roles.colocated")
    if config.group_size == 1 and config.grpo.advantages in ("group", "group_mean"):
        raise ValueError(
            f"group_size=1 with grpo.advantages={config.grpo.advantages} makes every advantage 0, so nothing would be "
            "learned; use a group_size of at least 2"
        )
    data_parallel = max(1, roles.num_trainers // config.trainer.tensor_parallel)
    if config.completions_per_step % data_parallel:
        fit = math.ceil(config.completions_per_step / data_parallel) * data_parallel
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} x group_size={config.group_size} = "
            f"{config.completions_per_step} completions do not divide over {data_parallel} data-parallel trainer "
            f"ranks; the next number that does is {fit}"
        )
    if not generator.temperature > 0:
        raise ValueError(
            f"generator.temperature={generator.temperature} must be above 0: greedy samples cannot be compared"
        )
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
    if min(config.grpo.clip_low, config.grpo.clip_high) < 0 or config.grpo.clip_low >= 1 or config.grpo.kl_coef < 0:
        raise ValueError(
            f"grpo.clip_low={config.grpo.clip_low} must lie in [0, 1), grpo.clip_high={config.grpo.clip_high} and "
            f"grpo.kl_coef={config.grpo.kl_coef} must not be negative"
        )
    if not config.reward.functions:
        raise ValueError("reward.functions is empty; name at least one, such as --reward.functions math_reward 1.0")


def cautions(config: GRPOConfig | SFTConfig) -> list[str]:
    """What is allowed but may surprise, one sentence each; `load` prints them once."""
    if not isinstance(config, GRPOConfig):
        return []
    generator, found = config.generator, []
    if generator.top_p < 1 or generator.top_k > 0 or generator.min_p > 0:
        found.append(
            f"generator.top_p={generator.top_p}, top_k={generator.top_k}, min_p={generator.min_p} sample from another "
            "distribution than the one that is trained; logprob_diff/mean says by how much, and the canary may stop "
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
