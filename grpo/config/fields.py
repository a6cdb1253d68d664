"""The configuration a user fills in: every field with its type, bounds, default and one sentence; derived values below.

A recipe is a Python file that binds `config`; recipes.py reads it and lets the command line override any field;
bounds.py holds the fields against types and bounds, checks.py against each other. The sections about models and roles
are in role_fields.py, the one about the algorithm in algorithm_fields.py, those about data in data_fields.py, those
about the run itself in run_fields.py; all can be imported from here.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

from grpo.config.algorithm_fields import (  # noqa: F401
    OWN_LOSS_DEFAULTS,
    PAPER_DEFAULTS,
    Advantages,
    Aggregation,
    AlgorithmConfig,
    check_loss_name,
)
from grpo.config.bounds import Above, AtLeast, AtMost
from grpo.config.data_fields import (  # noqa: F401
    EXTRA_COLUMNS,
    DataConfig,
    EvaluationConfig,
    HeldOutConfig,
    ValidationConfig,
)
from grpo.config.kinds import Interval, Json, Options, Scalar, Table, Temperature  # noqa: F401
from grpo.config.role_fields import GeneratorConfig, LoRATarget, ModelConfig, RolesConfig, TrainerConfig  # noqa: F401
from grpo.config.run_fields import CheckpointConfig, DeadlinesConfig, MetricsConfig, WarningsConfig

# Of a GPU's memory, for an engine that shares it with a trainer
SHARED_GPU = 0.35


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
