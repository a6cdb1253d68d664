"""GPU memory of each role by arithmetic, from the model's config.json and the run's config alone; nothing is loaded.

Weights and layers are counted on the model's own module, without memory for them (torch's meta device). The sizes are
those of the compiled code (`trainer.compile`) unless it is off; every peak on record in configs/RESULTS.md is within
15 % of what comes out (tests/unit/test_memory.py). Left out: what the allocator wastes, NCCL's buffers and CUDA graphs,
together a few GiB.
"""

import functools
import json
import math
from dataclasses import dataclass, replace

import transformers
from torch import nn

from grpo.config import GRPOConfig, SFTConfig, TrainerConfig
from grpo.config.fields import Config
from grpo.models.families import empty_policy, family_of, head_dim_of

# float32 weights and gradients, and AdamW's two moments
STATE_BYTES = 16
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# Of the arithmetic and of a GPU, for what the arithmetic leaves out
MARGIN_FRAC, MARGIN_GIB = 0.05, 3.0
CHECKPOINTING = ("none", "logits", "selective", "full")  # what "auto" chooses from, the fastest first


@dataclass(frozen=True)
class Sizes:
    """How large the parts of a model are."""

    parameters: int
    """All weights; tied embeddings count once."""
    blocks: list[int]
    """Weights of each transformer block."""
    linears: list[dict[str, nn.Linear]]
    """The linear layers of each block in their order, on the meta device, by Hugging Face's names."""
    head: int
    """Weights of the LM head."""


def sizes_of(hf: transformers.PretrainedConfig) -> Sizes:
    """Count a model's parts on its module."""
    return _sizes_of(hf.to_json_string(), type(hf))


