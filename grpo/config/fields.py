"""The configuration a user fills in: every field with its type, bounds, default and one sentence; derived values below.

A recipe is a Python file that binds `config`; recipes.py reads it and lets the command line override any field;
values.py holds the fields against types and bounds, checks.py against each other.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args

from grpo.config.values import Above, AtLeast, AtMost, Below, Source, names_function, parse_sources

Value = TypeVar("Value")
# A dict from names. For a `dict` tyro would make one flag for each name in the recipe; for this type it makes
# `--field NAME VALUE NAME VALUE ...`, which replaces the recipe's table.
Table = MutableMapping[str, Value]
OneOrSeveral = str | Table[str]  # `--field VALUE`, or `--field NAME VALUE NAME VALUE ..` with names of your own
# Values of a table that a library or a function reads: whatever JSON can say; a word that is not JSON is text.
Json = bool | int | float | str | list | dict | None
# Numbers with the bounds that most fields have
Count = Annotated[int, AtLeast(0)]
Positive = Annotated[int, AtLeast(1)]
NotNegative = Annotated[float, AtLeast(0)]
AboveZero = Annotated[float, Above(0)]
Temperature = Annotated[float, AtLeast(0.01), Below(math.inf)]  # vLLM takes 0.01 for what is lower, without a word
Interval = Count  # every so many steps; 0 is never

# Tokens of a row that `trainer.micro_batch_tokens` auto begins with
MICRO_BATCH_TOKENS = 16_384
SHARED_GPU = 0.35  # share of a GPU's memory for an engine that has a trainer next to it
# Sequences that an engine decodes at once: always up to the first number, and up to the second if its cache holds them.
# 1,024 is vLLM's own choice for a GPU of 70 GiB; its CUDA graphs end at 512 sequences.
MAX_NUM_SEQS, MOST_NUM_SEQS = 256, 1024
CPU_KV_CACHE_GIB = 1 / 16  # least KV cache of an engine on a CPU
# Layers that every family has; the LM head and the embeddings get no adapter.
LoRATarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a checkpoint of any size, of a family in docs/models.md."""

    path: str = "Qwen/Qwen3-1.7B"
    """Hugging Face folder (config.json, safetensors, tokenizer) or hub name, NAME[@REVISION]; or your own
    `path/file.py:function` that writes such a folder, see configs/examples/toys.py."""
    reference_path: str = ""
    """Folder or hub name of the frozen reference, or teacher; empty takes the policy's starting weights."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of compute, frozen weights and export in any role; trained weights are float32.

    To bfloat16 they are rounded in every step: a move of less than 0.2 to 0.4 % of a weight is not seen until later
    steps add to it."""
    attention: Literal["auto", "flash", "flex", "documents"] = "auto"
    """How the sequences of a packed row are kept apart. flash: FlashAttention 4 (H100 or B200, bfloat16);
    flex: flex_attention, on any GPU; documents: plain torch, not compiled, and in bfloat16 on a GPU its gradients do
    not repeat to the last bit; auto: the first that runs here."""

    @property
    def is_built(self) -> bool:
        """True if a function of the user's builds the policy when the run starts."""
        return names_function(self.path)


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """How many ranks do what. The ranks of one torchrun are, in order: trainers, references, generators."""

    num_trainers: Positive = 4
    """Trainer ranks; with `colocated` every rank is trainer, reference and generator at once."""
    num_references: Count = 0
    """Ranks that hold only the reference, which a KL or a teacher needs, and the reward model; at 0 the trainer ranks
    hold them."""
    num_generators: Count = 4
    """Generator ranks, split into replicas of `generator.tensor_parallel`; ignored when `colocated`."""
    colocated: bool = False
    """Every rank has every role, so one GPU is enough; `num_references` and `num_generators` are ignored."""

    @property
    def num_engine_ranks(self) -> int:
        """Number of ranks that hold an engine or a part of one."""
        return self.num_trainers if self.colocated else self.num_generators

    @property
    def num_reference_ranks(self) -> int:
        """Number of ranks that hold only the reference and the reward model."""
        return 0 if self.colocated else self.num_references


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """vLLM engines and sampling."""

    tensor_parallel: Positive = 1
    """Ranks per vLLM engine replica."""
    max_completion_tokens: Positive = 1024
    """Longest completion in tokens; one that is cut off there counts as truncated."""
    temperature: tuple[Temperature, ...] = (1.0,)
    """Sampling temperature, also of the trainer's log-probs; several take turns over the completions of a group."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, in addition to the model's own stop tokens; the completion keeps them."""
    stop_token_ids: tuple[Count, ...] = ()
    """Token ids that end a completion, in addition to the model's own."""
    gpu_memory_utilization: Annotated[AboveZero, AtMost(1)] = 0.85
    """Share of the GPU's memory that vLLM may use for weights and KV cache; colocated, leave room for the trainer.

    A KV cache for short sequences is smaller (`fit_engine`)."""
    sleep: bool = False
    """Colocated only: the engine gives its memory back while the trainer works."""
    engine: Table[Json] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs: `--generator.engine quantization fp8_per_tensor kv_cache_dtype fp8`."""
    sampling: Table[Json] = field(default_factory=dict)
    """Further arguments of vLLM's SamplingParams, in evaluations too: `--generator.sampling top_p 0.9 top_k 50`.

    Log-probs, entropy and KL are over the tokens that top_p, top_k and min_p keep."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that one engine decodes at once. `fit_engine` sets it when a run starts."""
        return self.engine.get("max_num_seqs", MAX_NUM_SEQS)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How the policy is sharded, batched and optimized (torchtitan)."""

    tensor_parallel: Positive = 1
    """Ranks that share each layer (TP); the num_trainers / tensor_parallel groups of them are data parallel (FSDP2)."""
    context_parallel: Positive = 1
    """Ranks that take each row together, a stretch of its places each, and trade places for heads in attention."""
    expert_parallel: Positive = 1
    """Ranks that a layer's experts are spread over, whole ones on each, and to which tokens are sent; 1: FSDP gathers
    all experts for each layer, which by arithmetic is faster on one host with rows above some 8,000 tokens."""
    data_replicas: Positive = 1
    """FSDP groups that each hold a full copy of the parameters (HSDP); 1 is plain FSDP."""
    micro_batch_tokens: Positive | Literal["auto"] = "auto"
    """Most tokens of a row, which is one forward and backward; an update takes as many rows as its tokens need. auto:
    16384, or as many as the longest sequence has; fewer if a GPU lacks the room by arithmetic."""
    share_prompts: bool = True
    """Compute a prompt once for all its completions in a row, instead of once for each."""
    activation_checkpointing: Literal["auto", "none", "logits", "selective", "full"] = "auto"
    """What the backward recomputes to save memory. none: nothing; logits: the LM head's product; selective: that and
    cheap operations; full: that and every block; auto: the first that fits the GPU by arithmetic, on a CPU none."""
    compile: bool = True
    """torch.compile of each transformer block and of the log-prob chunks; GPU only."""
    logprob_chunk_tokens: Positive = 4096
    """Tokens whose logits the LM head computes at one time."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the weights. adamw: AdamW; muon: the matrices of the blocks by Muon, scaled to the size of AdamW's
    updates (arXiv:2502.16982), and embeddings, LM head, norms and biases by AdamW."""
    learning_rate: Annotated[NotNegative, Below(math.inf)] = 1e-6
    """Peak learning rate."""
    adam_beta1: Annotated[NotNegative, Below(1)] = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: Annotated[NotNegative, Below(1)] = 0.95
    """AdamW's second-moment decay."""
    adam_eps: NotNegative = 1e-8
    """AdamW's epsilon."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What AdamW's two moments are held in; bfloat16 saves 4 of 16 bytes per parameter (arXiv:2412.19437). An update is
    computed in float32 either way."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay: each update takes learning rate x weight_decay x weight off, of norms and biases too."""
    warmup_steps: Count = 0
    """Steps of linear warm-up: the n-th of them has n / warmup_steps of the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. constant: the peak; linear, cosine: falls in that shape to `min_lr_ratio`."""
    min_lr_ratio: Annotated[NotNegative, AtMost(1)] = 0.0
    """Share of the peak at which a linear or cosine schedule ends: one step after the last, which is thus not lost."""
    max_grad_norm: AboveZero = 1.0
    """Largest global norm of the gradients, which are scaled down to it."""
    lora_rank: Count = 0
    """Train adapters of this rank beside the weights, which then stay as they are, in `model.dtype`; 0 trains all."""
    lora_alpha: AboveZero = 32.0
    """An adapter's product B A counts lora_alpha / lora_rank times."""
    lora_targets: tuple[LoRATarget, ...] = get_args(LoRATarget)
    """Linear layers of each block that get an adapter, by their names in Hugging Face's models. All of them mean all
    that a model has: in a mixture of experts those of attention, since experts take none."""

    @property
    def ranks_of_a_row(self) -> int:
        """Number of ranks that compute a row together."""
        return self.tensor_parallel * self.context_parallel


