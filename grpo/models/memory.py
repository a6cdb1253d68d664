"""GPU memory of each role by arithmetic, from the model's config.json and the run's config alone; nothing is loaded.

The sizes are those of the compiled code (`trainer.compile`) unless it is off; every peak on record in
configs/RESULTS.md is within 15 % of what comes out (tests/unit/test_memory.py). Left out: what the allocator wastes,
NCCL's buffers and CUDA graphs, together a few GiB.
"""

import math
from dataclasses import replace

import transformers

from grpo.config import GRPOConfig, SFTConfig, TrainerConfig
from grpo.config.fields import Config
from grpo.models.hf_folder import FAMILIES, head_dim_of

# float32 weights and gradients, and AdamW's two moments
STATE_BYTES = 16
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# Of the arithmetic and of a GPU, for what the arithmetic leaves out
MARGIN_FRAC, MARGIN_GIB = 0.05, 3.0
# What a trainer's fields may have instead of "auto", the fastest first
CHOICES = {
    "activation_checkpointing": ("none", "logits", "selective", "full"),
    "fsdp_gather": ("update", "micro_batch"),
}


def memory_of_roles(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig) -> dict[str, dict[str, float]]:
    """The parts of the peak of a rank of each role that has ranks or parts of its own, GiB."""
    roles = {"trainer": trainer_gib(hf, config)}
    if isinstance(config, GRPOConfig):
        if _num_generators(config):
            roles["generator"] = generator_gib(hf, config)
        if config.needs_reference and config.roles.num_references and not config.roles.colocated:
            roles["reference"] = reference_gib(hf, config)
    return roles


def fit_trainer(hf: transformers.PretrainedConfig, config: Config, gpu_gib: float | None) -> Config:
    """The config with those of CHOICES decided that are "auto", one after the other.

    Each becomes the first with which the peak fits a GPU of `gpu_gib`, with a margin, while those not decided yet are
    what takes least; the last if none does; the first on a CPU, for which `gpu_gib` is None.
    """
    names = [name for name in CHOICES if getattr(config.trainer, name) == "auto"]
    config = replace(config, trainer=replace(config.trainer, **{name: CHOICES[name][-1] for name in names}))
    for name in names:
        for choice in CHOICES[name]:
            decided = replace(config, trainer=replace(config.trainer, **{name: choice}))
            if gpu_gib is None or peak_gib(hf, decided, gpu_gib) * (1 + MARGIN_FRAC) + MARGIN_GIB <= gpu_gib:
                config = decided
                break
    return config


def peak_gib(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig, gpu_gib: float) -> float:
    """What a trainer rank's GPU of `gpu_gib` must hold at one time, with the engine that may share it; GiB."""
    parts, engine = trainer_gib(hf, config), engine_gib(hf, config, gpu_gib)
    peak = sum(parts.values())
    if not config.generator.sleep:
        return peak + engine
    at_rest = sum(gib for part, gib in parts.items() if part.endswith("moments") or part == "frozen weights")
    return max(peak, at_rest + engine)


def engine_gib(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig, gpu_gib: float) -> float:
    """What vLLM takes of a trainer rank's GPU: 0 if it has GPUs of its own, or there is none."""
    shares = config.roles.colocated if isinstance(config, GRPOConfig) else config.evaluation.interval > 0
    generator = config.generator
    if not shares:
        return 0.0
    if not generator.kv_cache_gib:
        return generator.gpu_memory_utilization * gpu_gib
    weights = DTYPE_BYTES[config.model.dtype] * num_parameters(hf) / generator.tensor_parallel
    return weights / 2**30 + generator.kv_cache_gib


def num_parameters(hf: transformers.PretrainedConfig) -> int:
    """Weights of a dense model; tied embeddings count once."""
    products, norms, biases = _block(hf)
    block = sum(inputs * outputs for inputs, outputs in products.values()) + norms + biases
    embeddings = hf.vocab_size * hf.hidden_size * (1 if hf.tie_word_embeddings else 2)
    return embeddings + hf.num_hidden_layers * block + hf.hidden_size


def num_adapter_parameters(hf: transformers.PretrainedConfig, trainer: TrainerConfig) -> int:
    """Of LoRA: rank x (inputs + outputs) for each layer with an adapter."""
    products, _, _ = _block(hf)
    sizes = sum(sum(products[target.removesuffix("_proj")]) for target in trainer.lora_targets)
    return hf.num_hidden_layers * trainer.lora_rank * sizes