@functools.lru_cache
def _sizes_of(config: str, kind: type[transformers.PretrainedConfig]) -> Sizes:
    hf = kind(**json.loads(config))
    module = empty_policy(hf)
    blocks, places = list(module.layers.values()), family_of(hf).linears
    return Sizes(
        parameters=_numel(module),
        blocks=[_numel(block) for block in blocks],
        linears=[{name: block.get_submodule(place) for name, place in places.items()} for block in blocks],
        head=_numel(module.lm_head),
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
    """The config with `trainer.activation_checkpointing` decided if it is "auto".

    It becomes the first of CHECKPOINTING with which the peak fits a GPU of `gpu_gib`, with a margin; the last if none
    does; the first on a CPU, for which `gpu_gib` is None.
    """
    if config.trainer.activation_checkpointing != "auto":
        return config
    for kind in CHECKPOINTING:
        decided = replace(config, trainer=replace(config.trainer, activation_checkpointing=kind))
        if gpu_gib is None or peak_gib(hf, decided, gpu_gib) * (1 + MARGIN_FRAC) + MARGIN_GIB <= gpu_gib:
            break
    return decided


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
    if not (cache := generator.engine.get("kv_cache_memory_bytes")):
        return generator.gpu_memory_utilization * gpu_gib
    weights = DTYPE_BYTES[config.model.dtype] * num_parameters(hf) / generator.tensor_parallel
    return (weights + cache) / 2**30


def num_parameters(hf: transformers.PretrainedConfig) -> int:
    """All weights of a model; tied embeddings count once."""
    return sizes_of(hf).parameters


def num_adapter_parameters(hf: transformers.PretrainedConfig, trainer: TrainerConfig) -> int:
    """Weights of LoRA's adapters: rank x (inputs + outputs) for each layer that has one."""
    adapted = [block[name] for block in sizes_of(hf).linears for name in trainer.lora_targets if name in block]
    return trainer.lora_rank * sum(linear.in_features + linear.out_features for linear in adapted)


def choices_told(config: GRPOConfig | SFTConfig, decided: GRPOConfig | SFTConfig) -> list[str]:
    """What `fit_trainer` decided, a text each."""
    is_auto = config.trainer.activation_checkpointing == "auto"
    return [f"trainer.activation_checkpointing: {decided.trainer.activation_checkpointing}"] if is_auto else []


def trainer_gib(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig) -> dict[str, float]:
    """Parts of a trainer rank's peak, GiB.

    It is reached in the LM head's backward of a full micro-batch, when all activations are there and, from the second
    micro-batch on, all gradients.
    """
    trainer, dtype_bytes = config.trainer, DTYPE_BYTES[config.model.dtype]
    num_trainers = (config.roles if isinstance(config, GRPOConfig) else config).num_trainers
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
    has_reference = isinstance(config, GRPOConfig) and config.needs_reference and not config.reference_is_base
    if has_reference and (config.roles.colocated or not config.roles.num_references):  # on the trainer ranks
        parts["reference"] = dtype_bytes * parameters / num_trainers
    return _gib(parts)


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
    trainer, dtype_bytes, sizes = config.trainer, DTYPE_BYTES[config.model.dtype], sizes_of(hf)
    # FSDP gathers two blocks at a time, and the embeddings and the LM head, in the compute dtype. Without other
    # data-parallel ranks it holds a copy of all weights, and is not used where they are held in that dtype already.
    trains_head = trains and not trainer.lora_rank
    gathered = 2 * max(sizes.blocks) + sizes.parameters - sum(sizes.blocks)
    if num_ranks == tensor_parallel:
        gathered = sizes.parameters if trains_head else 0
    chunk = min(trainer.micro_batch_tokens, trainer.logprob_chunk_tokens) * hf.vocab_size
    # Compiled, float32 values exist only in registers: the product h W^T is there and, when trained, its gradient.
    # Otherwise three float32 tensors come on top of the product.
    bytes_of_a_logit = dtype_bytes * (2 if trains else 1) if trainer.compile else 3 * 4 + dtype_bytes
    parts = {"gathered weights": dtype_bytes * gathered, "logits of a chunk": chunk * bytes_of_a_logit}
    if (trains_head or (trains and tensor_parallel > 1)) and trainer.activation_checkpointing == "none":
        others = max(trainer.micro_batch_tokens - trainer.logprob_chunk_tokens, 0)
        parts["logits of other chunks"] = dtype_bytes * others * hf.vocab_size
    if trains_head:  # summed over the chunks in float32
        parts["gradient of the LM head"] = 4 * sizes.head
    return {part: size / tensor_parallel for part, size in parts.items()}


def _saved_values(hf: transformers.PretrainedConfig, trainer: TrainerConfig) -> int:
    """Values that the backward keeps for each token, over all blocks."""
    whole, recomputing = [], []  # of each block: if nothing of it is computed again, and with selective checkpointing
    for linears in sizes_of(hf).linears:
        outputs = {name: linear.out_features for name, linear in linears.items()}
        block_input, attention_output = linears["q_proj"].in_features, linears["o_proj"].in_features
        # block input and the sum after attention; the products q, k, v, gate, up; rotated queries and keys, attention's
        # output, SwiGLU's activation and product. Compiled code computes the two norms' outputs again.
        norms = 0 if trainer.compile else 2 * block_input
        rotated = outputs["q_proj"] + outputs["k_proj"]
        activated = 4 * outputs["gate_proj"]
        whole.append(2 * block_input + 2 * rotated + outputs["v_proj"] + attention_output + activated + norms)
        # torchtitan recomputes every second product, of those without a bias, and all that go through adapters
        if trainer.lora_rank and trainer.tensor_parallel == 1:
            outputs = {name: size for name, size in outputs.items() if name not in trainer.lora_targets}
        plain = [size for name, size in outputs.items() if linears[name].bias is None]
        saved = sum(plain[::2]) + sum(size for name, size in outputs.items() if linears[name].bias is not None)
        recomputing.append(saved + attention_output + block_input)
    if trainer.activation_checkpointing == "full":  # of the block at hand all is there
        return sum(linears["q_proj"].in_features for linears in sizes_of(hf).linears) + max(whole)
    return sum(whole if trainer.activation_checkpointing in ("none", "logits") else recomputing)


def _num_generators(config: GRPOConfig) -> int:
    return config.roles.num_trainers if config.roles.colocated else config.roles.num_generators


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {part: size / 2**30 for part, size in parts.items()}
