"""The configuration a user fills in: every field with its type, bounds, default and one sentence; derived values below.

A recipe is a Python file that binds `config`; recipes.py reads it and lets the command line override any field;
bounds.py holds the fields against types and bounds, checks.py against each other. The sections about data are in
data_fields.py, those about the run itself in run_fields.py; all can be imported from here.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, TypeVar, get_args

from grpo.config.bounds import Above, AtLeast, AtMost, Below
from grpo.config.data_fields import (  # noqa: F401
    EXTRA_COLUMNS,
    DataConfig,
    EvaluationConfig,
    HeldOutConfig,
    ValidationConfig,
)
from grpo.config.kinds import Interval, Json, Options, Scalar, Table, Temperature  # noqa: F401
from grpo.config.run_fields import CheckpointConfig, DeadlinesConfig, MetricsConfig, WarningsConfig

# Of a GPU's memory, for an engine that shares it with a trainer
SHARED_GPU = 0.35
# Those of every family; the LM head and the embeddings get no adapter.
LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: any dense Qwen3, Qwen2, Llama 3 or Mistral checkpoint."""

    path: str = "Qwen/Qwen3-1.7B"
    """Hugging Face folder or hub name (config.json, safetensors, tokenizer); `toy:NAME` builds a tiny random model."""
    reference_path: str = ""
    """Folder or hub name of the frozen reference, or teacher; empty takes the policy's starting weights."""
    reference_tensor_parallel: Annotated[int, AtLeast(0)] = 0
    """Ranks that share each layer of the reference; 0 takes `trainer.tensor_parallel` as far as its ranks allow."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute precision of trainer, reference and generator; master weights and optimizer are always float32."""
    attention: Literal["auto", "flash", "flex", "documents"] = "auto"
    """How the sequences of a packed row are kept apart.
    flash: FlashAttention 4, on an H100 or newer and in bfloat16; flex: one flex_attention over the row, GPU only;
    documents: scaled_dot_product_attention for each sequence; auto: the first of them that runs here."""


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """How many ranks do what. The ranks of one torchrun are, in order: trainers, references, generators."""

    layout: Literal["given", "auto"] = "given"
    """Who decides which ranks do what. given: the fields below; auto: before the run, two sizes of a step are measured
    with every role on every rank, and the layout whose step should be the shortest is taken."""
    num_trainers: Annotated[int, AtLeast(1)] = 4
    """Trainer ranks; with `colocated` every rank is trainer, reference and generator at once."""
    num_references: Annotated[int, AtLeast(0)] = 0
    """Ranks that only hold the reference; at 0 the trainer ranks hold it.
    It is needed if `algorithm.kl_coef` or `algorithm.distill_coef` is above 0."""
    num_generators: Annotated[int, AtLeast(0)] = 4
    """Generator ranks, split into replicas of `generator.tensor_parallel`; ignored when `colocated`."""
    colocated: bool = False
    """Every rank has every role, so one GPU is enough; `num_references` and `num_generators` are ignored."""
    timeout_minutes: Annotated[float, Above(0, "it must exceed the longest step")] = 60.0
    """A rank that waits for another one longer than this fails; it must exceed the longest step.
    A rank that hangs is found by `deadlines`, which end at nine tenths of this at the latest."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a completion is worth: a weighted sum of functions."""

    functions: Table[float] = field(default_factory=lambda: {"math_reward": 1.0, "thinking_reward": 0.2})
    """Weights by name: a built-in (see `grpo/rewards/builtin.py`) or your own `path/file.py:function`.
    Weight 0 measures only."""
    options: Table[Options] = field(default_factory=dict)
    """Keyword arguments of a reward function, by its name: `--reward.options overlong_penalty '{"tokens": 256}'`."""
    num_workers: Annotated[int, AtLeast(1)] = 4
    """Processes that run the reward functions; where built-in ones and your own (or code_reward) meet, of each kind."""
    timeout_seconds: Annotated[float, Above(0)] = 10.0
    """Per completion: a call that takes longer is ended, reward None; for a whole group, times its size."""
    memory_gib: Annotated[float, Above(0)] = 4.0
    """Address space of one such process."""
    allow_weak_sandbox: bool = False
    """Run code_reward also where its programs could open the files of this machine (no Landlock, no namespaces)."""
    answer_format: Literal["answer_tag", "boxed", "hashes"] = "answer_tag"
    """Where functions find the answer. answer_tag: in the last <answer>..</answer>; boxed: in the last \\boxed{};
    hashes: after the last ####."""
    environment: tuple[str, ...] = ()
    """Environment variables that your own functions get on top of what Python needs, such as a judge's key."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """vLLM engines and sampling."""

    tensor_parallel: Annotated[int, AtLeast(1)] = 1
    """Ranks per vLLM engine replica."""
    max_completion_tokens: Annotated[int, AtLeast(1)] = 1024
    """Longest completion in tokens; one that is cut off there counts as truncated."""
    temperature: tuple[Temperature, ...] = (1.0,)
    """Sampling temperature, also of the trainer's log-probs; several take turns over the completions of a group."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the model's own stop tokens; the completion keeps them."""
    stop_token_ids: tuple[Annotated[int, AtLeast(0)], ...] = ()
    """Token ids that end a completion, in addition to the model's own."""
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Nucleus sampling; below 1 the sampled distribution is not the one that is trained, and a warning says so."""
    top_k: Annotated[int, AtLeast(0)] = 0
    """Sample among the k likeliest tokens, 0 for all; with the same warning."""
    min_p: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """Drop tokens below this share of the likeliest token's probability; with the same warning."""
    max_num_seqs: Annotated[int, AtLeast(1)] = 256
    """Most sequences that one engine decodes at once."""
    gpu_memory_utilization: Annotated[float, Above(0), AtMost(1)] = 0.85
    """Share of the GPU's memory that vLLM may use for weights and KV cache; colocated, leave room for the trainer."""
    kv_cache_gib: Annotated[float, AtLeast(0)] = 0.0
    """Size of the KV cache in GiB; 0 lets vLLM fill `gpu_memory_utilization`, and takes 1/16 GiB on a CPU."""
    enforce_eager: bool = False
    """Skip CUDA graphs and compilation: faster start, slower decoding; on a CPU always on."""
    sleep: bool = False
    """Colocated only: the engine gives its memory back while the trainer works."""
    engine: Table[Json] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs: `--generator.engine quantization fp8_per_tensor block_size 32`."""
    sampling: Table[Json] = field(default_factory=dict)
    """Further arguments of vLLM's SamplingParams, in evaluations too: `--generator.sampling min_tokens 8`."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the policy is sharded, batched and optimized (torchtitan)."""

    tensor_parallel: Annotated[int, AtLeast(1)] = 1
    """Ranks that share each layer (TP); the num_trainers / tensor_parallel groups of them are data parallel (FSDP2)."""
    data_replicas: Annotated[int, AtLeast(1)] = 1
    """FSDP groups that each hold a full copy of the parameters (HSDP); 1 is plain FSDP."""
    micro_batch_tokens: Annotated[int, AtLeast(1)] = 16384
    """Most tokens in one forward and backward; an update takes as many micro-batches as its tokens need."""
    packing: bool = True
    """Lay several sequences end to end in one row; off gives each its own padded row."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What the backward recomputes to save memory. none: nothing; selective: cheap operations; full: every block;
    auto: the first of them that fits the GPU by arithmetic (`python -m grpo.memory`); on a CPU none."""
    deterministic: bool = True
    """Add gradients in one order always, so that two runs on GPUs can have the same last digits; off, the backward of
    flash attention is a little faster (1 to 2 % of a step of Qwen3-1.7B with documents of 4,096 tokens)."""
    compile: bool = True
    """torch.compile of each transformer block and of the log-prob chunks; GPU only."""
    logprob_chunk_tokens: Annotated[int, AtLeast(1)] = 4096
    """Tokens whose logits are in memory at one time, in the chunked LM head."""
    learning_rate: Annotated[float, AtLeast(0), Below(math.inf)] = 1e-6
    """Peak learning rate of AdamW."""
    adam_beta1: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: Annotated[float, AtLeast(0), Below(1)] = 0.95
    """AdamW's second-moment decay."""
    adam_eps: Annotated[float, AtLeast(0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    """AdamW's decoupled weight decay."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. constant: the peak; linear, cosine: falls in that shape to `min_lr_ratio`."""
    min_lr_ratio: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """Learning rate at the last step of a linear or cosine schedule, as a share of the peak."""
    max_grad_norm: Annotated[float, Above(0)] = 1.0
    """Largest global norm of the gradients, which are scaled down to it."""
    max_skipped_steps: Annotated[int, AtLeast(1)] = 3
    """End the run after so many steps in a row whose update was skipped because something in it was not finite."""
    lora_rank: Annotated[int, AtLeast(0)] = 0
    """Train adapters of this rank beside the weights, which then stay as they are, in `model.dtype`; 0 trains all."""
    lora_alpha: Annotated[float, Above(0)] = 32.0
    """An adapter's product B A counts lora_alpha / lora_rank times."""
    lora_targets: tuple[LoRATarget, ...] = get_args(LoRATarget)
    """Linear layers of each block that get an adapter, by their names in Hugging Face's models."""
    lora_seed: int = 0
    """The adapters' first A follows from it; B starts at 0."""


Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]
Advantages = Literal["group_std", "group_mean", "batch_std", "rloo", "none"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient. A field that is None takes what the paper of `loss` uses (PAPER_DEFAULTS)."""

    loss: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, sapo, reinforce, or your own `path/file.py:function`."""
    advantages: Advantages | None = None
    """How a reward r becomes an advantage. group_std: (r - mean) / std of its group; group_mean: r - mean;
    batch_std: (r - mean) / std of all rewards of the step; rloo: r - mean of the others in its group;
    none: r as it is."""
    aggregation: Aggregation | None = None
    """How the losses of tokens become one number. token_mean: their mean over the whole update;
    sequence_mean: mean over sequences of the mean over a sequence's tokens;
    fixed_horizon: mean over sequences of the sum over a sequence's tokens / generator.max_completion_tokens."""
    clip_low: Annotated[float, AtLeast(0), AtMost(1)] | None = None
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, AtLeast(0)] | None = None
    """The ratio is clipped from above at 1 + clip_high."""
    loss_options: Options = field(default_factory=dict)
    """Keyword arguments of the loss, one JSON object.
    grpo, dr_grpo, dapo, gspo: '{"dual_clip": 3}'; reinforce: '{"max_importance_weight": 2}';
    sapo: '{"temperature_positive": 1, "temperature_negative": 1.05}'; your own function: what it takes."""
    kl_coef: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the KL to the reference; 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2_gradient"] = "k3"
    """Estimate of that KL per token, where d = log policy - log reference.
    k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d; k3_k2_gradient: the value of k3 with the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes. loss: a token's is added to its loss; reward: a completion's sum is taken off its reward."""
    distill_coef: Annotated[float, AtLeast(0)] = 0.0
    """On-policy distillation: weight of log teacher - log policy, which is added to each token's advantage.
    The teacher is `model.reference_path`; 0 is none. Rewards may be left out (`--reward.functions` with nothing)."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss; above 0 favours exploration."""
    mask_truncated: bool = False
    """Exclude truncated completions from the loss (DAPO's overlong filtering); the group still compares with them."""
    num_mini_batches: Annotated[int, AtLeast(1)] = 1
    """Mini-batches into which a step's groups are split, each one optimizer update."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over a step's groups, so a step has `num_mini_batches` x `num_epochs` updates."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Denominator of the ratio. policy: the trainer's log-probs at the start of the step; generator: those sampled."""
    importance_correction: Literal["none", "truncate", "mask_tokens", "mask_sequences"] | None = None
    """Makes up for a generator that differs from the policy, by weights w = policy / generator.
    none: no correction; truncate: a token's loss x min(w, high);
    mask_tokens: x w, or x 0 where w is not within low and high;
    mask_sequences: x 0 for all of a sequence whose geometric mean of w is not within low and high.
    None takes truncate if `old_logprobs` is policy, else none."""
    importance_correction_low: Annotated[float, AtLeast(0)] = 0.5
    """mask_tokens, mask_sequences: smallest w that is not masked."""
    importance_correction_high: Annotated[float, Above(0)] = 2.0
    """truncate: largest w a token gets; mask_tokens, mask_sequences: largest w that is not masked."""


# What a loss needs, in addition to its formula, to be the algorithm of its paper
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
    """Drop groups whose rewards are all equal and sample other prompts until the step is full (DAPO)."""
    max_rounds: Annotated[int, AtLeast(1)] = 4
    """Most rounds of sampling in a step with `dynamic`; then the step goes on with the groups it has."""
    min_pass_rate: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """A prompt whose share of passing completions was below this is skipped for `filter_epochs`; 0 skips none."""
    max_pass_rate: Annotated[float, AtLeast(0), AtMost(1)] = 1.0
    """The same for a prompt whose share was above this; 1 skips none."""
    filter_epochs: Annotated[int, AtLeast(1)] = 1
    """Epochs for which such a prompt is skipped before it is sampled again."""
    carry_over: Annotated[int, AtLeast(0)] = 0
    """So many more prompts than `prompts_per_step` are in flight: a step ends once `prompts_per_step` groups are
    complete, and the others go on in the next one, with newer weights. Needs `algorithm.importance_correction`."""

    @property
    def filters(self) -> bool:
        """Whether any prompt may be skipped."""
        return self.min_pass_rate > 0 or self.max_pass_rate < 1


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
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    warnings: WarningsConfig = field(default_factory=WarningsConfig)
    run_dir: str = "runs/grpo"
    """Folder of the run: config, checkpoints, metrics, samples, exported model."""
    resume: bool = False
    """Continue exactly from the newest checkpoint in `run_dir` (start fresh if there is none)."""
    allow_changes: bool = False
    """Resume although fields differ on which the result depends; they are shown in any case."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`."""
    num_steps: Annotated[int, AtLeast(1)] = 200
    """Steps in total; each samples one batch of completions and by default makes one optimizer update of it."""
    prompts_per_step: Annotated[int, AtLeast(1)] = 32
    """Prompts drawn for each step."""
    group_size: Annotated[int, AtLeast(1)] = 8
    """Completions per prompt."""
    seed: int = 0
    """The order of the data and the sampling follow from it."""
    sync_interval: Annotated[int, AtLeast(1)] = 1
    """Steps between weight syncs; at N the generators' weights are up to N - 1 steps old."""
    overlap_steps: Annotated[int, AtLeast(0), AtMost(1)] = 0
    """At 1 generators sample the next step while the others train on this one, with weights one step older; split only.
    Needs `algorithm.importance_correction`. At 0 they take turns."""
    sync_check_interval: Interval = 20
    """Steps between sync checks of trainer against generator log-probs, one also after the first sync; 0 is never."""
    sync_check_tolerance: Annotated[float, AtLeast(0)] = 0.0
    """Largest mean absolute log-prob difference that a sync check accepts; 0 takes 1e-3 in float32, 0.1 in bfloat16."""
    profile: Interval = 0
    """Step of which each rank writes a torch profiler trace to `RUN_DIR/profile`, with the step's phases as ranges."""
    record: bool = False
    """Write each step's batch, with rewards and the reference's log-probs, to `RUN_DIR/batches`, for `replay`."""
    replay: str = ""
    """Folder of a run with recorded batches to train on; nothing is sampled, and all ranks are trainers."""

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
    def has_lag(self) -> bool:
        """Whether the generators' weights may be older than the policy at the start of a step."""
        return self.overlap_steps > 0 or self.sync_interval > 1 or self.sampling.carry_over > 0

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether a step needs a forward of its own for them; with one update they are the policy's at that update."""
        return self.algorithm.old_logprobs == "policy" and self.updates_per_step > 1

    @property
    def needs_reference(self) -> bool:
        """Whether any rank holds a frozen reference; in a replay its log-probs were recorded."""
        return not self.replay and (self.algorithm.kl_coef > 0 or self.algorithm.distill_coef > 0)

    @property
    def largest_tensor_parallel(self) -> int:
        """What the model's heads and vocabulary must divide by."""
        return math.lcm(self.trainer.tensor_parallel, self.generator.tensor_parallel)

    @property
    def num_reference_ranks(self) -> int:
        """Ranks that hold the reference, if there is one."""
        num_references = 0 if self.roles.colocated else self.roles.num_references
        return num_references or self.roles.num_trainers

    @property
    def reference_tensor_parallel(self) -> int:
        """Unless set, the reference is sharded like the trainer as far as its ranks allow."""
        shared = math.gcd(self.num_reference_ranks, self.trainer.tensor_parallel)
        return self.model.reference_tensor_parallel or shared

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the policy without its adapters, and no model of its own."""
        on_trainers = self.roles.colocated or not self.roles.num_references
        same_shards = self.reference_tensor_parallel == self.trainer.tensor_parallel
        return self.trainer.lora_rank > 0 and on_trainers and same_shards and not self.model.reference_path

    @property
    def largest_mismatch(self) -> float:
        """Mean absolute log-prob difference between trainer and generator above which a sync check stops the run."""
        return self.sync_check_tolerance or (1e-3 if self.model.dtype == "float32" else 0.1)

    @property
    def num_ranks(self) -> int:
        """Processes torchrun must start for this layout."""
        roles = self.roles
        return roles.num_trainers + (0 if roles.colocated else roles.num_references + roles.num_generators)


# Which tokens of an example are labels, see grpo/data/turns.py.
TrainOn = Literal["all", "assistant", "last"]
# What the columns of a row mean, see grpo/data/formats.py.
RowFormat = Literal["auto", "prompt_completion", "messages", "alpaca", "text"]


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything `train_sft.py` needs: supervised fine-tuning. Only evaluation reads `reward` and `generator`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    generator: GeneratorConfig = field(default_factory=partial(GeneratorConfig, gpu_memory_utilization=SHARED_GPU))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    warnings: WarningsConfig = field(default_factory=WarningsConfig)
    run_dir: str = "runs/sft"
    """Folder of the run."""
    resume: bool = False
    """Continue exactly from the newest checkpoint in `run_dir` (start fresh if there is none)."""
    allow_changes: bool = False
    """Resume although fields differ on which the result depends; they are shown in any case."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`."""
    num_trainers: Annotated[int, AtLeast(1)] = 1
    """Trainer ranks (all of torchrun's)."""
    num_steps: Annotated[int, AtLeast(1)] = 100
    """Optimizer steps in total."""
    row_format: RowFormat = "auto"
    """What the columns of a row are. prompt_completion: `data.prompt_column` and `completion_column`, each a text or
    messages; messages: `messages`, a chat of any number of turns; alpaca: `instruction`, `input` and `output`; text:
    `text`, without turns; auto: the first of these, in this order, whose columns a data set has."""
    completion_column: str = "completion"
    """Column that holds the answer to learn for `data.prompt_column`."""
    train_on: TrainOn = "assistant"
    """Tokens that are labels. assistant: those of all assistant turns, with the token that ends each; last: those of
    the last one; all: every token. In plain text every token is one."""
    too_long: Literal["leave_out", "truncate"] = "leave_out"
    """What becomes of an example of more than `max_sequence_tokens`. leave_out: it is not drawn; truncate: its first
    tokens are. Both are counted at the start."""
    show: Annotated[int, AtLeast(0)] = 0
    """Print so many examples with their labels in colour, and stop before a model is loaded."""
    stop_at_loss: Annotated[float, AtLeast(0)] = 0.0
    """End early, with export, once the mean loss of the last 10 steps is below this; 0 runs all steps."""
    sequences_per_step: Annotated[int, AtLeast(1)] = 128
    """Examples per step."""
    max_sequence_tokens: Annotated[int, AtLeast(1)] = 2048
    """Longest example in tokens; what becomes of longer ones is `too_long`."""
    seed: int = 0
    """The order of the data and, for a toy model, its first weights follow from it."""
    profile: Interval = 0
    """Step of which each rank writes a torch profiler trace to `RUN_DIR/profile`, with the step's phases as ranges."""

    @property
    def num_ranks(self) -> int:
        """Processes torchrun must start."""
        return self.num_trainers


Config = TypeVar("Config", GRPOConfig, SFTConfig)


def complete(config: Config) -> Config:
    """Fill in what the loss's paper decides, wherever the user left it open (None)."""
    if isinstance(config, SFTConfig):
        return config
    algorithm = config.algorithm
    check_loss_name(algorithm.loss)
    defaults = dict(PAPER_DEFAULTS.get(algorithm.loss, OWN_LOSS_DEFAULTS))
    defaults["importance_correction"] = "truncate" if algorithm.old_logprobs == "policy" else "none"
    open_fields = {name: value for name, value in defaults.items() if getattr(algorithm, name) is None}
    return replace(config, algorithm=replace(algorithm, **open_fields))