def num_trainers_of(config: GRPOConfig | SFTConfig) -> int:
    """Trainer ranks."""
    return (config.roles if isinstance(config, GRPOConfig) else config).num_trainers


def choices_told(config: GRPOConfig | SFTConfig, decided: GRPOConfig | SFTConfig) -> list[str]:
    """What `fit_trainer` decided, a text each; left out is what means nothing for a single data-parallel trainer."""
    alone = num_trainers_of(config) == config.trainer.tensor_parallel
    names = [name for name in CHOICES if getattr(config.trainer, name) == "auto"]
    return [
        f"trainer.{name}: {getattr(decided.trainer, name)}" for name in names if not (alone and name == "fsdp_gather")
    ]


def trainer_gib(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig) -> dict[str, float]:
    """Parts of a trainer rank's peak, GiB.

    It is reached in the LM head's backward of a full micro-batch, when all activations are there and, from the second
    micro-batch on, all gradients.
    """
    trainer, dtype_bytes = config.trainer, DTYPE_BYTES[config.model.dtype]
    num_trainers = num_trainers_of(config)
    parameters, shards = num_parameters(hf), num_trainers // trainer.data_replicas
    kept = trainer.micro_batch_tokens * _saved_values(hf, trainer)
    states = {"weights, gradients and moments": STATE_BYTES * parameters / shards}
    if trainer.lora_rank:
        adapters = STATE_BYTES * num_adapter_parameters(hf, trainer) / shards
        states = {"frozen weights": dtype_bytes * parameters / shards, "adapters, gradients and moments": adapters}
    parts = {
        **states,
        **_of_a_forward(hf, config, num_trainers, trainer.tensor_parallel, trains=True),
        "activations": dtype_bytes * kept / trainer.tensor_parallel,
    }
    if isinstance(config, GRPOConfig) and _reference_on_trainers(config):
        parts["reference"] = dtype_bytes * parameters / num_trainers
    return _gib(parts)


def _reference_on_trainers(config: GRPOConfig) -> bool:
    """Whether the trainer ranks hold a second model."""
    on_trainers = config.roles.colocated or not config.roles.num_references
    return config.needs_reference and on_trainers and not config.reference_is_base


def reference_gib(hf: transformers.PretrainedConfig, config: GRPOConfig) -> dict[str, float]:
    """Parts of the peak of a rank that only holds the reference, which must be the policy's size; GiB."""
    weights = DTYPE_BYTES[config.model.dtype] * num_parameters(hf) / config.roles.num_references
    forward = _of_a_forward(hf, config, config.roles.num_references, config.reference_tensor_parallel)
    return _gib({"weights": weights, **forward})