# What every call of a reward function gets on top of the data's columns: completion tokens with EOS, whether it was cut
# off, the prompt as the data has it, and the step as the log counts it.
EXTRA_COLUMNS = ("num_tokens", "truncated", "prompts", "step")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from, what the rewards see of them, and how they become token ids."""

    path: OneOrSeveral = "openai/gsm8k[main]"
    """Hub data set, local .jsonl, .json, .csv or .parquet files (one, or a pattern such as rows/train*.jsonl), or your
    own `path/file.py:function`, which gives rows; in full PATH[NAME]@REVISION:SPLIT, with the hub's configuration and
    revision; split train, or e.g. train[:90%]. Several: names of your own, each with its data set."""
    weights: Table[NotNegative] = field(default_factory=dict)
    """Shares of the prompts that come from each of several data sets, by their names and relative to each other; 1 for
    one that is not named. 0 draws none, as a curriculum may begin."""
    row: str = ""
    """Your own `path/file.py:function`, in place of the columns below: a row in; out comes a dict with `prompt` and the
    columns that the rewards get, or None, which leaves the row out."""
    prompt_column: str = "question"
    """Column that holds the user's message as text, or a list of messages; `a.b` is entry b of column a, and in a list
    `a.0` is the first entry, `a.-1` the last, and `a.:-1` all except the last."""
    answer_column: str = "answer"
    """Column that the reward functions get as `answer`; empty for none."""
    columns: Table[str] = field(default_factory=dict)
    """Further columns for the reward functions: the names they get them by, and where they are in the data. With
    several classes in `environment.name`, the one named `environment` says which of them a row gets."""
    tools_column: str = ""
    """Column with the functions that the chat template may offer to the model (list of JSON schemas, or its text)."""
    system_prompt: str = (
        "Think first inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
    )
    """System message before every prompt; empty for none."""
    prompt_template: str = ""
    """Replaces the model's chat template: a .jinja file, or text with {question} for the prompt column's text and,
    where wanted, {system_prompt}; empty takes the model's own, which base models lack."""
    chat_template_kwargs: Table[Json] = field(default_factory=dict)
    """Extra keyword arguments for the tokenizer's chat template, e.g. enable_thinking false."""
    max_prompt_tokens: Positive = 512
    """Prompts longer than this many tokens are left out and counted at the start."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do about rows without a prompt or a value in a column that is used. refuse: an error before the start
    that lists them; skip: leave them out and say how many."""
    curriculum: str = ""
    """Your own `path/file.py:function` in place of equal chances: `curriculum(seen, step) -> weight` of a row that was
    seen; `seen` has its `pass_rate`, the last `step` and how many `times`. A row that was not seen has the weight 1."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new random order, which follows from `seed`; off takes the file's order."""

    @property
    def all_sources(self) -> list[Source]:
        """Data sets of `path`. Raises ValueError for one that is not written as it should be."""
        sources = parse_sources(self.path, "data.path", "train")
        return [replace(source, weight=self.weights.get(source.label, 1.0)) for source in sources]

    @property
    def reward_columns(self) -> dict[str, str]:
        """Table of the columns for rewards, by the names they get. Empty with `row`, whose keys are not known."""
        if self.row:
            return {}
        has_name = self.prompt_column.isidentifier() and self.prompt_column not in EXTRA_COLUMNS
        prompt = self.prompt_column if has_name else ""
        pairs = [(prompt, prompt), ("answer", self.answer_column)]
        return {name: column for name, column in pairs if column} | dict(self.columns)

    @property
    def is_text_template(self) -> bool:
        """True if `prompt_template` is text with placeholders, False if it is empty or the path of a file."""
        return bool(self.prompt_template) and not self.prompt_template.endswith(".jinja")


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Data that is not trained on: the fields that evaluation and validation share."""

    path: OneOrSeveral = ""
    """Held-out data set, written like `data.path`, split test if it names none; empty takes that of `data.path`.
    Several: names for their metrics, each with its data set."""

    section = ""  # of the config, for messages; without an annotation it is no field

    def held_out(self, data: DataConfig) -> list[Source]:
        """Return the data sets of `path`, or else the test split of the training data.

        Raises ValueError if the training data are several, or one is not written as it should be.
        """
        if self.path:
            return parse_sources(self.path, f"{self.section}.path", "test")
        if not isinstance(data.path, str):
            raise ValueError(
                f"data.path has {len(data.path)} data sets, so say what is held out: set {self.section}.path"
            )
        return [replace(data.all_sources[0], split="test")]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(HeldOutConfig):
    """Held-out prompts, greedy and sampled: before the first step, every `interval` steps and at the end."""

    section = "evaluation"
    interval: Interval = 0
    """Steps between evaluations; 0 never evaluates."""
    num_prompts: Positive = 256
    """Held-out prompts per evaluation, of each set, always the same ones."""
    num_samples: Count = 0
    """Samples per prompt for pass@k, k = 1, 2, 4, ... up to it; 0 takes only the greedy completion."""
    temperature: Temperature = 1.0
    """Sampling temperature of these samples."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(HeldOutConfig):
    """Loss on held-out examples (SFT): before the first step, every `interval` steps and at the end."""

    section = "validation"
    interval: Interval = 0
    """Steps between validations; 0 never validates."""
    num_examples: Positive = 256
    """Held-out examples of each set: the first that can be used, always the same ones."""


