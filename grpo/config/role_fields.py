"""The sections of the configuration about models and the roles that hold them; see fields.py."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from grpo.config.bounds import Above, AtLeast, AtMost, Below
from grpo.config.kinds import Json, Table, Temperature

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
    flash: FlashAttention 4, on a GPU such as H100 or B200 and in bfloat16; flex: one flex_attention over the row, on
    any GPU; documents: scaled_dot_product_attention for each sequence; auto: the first of them that runs here."""


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
    share_prompts: bool = True
    """Compute a prompt once for all its completions in a row, instead of once for each; needs `packing`."""
    activation_checkpointing: Literal["auto", "none", "logits", "selective", "full"] = "auto"
    """What the backward recomputes to save memory. none: nothing; logits: the LM head's product, chunk by chunk;
    selective: that and cheap operations; full: that and every block; auto: the first of them that fits the GPU by
    arithmetic (`python -m grpo.memory`); on a CPU none."""
    fsdp_gather: Literal["auto", "micro_batch", "update"] = "micro_batch"
    """How often data-parallel trainers gather weights and add up their gradients (FSDP). micro_batch: in each, block by
    block; update: once for all micro-batches of an update, for which a rank holds 6 bytes per parameter more (2 with
    LoRA); auto: that if it fits the GPU by arithmetic, and on a CPU."""
    deterministic: bool = True
    """Add gradients in one order always, so that two runs on GPUs can have the same last digits; off, the backward of
    flash attention is a little faster (1 to 2 % of a step of Qwen3-1.7B with documents of 4,096 tokens)."""
    compile: bool = True
    """torch.compile of each transformer block and of the log-prob chunks; GPU only."""
    logprob_chunk_tokens: Annotated[int, AtLeast(1)] = 4096
    """Tokens whose logits the LM head computes at one time; whether it keeps them for the backward,
    `activation_checkpointing` says. Only tokens that count in the loss have any."""
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