def generator_gib(hf: transformers.PretrainedConfig, config: GRPOConfig) -> dict[str, float]:
    """A generator rank's weights, and the KV cache of `generator.max_num_seqs` sequences of full length; GiB.

    With less cache than that, vLLM runs fewer sequences at once.
    """
    generator, dtype_bytes = config.generator, DTYPE_BYTES[config.model.dtype]
    per_token = 2 * hf.num_hidden_layers * hf.num_key_value_heads * head_dim_of(hf) * dtype_bytes
    num_engines = max(1, _num_generators(config) // generator.tensor_parallel)
    num_sequences = min(generator.max_num_seqs, math.ceil(config.completions_per_step / num_engines))
    cache = per_token * num_sequences * config.max_sequence_tokens
    parts = {"weights": dtype_bytes * num_parameters(hf), "KV cache, if all run at full length": cache}
    return _gib({part: size / generator.tensor_parallel for part, size in parts.items()})


def _of_a_forward(
    hf: transformers.PretrainedConfig,
    config: GRPOConfig | SFTConfig,
    num_ranks: int,
    tensor_parallel: int,
    trains: bool = False,
) -> dict[str, float]:
    """Bytes of what a forward needs besides activations, and with `trains` the LM head's backward."""
    trainer, dtype_bytes = config.trainer, DTYPE_BYTES[config.model.dtype]
    products, _, _ = _block(hf)
    block, head = sum(inputs * outputs for inputs, outputs in products.values()), hf.vocab_size * hf.hidden_size
    # FSDP gathers two blocks at a time, and the embeddings and the LM head, or a trainer's for a whole update. Without
    # other data-parallel ranks it holds a copy of all weights in the compute dtype, and is not used at all where they
    # are held in that already.
    alone = num_ranks == tensor_parallel
    gathers_once = trains and not alone and trainer.fsdp_gather == "update"
    if gathers_once or (trains and alone and not trainer.lora_rank):
        gathered = num_parameters(hf)
    else:
        gathered = 0 if alone else 2 * block + head * (1 if hf.tie_word_embeddings else 2)
    chunk = min(trainer.micro_batch_tokens, trainer.logprob_chunk_tokens) * hf.vocab_size
    parts = {
        "gathered weights": dtype_bytes * gathered,
        "logits of a chunk": chunk * _bytes_of_a_logit(trainer, dtype_bytes, trains),
    }
    if gathers_once and not trainer.lora_rank:
        parts["gradients before they are added up"] = 4 * num_parameters(hf)
    trains_head = trains and not trainer.lora_rank
    if (trains_head or (trains and tensor_parallel > 1)) and trainer.activation_checkpointing == "none":
        others = max(trainer.micro_batch_tokens - trainer.logprob_chunk_tokens, 0)
        parts["logits of other chunks"] = dtype_bytes * others * hf.vocab_size
    if trains_head:  # summed over the chunks in float32
        parts["gradient of the LM head"] = 4 * head
    return {part: size / tensor_parallel for part, size in parts.items()}


def _bytes_of_a_logit(trainer: TrainerConfig, dtype_bytes: int, trains: bool) -> int:
    """What is held at one time for each token and vocabulary entry of a chunk.

    Compiled, float32 values exist only in registers: the product h W^T is there and, in the backward, its gradient; a
    frozen head (LoRA) has both already in the forward. Without compilation three float32 tensors come on top of the
    product.
    """
    compiled = dtype_bytes * (2 if trains else 1)
    return compiled if trainer.compile else 3 * 4 + dtype_bytes


def _block(hf: transformers.PretrainedConfig) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Of one transformer block: its matrix products (inputs, outputs) in their order, weights of norms and biases."""
    family, head_dim, width = FAMILIES[hf.model_type], head_dim_of(hf), hf.hidden_size
    queries, keys = hf.num_attention_heads * head_dim, hf.num_key_value_heads * head_dim
    products = {
        "q": (width, queries),
        "k": (width, keys),
        "v": (width, keys),
        "o": (queries, width),
        "gate": (width, hf.intermediate_size),
        "up": (width, hf.intermediate_size),
        "down": (hf.intermediate_size, width),
    }
    return products, 2 * width + family.qk_norm * 2 * head_dim, family.qkv_bias * (queries + 2 * keys)


def _saved_values(hf: transformers.PretrainedConfig, trainer: TrainerConfig) -> int:
    """Values that the backward keeps for each token, over all blocks."""
    products, _, _ = _block(hf)
    outputs = {name: size for name, (_, size) in products.items()}
    block_input, attention_output = hf.hidden_size, outputs["q"]
    # block input and the sum after attention, into which the products o and down go; the products q, k, v, gate, up;
    # rotated queries and keys, attention's output, SwiGLU's activation and product
    whole = 2 * block_input + 2 * (outputs["q"] + outputs["k"]) + outputs["v"] + attention_output
    whole += 4 * hf.intermediate_size
    if not trainer.compile:  # compiled code computes the two norms' outputs again
        whole += 2 * block_input
    if trainer.activation_checkpointing == "full":  # the block at hand is there in whole
        return hf.num_hidden_layers * block_input + whole
    if trainer.activation_checkpointing in ("none", "logits"):
        return hf.num_hidden_layers * whole
    # torchtitan recomputes every second product, of those without a bias, and all that go through adapters
    biased = {"q", "k", "v"} if FAMILIES[hf.model_type].qkv_bias else set()
    if trainer.lora_rank and trainer.tensor_parallel == 1:
        adapted = {target.removesuffix("_proj") for target in trainer.lora_targets}
        outputs, biased = {name: size for name, size in outputs.items() if name not in adapted}, biased - adapted
    plain = [size for name, size in outputs.items() if name not in biased]
    saved = sum(plain[::2]) + sum(outputs[name] for name in biased)
    return hf.num_hidden_layers * (saved + attention_output + block_input)


def _num_generators(config: GRPOConfig) -> int:
    return config.roles.num_trainers if config.roles.colocated else config.roles.num_generators


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {part: size / 2**30 for part, size in parts.items()}