REWARD_MODEL = "reward_model"  # name of the reward model's value among those of the functions


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a completion is worth: a weighted sum of functions, and a reward model's score."""

    functions: Table[float] = field(default_factory=lambda: {"math_reward": 1.0, "thinking_reward": 0.2})
    """Weights by name: a built-in of grpo/rewards/builtin.py or your own `path/file.py:function`; 0 measures only."""
    options: Table[Json] = field(default_factory=dict)
    """Keyword arguments of a reward function, by its name: `--reward.options overlong_penalty '{"tokens": 256}'`."""
    num_workers: Positive = 4
    """Processes that run the reward functions; where built-in ones and your own (or code_reward) meet, of each kind."""
    timeout_seconds: AboveZero = 10.0
    """Longest call; a longer one gives None. Times the group's size for `@group_level`; an `async def` call is of a
    whole step."""
    memory_gib: AboveZero = 4.0
    """Address space of one such process."""
    allow_without_landlock: bool = False
    """Run code_reward also where its programs could open the files of this machine, as the kernel has no Landlock."""
    answer_format: Literal["answer_tag", "boxed", "hashes", "answer_line"] = "answer_tag"
    """Where answers are. answer_tag: in the last <answer>..</answer>; boxed: the last \\boxed{}; hashes: after ####;
    answer_line: in the last line that begins with `Answer:`."""
    passes: str = ""
    """Which part of the reward says whether a completion passes; empty: the environment, or else the first function."""
    pass_value: float = 1.0
    """What that part must give a completion for it to pass (accuracy, pass@k, the best checkpoint)."""
    model: str = ""
    """A frozen reward model beside the functions: Hugging Face folder or hub name of a sequence classifier with one
    output, which scores prompt and completion in its own chat template, on the ranks of the reference. Empty: none."""
    model_weight: float = 1.0
    """Weight of its score beside those of `functions`; 0 measures only."""
    environment: tuple[str, ...] = ()
    """Environment variables that your own functions get on top of what Python needs, such as a judge's key."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Turns, tools and an environment that answers: with these a rollout is a conversation."""

    name: OneOrSeveral = ""
    """Your own class, `path/file.py:Class`: `reset` begins an episode, other public methods are tools. Several: names
    of your own, each with its class; a row gets the one whose name is in its column `environment`."""
    agent: str = ""
    """An agent that calls an OpenAI-compatible endpoint: your own `path/file.py:function`, called with `row`,
    `base_url`, `api_key` and `model`, or a command line. It returns its reward, or None."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call: your own `path/file.py:function`, or the built-in `python`."""
    options: Table[Json] = field(default_factory=dict)
    """Keyword arguments of the class, or of each: `--environment.options high 100`."""
    max_turns: Positive = 8
    """Most turns of the model; calls in the last one are carried out and not answered."""
    max_turn_tokens: Count = 0
    """Longest turn in tokens; one that reaches it ends the episode, and its calls are carried out. 0: what is left of
    `generator.max_completion_tokens`, which answers take from too."""
    max_answer_tokens: Positive = 512
    """Longest answer of a tool or environment in tokens; a longer one is cut in its middle, and says so."""
    call_seconds: Annotated[AboveZero, Below(math.inf)] = 10.0
    """Most seconds in which a turn's calls are carried out; then the process is killed."""
    reset_seconds: Annotated[AboveZero, Below(math.inf)] = 60.0
    """Most seconds of a `reset`."""
    rollout_seconds: Annotated[NotNegative, Below(math.inf)] = 0.0
    """Seconds after which no further turn begins, and what was reached is scored; 0 is no limit."""
    num_processes: Count = 0
    """Processes of each engine replica for environments, tools and agents; 0: one for each rollout that is decoded at
    once, at most 256 (agents: 1,024). A rollout of a class or an agent keeps its process, so more of them wait."""
    memory_gib: AboveZero = 1.0
    """Address space of one such process, what your file imports included."""
    calls: Literal["auto", "hermes", "llama3_json", "fence"] = "auto"
    """How the model writes a call. hermes: JSON in <tool_call>..</tool_call>; llama3_json: JSON alone; fence: JSON in a
    ```json block; auto: hermes or llama3_json, whichever the chat template asks for."""
    reply_as: Literal["tool", "user"] = "tool"
    """Role of the message that answers a call; user: for chat templates that cannot write tool messages."""
    hung_reward: float | None = 0.0
    """Reward of a rollout whose environment computed past `call_seconds`, or failed in another way that the policy may
    have caused; None leaves it out of the loss."""
    answer_steps: Count = 0
    """Engine steps from a turn's end until its answer joins, however fast the tool is; 0: once it is there."""
    rounds: bool = False
    """Answers wait until no rollout samples, so that slow tools change nothing in what is sampled together."""
    weight: float = 1.0
    """Weight of `get_reward` beside those of `reward.functions`; 0 measures only."""

    @property
    def enabled(self) -> bool:
        """True if a rollout is a conversation."""
        return bool(self.all_classes or self.tools)

    @property
    def has_episodes(self) -> bool:
        """True if a rollout is a conversation, with an agent or an environment."""
        return self.enabled or bool(self.agent)

    @property
    def all_classes(self) -> dict[str, str]:
        """Classes by their names; one without a name has an empty key. Empty if there are only functions, or none."""
        if isinstance(self.name, str):
            return {"": self.name} if self.name else {}
        return dict(self.name)

    @property
    def are_several(self) -> bool:
        """True if a row's column `environment` says which class it gets."""
        return bool(self.name) and not isinstance(self.name, str)

    @property
    def reward_name(self) -> str:
        """Metric name of the environment's reward: the class name, or `environment` if there are several.

        An agent's has the name of its function, a command's is `agent`. Empty without any.
        """
        if self.agent:
            return self.agent.rpartition(":")[2] if names_function(self.agent) else "agent"
        return self.name.rpartition(":")[2] if isinstance(self.name, str) else "environment"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which prompts and groups a step is made of."""

    dynamic: bool = False
    """Drop groups whose rewards are all equal, or differ by the length alone (`overlong_penalty`). Sample other prompts
    until the step is full (DAPO)."""
    max_rounds: Positive = 4
    """Most rounds of a step with `dynamic`. Then the step goes on with the groups whose rewards differ, or with the
    others if there is none."""
    carry_over: Count = 0
    """Prompts in flight beyond `prompts_per_step`. Groups that are not complete when a step is full go on in the next
    one, with newer weights. Needs `algorithm.importance_correction`."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient. A field that is None takes the value of the loss's paper (PAPER_DEFAULTS).

    It stays None in the saved config too, so that another `loss` brings its own values; a step uses `resolved`.
    """

    loss: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, sapo, reinforce, or your own `path/file.py:function`."""
    advantages: str | None = None
    """How a reward r becomes an advantage. group_std: (r - mean) / (std + 1e-4) of its group (std over G - 1);
    group_mean: r - mean; rloo: r - mean of the others in its group; none: r as it is;
    or your own `path/file.py:function`. With an environment also return_to_go, an advantage for each
    turn: what its rollout earned from that turn on - mean of that over the others in its group that reached the turn;
    a turn earns what it adds to `get_reward`, the last one also the reward functions' sum."""
    aggregation: str | None = None
    """How the losses of tokens become one number. token_mean: their mean over the whole update; sequence_mean: mean
    over rollouts of the mean over a rollout's tokens; fixed_horizon: mean over rollouts of the sum over a rollout's
    tokens / generator.max_completion_tokens; or your own `path/file.py:function`."""
    clip_low: Annotated[NotNegative, AtMost(1)] | None = None
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: NotNegative | None = None
    """The ratio is clipped from above at 1 + clip_high."""
    loss_options: Table[Json] = field(default_factory=dict)
    """Keyword arguments of the loss. sapo: `temperature_positive 1 temperature_negative 1.05`;
    your own function: what it takes."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the reference; 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2_gradient", "k3_weighted"] = "k3"
    """Estimate of that KL per token, where d = log policy - log reference.
    k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d; k3_k2_gradient: the value of k3 with the gradient of k2;
    k3_weighted: k3 x policy / old policy x the weight by `importance_correction`, whose gradient is the KL's own."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes. loss: a token's is added to its loss; reward: a completion's sum is taken off its reward."""
    reference_interval: Interval = 0
    """Steps between moves of the reference towards the policy; 0: it stays the policy's start. It sits on the trainers,
    in float32, and in checkpoints."""
    reference_mixture: Annotated[AboveZero, AtMost(1)] = 1.0
    """Share of the policy in a move: reference_mixture x policy + (1 - reference_mixture) x reference."""
    distill_coef: NotNegative = 0.0
    """On-policy distillation: weight of log teacher - log policy in each token's advantage; 0 is none.
    Rewards may be left out (`--reward.functions` with nothing)."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss; above 0 favours exploration."""
    mask_truncated: bool = False
    """Exclude truncated completions from the loss (DAPO's overlong filtering); the group still compares with them.
    A conversation that runs out of turns or seconds is truncated, too."""
    num_mini_batches: Positive = 1
    """Mini-batches into which a step's groups are split, each one optimizer update."""
    num_epochs: Positive = 1
    """Passes over a step's groups, so a step has `num_mini_batches` x `num_epochs` updates."""
    old_logprobs: Literal["policy", "generator"] | None = None
    """Denominator of the ratio. policy: the trainer's log-probs at the start of the step; generator: those sampled.
    None takes policy."""
    importance_correction: Literal["none", "truncate", "mask_tokens", "mask_sequences"] | None = None
    """Makes up for a generator that differs from the policy, by weights w = policy / generator.
    none: no correction; truncate: a token's loss x min(w, high); mask_tokens: x w, or x 0 where w is not within low and
    high; mask_sequences: x 0 for all of a sequence whose geometric mean of w is not within low and high.
    None takes truncate if `old_logprobs` is policy, else none."""
    importance_correction_low: NotNegative = 0.5
    """mask_tokens, mask_sequences: smallest w that is not masked."""
    importance_correction_high: AboveZero = 2.0
    """truncate: largest w a token gets; mask_tokens, mask_sequences: largest w that is not masked."""

    @property
    def resolved(self) -> "AlgorithmConfig":
        """Algorithm with a value in place of each None. Raises ValueError for a name that no built-in function has."""
        for slot, built_in in (("loss", PAPER_DEFAULTS), ("advantages", ADVANTAGES), ("aggregation", AGGREGATIONS)):
            name = getattr(self, slot)
            if name is not None and name not in built_in and ":" not in name:
                raise ValueError(
                    f"algorithm.{slot}={name!r} is unknown; use {', '.join(built_in)}, or a function in a file of "
                    "yours or in configs/examples/methods, such as configs/examples/methods/dppo.py:dppo"
                )
        defaults: dict[str, Any] = {"old_logprobs": "policy"} | PAPER_DEFAULTS.get(self.loss, GRPO_DEFAULTS)
        by_policy = self.old_logprobs in (None, "policy")
        defaults["importance_correction"] = "truncate" if by_policy else "none"
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


