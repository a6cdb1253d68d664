"""The configuration a user fills in: dataclasses with one sentence per field, and derived values as properties.

Layer 0: imports nothing but the standard library. A recipe is a Python file that binds `config`; recipes.py reads it,
lets the command line override any field and checks the result.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")
# A dict from names. Not written dict, of which tyro makes one flag per name of the recipe's, so that a command line
# could not give other names; this way it is `--field NAME VALUE NAME VALUE ...`, which replaces the recipe's.
Table = MutableMapping[str, Value]
# What a table may hold where its names are somebody else's: booleans stay booleans (`false` on the command line).
Scalar = bool | int | float | str
# Keyword arguments of one function; one JSON object on the command line.
Options = dict[str, Any]


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
    """Reference ranks; 0 puts the reference, if `algorithm.kl_coef` is above 0, on the trainer ranks."""
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
    chat_template_kwargs: Table[Scalar] = field(default_factory=dict)
    """Extra keyword arguments for the tokenizer's chat template, e.g. enable_thinking false."""
    max_prompt_tokens: int = 512
    """Prompts longer than this many tokens are left out, counted and reported once."""
    shuffle: bool = True
    """Draw prompts in a new random order (from `seed`) each epoch, else in file order."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a completion is worth: a weighted sum of functions."""

    functions: Table[float] = field(default_factory=lambda: {"math_reward": 1.0, "thinking_reward": 0.2})
    """Weights by name: a built-in (see `grpo/rewards/builtin.py`) or your own `path/file.py:function`."""
    options: Table[Options] = field(default_factory=dict)
    """Keyword arguments of a reward function, by its name: `--reward.options overlong_penalty '{"tokens": 256}'`."""
    num_workers: int = 4
    """Processes that run the reward functions."""
    timeout_seconds: float = 10.0
    """Per completion: a call that takes longer is ended, reward None; for a whole group, times its size."""
    memory_gib: float = 4.0
    """Address space of one such process."""
    answer_format: Literal["answer_tag", "boxed", "hashes"] = "answer_tag"
    """Where functions find the answer: in the last <answer>..</answer>, the last \\boxed{}, or after the last ####."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """vLLM engines and sampling."""

    tensor_parallel: int = 1
    """Ranks per vLLM engine replica."""
    max_completion_tokens: int = 1024
    """Longest completion in tokens; one that reaches it is `truncated`."""
    temperature: tuple[float, ...] = (1.0,)
    """Sampling temperature, also applied to the trainer's and reference's log-probs; of several, each group's
    completions take one after the other."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, which keeps them; beside the model's own stop tokens."""
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


Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]
Advantages = Literal["group_std", "group_mean", "batch_std", "rloo", "none"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient. A field that is None takes what the paper of `loss` uses (PAPER_DEFAULTS)."""

    loss: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, sapo, reinforce, or your own `path/file.py:function`."""
    advantages: Advantages | None = None
    """A reward compared with its group: over its std, plain, over the batch's std, leaving itself out; or as it is."""
    aggregation: Aggregation | None = None
    """Mean over all tokens of the step, over sequences of their token means, or tokens over max length."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high."""
    loss_options: Options = field(default_factory=dict)
    """Keyword arguments of the loss, one JSON object, such as '{"dual_clip": 3}'."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2_gradient"] = "k3"
    """Per-token estimate of that KL; k3_k2_gradient has the value of k3 and the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract each completion's sum of it from its reward."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss."""
    mask_truncated: bool = False
    """Completions that ran out of tokens leave the loss (DAPO's overlong filtering); their rewards still compare."""
    num_mini_batches: int = 1
    """Optimizer updates per pass over a step's groups: the mini-batches it is split into."""
    num_epochs: int = 1
    """Passes over a step's groups."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """The ratio's denominator: the policy at the start of the step, or the log-probs seen at sampling time."""
    importance_correction: Literal["none", "truncate", "mask_tokens", "mask_sequences"] | None = None
    """Against a generator that is not quite the policy; None is truncate if `old_logprobs` is policy, else none."""
    importance_correction_low: float = 0.5
    """mask_*: smallest weight (policy over generator; of a sequence its geometric mean) that still counts."""
    importance_correction_high: float = 2.0
    """truncate: largest weight a token gets; mask_*: largest weight that still counts."""


# What a loss needs beside its formula to be the algorithm of its paper
PAPER_DEFAULTS = {
    "grpo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"advantages": "group_mean", "aggregation": "fixed_horizon", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"advantages": "group_std", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1 has no lower bound and does not say its upper one; 1 + 4 is that of ScaleRL (arXiv:2510.13786)
    "cispo": {"advantages": "group_std", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce": {"advantages": "group_mean", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2},
}
OWN_LOSS_DEFAULTS = PAPER_DEFAULTS["grpo"]  # of a loss from a user's file


def check_loss_name(name: str) -> None:
    """Raise ValueError unless it is a built-in loss or looks like a function in a file."""
    if name not in PAPER_DEFAULTS and ":" not in name:
        raise ValueError(
            f"algorithm.loss={name!r} is unknown; use {', '.join(PAPER_DEFAULTS)}, or write your own as "
            "path/file.py:function"
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which prompts and groups a step is made of."""

    dynamic: bool = False
    """Drop groups whose rewards are all equal and sample others until the step is full (DAPO)."""
    max_rounds: int = 4
    """dynamic: most rounds of sampling per step; then the step goes on with the groups it has."""
    min_pass_rate: float = 0.0
    """A prompt that passed less often than this when last sampled rests for `filter_epochs`; 0 never."""
    max_pass_rate: float = 1.0
    """The same for a prompt that passed more often; 1 never."""
    filter_epochs: int = 1
    """Epochs for which such a prompt is left out before it is tried again."""

    @property
    def filters(self) -> bool:
        """Whether any prompt may rest."""
        return self.min_pass_rate > 0 or self.max_pass_rate < 1


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out prompts, greedy and sampled: before the first step, every `interval` steps and at the end."""

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
    num_samples: int = 0
    """Samples per prompt for pass@k, k = 1, 2, 4, ... up to it; 0 takes only the greedy completion."""
    temperature: float = 1.0
    """Sampling temperature of these samples."""


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
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
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
    """Steps in total: one batch of completions each, by default with one optimizer update."""
    prompts_per_step: int = 32
    """Prompts drawn for each step."""
    group_size: int = 8
    """Completions per prompt."""
    seed: int = 0
    """Data order and sampling follow from this."""
    sync_interval: int = 1
    """Steps between weight syncs; at N the generators sample with weights that are up to N - 1 steps old."""
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
    def updates_per_step(self) -> int:
        """Optimizer updates in one step."""
        return self.algorithm.num_mini_batches * self.algorithm.num_epochs

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether a step needs a forward of its own for them; with one update they are the policy's at that update."""
        return self.algorithm.old_logprobs == "policy" and self.updates_per_step > 1

    @property
    def needs_reference(self) -> bool:
        """Whether any rank holds a frozen reference."""
        return self.algorithm.kl_coef > 0

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
    def largest_mismatch(self) -> float:
        """Mean absolute log-prob difference between trainer and generator above which the sync check stops the run."""
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