# What a loss takes for fields left at None, also one from a user's file
GRPO_DEFAULTS: dict[str, Any] = {
    "advantages": "group_std",
    "aggregation": "sequence_mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
}
# Values that make a loss the algorithm of its paper, by what differs from GRPO
PAPER_DEFAULTS = {
    "grpo": GRPO_DEFAULTS,
    "dr_grpo": GRPO_DEFAULTS | {"advantages": "group_mean", "aggregation": "fixed_horizon"},
    "dapo": GRPO_DEFAULTS | {"aggregation": "token_mean", "clip_high": 0.28},
    "gspo": GRPO_DEFAULTS | {"clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1 has no lower bound and does not say its upper one; 1 + 4 is that of ScaleRL (arXiv:2510.13786)
    "cispo": GRPO_DEFAULTS | {"aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": GRPO_DEFAULTS,
    "reinforce": GRPO_DEFAULTS | {"advantages": "group_mean", "aggregation": "token_mean"},
}


ADVANTAGES = ("group_std", "group_mean", "rloo", "return_to_go", "none")
AGGREGATIONS = ("sequence_mean", "token_mean", "fixed_horizon")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving, resuming and the exported model."""

    interval: Interval = 0
    """Steps between checkpoints, after the last step too, so that `num_steps` saves once; 0 saves only a
    run that is stopped."""
    keep: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_best: str = ""
    """Held-out metric, such as accuracy, reward_mean or sample_reward_mean; where it is highest, that checkpoint stays
    beside the newest. Empty: none."""
    export: bool = True
    """Write a Hugging Face folder (`RUN_DIR/model`) at the end."""
    push_to_hub: str = ""
    """Repository at the hub, such as `owner/name`, that gets this folder and a model card with results and recipe; if
    it is made for that, it is private. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Logs. All of them are written into the run folder."""

    tensorboard: bool = True
    """Write TensorBoard event files to `RUN_DIR/tensorboard`."""
    samples_interval: Interval = 10
    """Steps between those whose completions are recorded with their rewards (`completions.jsonl`); 0 records none."""
    wandb_project: str = ""
    """Log to this project at Weights & Biases too (`pip install wandb`); empty does not."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Fields of both scripts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    seed: int = 0
    """The order of the data, the sampling and the first weights of a model from nothing follow from it."""
    resume: bool = False
    """Continue exactly from the newest checkpoint in `run_dir` (start fresh if there is none)."""
    allow_changes: bool = False
    """Resume although fields differ on which the result depends; they are shown in any case."""
    overwrite: bool = False
    """Delete what an earlier run left in `run_dir`."""
    deadline_minutes: AboveZero = 20.0
    """How long no rank may begin a phase or a collective before the run ends with the name and stack of the one that
    hangs; three times as long while it starts, samples, scores or evaluates."""
    dry_run: bool = False
    """Check data, model, rewards, memory and disk as a start does, say what fits, and stop: nothing is written."""
    gpus: Count = 0
    """With `dry_run`: judge for so many GPUs, over all nodes; 0 looks at this machine."""
    gpu_gib: AboveZero = 80.0
    """With `gpus`: GiB of each."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that torchrun must start."""
        roles = self.roles  # type: ignore[attr-defined]
        if roles.colocated:
            return roles.num_trainers
        return roles.num_trainers + roles.num_references + roles.num_generators

    @property
    def num_engines(self) -> int:
        """Number of vLLM engines."""
        return self.roles.num_engine_ranks // self.generator.tensor_parallel  # type: ignore[attr-defined]

    @property
    def evaluation_completions(self) -> int:
        """Most completions that an evaluation asks all engines for at one time."""
        evaluation = self.evaluation
        if not evaluation.interval:
            return 0
        num_sets = 1 if isinstance(evaluation.path, str) else len(evaluation.path) or 1
        return evaluation.num_prompts * num_sets * max(1, evaluation.num_samples)

    @property
    def completions_at_once(self) -> int:
        """Most completions that the run asks all engines for at one time."""
        return self.evaluation_completions

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each part of the reward, by its name: first the environment's, the reward model's last."""
        environment = self.environment  # type: ignore[attr-defined]
        weights = {environment.reward_name: environment.weight} if environment.reward_name else {}
        weights |= self.reward.functions
        if self.reward.model:
            weights[REWARD_MODEL] = self.reward.model_weight
        return weights


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """Everything `train_grpo.py` needs."""

    roles: RolesConfig = field(default_factory=RolesConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    run_dir: str = "runs/grpo"
    """Folder of the run: config, checkpoints, metrics, samples, exported model."""
    num_steps: Positive = 200
    """Steps in total, by default of one update each; a resume may change it if `schedule` is constant."""
    prompts_per_step: Positive = 32
    """Prompts drawn for each step."""
    group_size: Positive = 8
    """Completions per prompt."""
    overlap_steps: Annotated[Count, AtMost(1)] = 0
    """At 1 generators sample the next step while the others train on this one, with weights one step older; at 0 they
    take turns. Split roles only; needs `algorithm.importance_correction`."""
    sync_check_interval: Interval = 20
    """Steps between sync checks of trainer against generator log-probs; a process's first two steps have one too. 0 is
    never."""
    record: bool = False
    """Write each step's batch, with rewards and the reference's log-probs, to `RUN_DIR/batches`, for grpo.replay."""

    @property
    def completions_per_step(self) -> int:
        """Number of completions in one step, over all generators."""
        return self.prompts_per_step * self.group_size

    @property
    def completions_at_once(self) -> int:
        """Most completions that a step or an evaluation asks all engines for at one time."""
        of_step = (self.prompts_per_step + self.sampling.carry_over) * self.group_size
        return max(of_step, self.evaluation_completions)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self.data.max_prompt_tokens + self.generator.max_completion_tokens

    @property
    def most_tokens(self) -> int:
        """Most tokens that are computed at one time. Each turn of an agent may be a sequence."""
        most_sequences = self.environment.max_turns if self.environment.agent else 1
        return most_sequences * self.completions_per_step * self.max_sequence_tokens

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in one step."""
        return self.algorithm.num_mini_batches * self.algorithm.num_epochs

    @property
    def has_lag(self) -> bool:
        """True if the generators' weights may be older than the policy at the start of a step."""
        return self.overlap_steps > 0 or self.sampling.carry_over > 0

    @property
    def turns_earn(self) -> bool:
        """True if each turn of an episode has a reward and an advantage of its own."""
        return self.algorithm.advantages == "return_to_go"

    @property
    def needs_reference(self) -> bool:
        """True if the run needs log-probs of a reference or teacher."""
        return self.algorithm.kl_coef > 0 or self.algorithm.distill_coef > 0

    @property
    def reference_has_model(self) -> bool:
        """True if the reference has its own weights. False if it is the policy with its adapters off."""
        is_base = self.trainer.lora_rank and not self.roles.num_reference_ranks and not self.model.reference_path
        return self.needs_reference and not is_base

    @property
    def reference_moves(self) -> bool:
        """True if the reference follows the policy."""
        return self.needs_reference and self.algorithm.reference_interval > 0

    @property
    def reference_tensor_parallel(self) -> int:
        """Number of ranks that share each layer of the reference: the trainer's, or less if its ranks do not divide."""
        return math.gcd(self.roles.num_reference_ranks or self.roles.num_trainers, self.trainer.tensor_parallel)


# Tokens of an example that are labels, see grpo/data/turns.py
TrainOn = Literal["all", "assistant", "last"]
# Kinds of rows, by their columns, see grpo/data/rows.py
RowFormat = Literal["auto", "prompt_completion", "messages", "alpaca", "text"]


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """Everything `train_sft.py` needs: supervised fine-tuning. Only evaluation reads `reward` and `generator`."""

    generator: GeneratorConfig = field(default_factory=partial(GeneratorConfig, gpu_memory_utilization=SHARED_GPU))
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run_dir: str = "runs/sft"
    """Folder of the run."""
    num_trainers: Positive = 1
    """Trainer ranks (all of torchrun's)."""
    num_steps: Positive = 100
    """Optimizer steps in total."""
    row_format: RowFormat = "auto"
    """What a row has. prompt_completion: `data.prompt_column` and `completion_column`; messages: a chat; alpaca:
    `instruction`, `input` and `output`; text: `text`, without turns; auto: the first of these that a data set has."""
    completion_column: str = "completion"
    """Column that holds the completion to learn for `data.prompt_column`."""
    train_on: TrainOn = "assistant"
    """Tokens that are labels. assistant: all assistant turns, with the token that ends each; last: the last assistant
    turn; all: every token, as always in plain text."""
    too_long: Literal["leave_out", "truncate"] = "leave_out"
    """Examples of more than `max_sequence_tokens`. leave_out: they are not drawn; truncate: their first tokens are."""
    show: Count = 0
    """With `dry_run`: print so many of the first examples, labels in colour."""
    stop_at_loss: NotNegative = 0.0
    """End early, with export, once the mean loss of the last 10 steps is below this; 0 runs all steps."""
    sequences_per_step: Positive = 128
    """Examples per step."""
    max_sequence_tokens: Positive = 2048
    """Longest example in tokens."""

    needs_reference = reference_has_model = reference_moves = turns_earn = False  # without an annotation it is no field
    environment = EnvironmentConfig()

    @property
    def most_tokens(self) -> int:
        """Most tokens that are trained on at one time. Held-out examples may be more, and need no backward."""
        return self.sequences_per_step * self.max_sequence_tokens

    @property
    def roles(self) -> RolesConfig:
        """Layout of an SFT run: every rank trains, and generates too if prompts are completed between steps."""
        return RolesConfig(colocated=self.evaluation.interval > 0, num_trainers=self.num_trainers, num_generators=0)


Config = TypeVar("Config", GRPOConfig, SFTConfig)
