"""GPU memory of each role by a simple rule, from the model's config.json and the run's config; nothing is loaded.

A trainer rank holds its states, the weights that FSDP gathers, the logits of a chunk, and for each token and block a
number of values that depends on the checkpointing alone. Peaks that were measured (configs/SPEED.md) are within 15 %
of the estimate, and below the estimate with its margin (tests/unit/models/test_memory.py). Left out, and covered by the
margin: what the allocator wastes, NCCL's buffers and CUDA graphs.
"""

import math
import re
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig

from grpo.config import GRPOConfig, TrainerConfig
from grpo.config.fields import MAX_NUM_SEQS, MOST_NUM_SEQS, Config
from grpo.models.families import empty_policy, family_of, has_experts, has_states, state_values, windows_of
from grpo.models.muon import BLOCK_MATRICES

# Least and most KV cache of an engine on a CPU
CPU_KV_CACHE_GIB = 1 / 16
MOST_CPU_KV_CACHE_GIB = 1 / 4
# On a GPU a cache is for an engine's sequences and no more, if that is at most this part of the room for it: the rest
# must hold what vLLM computes with, which it then does not measure
SMALL_CACHE_FRAC = 0.5
LEAST_KV_CACHE_GIB = 1  # of such a cache
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# What is added to an estimate before it is compared with a GPU
MARGIN_FRAC = 0.05
MARGIN_GIB = 3.0
# What a trainer rank holds besides weights with moments while an engine samples
STAYING = ("frozen weights", "reference", "reward model")
# Values that a block keeps for each value that its linear layers give. Attention, norms and activations add the rest.
COMPILED_VALUES = 1.85
EAGER_VALUES = 2.8
# Bytes that a gated delta rule computes with, in float32, for each value of its output
RULE_BYTES = 160
# Moments of a trainer rank
TRAINS = "while it trains"
AWAKE = "while the engine is awake"
# What "auto" chooses from, the fastest first
CHECKPOINTING = ("none", "logits", "selective", "full")


@dataclass(frozen=True)
class Sizes:
    """How large the parts of a model are. All of its blocks are taken to be alike."""

    hf: PretrainedConfig
    parameters: int
    """All weights; tied embeddings count once."""
    block_parameters: int
    """Weights of one transformer block, on average."""
    head_outputs: int
    """The vocabulary's size; 1 of a reward model."""
    matrices: int
    """Weights that Muon updates, if it is chosen."""
    linears: dict[str, nn.Linear]
    """The linear layers of a block with attention, without experts, on the meta device, by Hugging Face's names."""
    reward_model: "Sizes | None" = None
    reference: "Sizes | None" = None
    """Of `model.reference_path`; None: the reference has the policy's size."""


def sizes_of(
    hf: PretrainedConfig,
    reward_model: PretrainedConfig | None = None,
    reference: PretrainedConfig | None = None,
) -> Sizes:
    """Count a model's parts on its module, and those of a reward model and of another reference, if there are any."""
    module = empty_policy(hf)
    first = next(layer for layer, window in enumerate(windows_of(hf)) if window != 0)
    block = module.layers[str(first)]
    return Sizes(
        hf=hf,
        parameters=_count(module),
        block_parameters=_count(module.layers) // hf.num_hidden_layers,
        head_outputs=module.lm_head.out_features,
        matrices=sum(weight.numel() for name, weight in module.named_parameters() if re.search(BLOCK_MATRICES, name)),
        linears={name: block.get_submodule(place) for name, place in family_of(hf).linears.items()},
        reward_model=sizes_of(reward_model) if reward_model else None,
        reference=sizes_of(reference) if reference else None,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def state_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes of a parameter that AdamW trains: float32 weight and gradient, and two moments."""
    return 4 + 4 + 2 * DTYPE_BYTES[trainer.moments]


def trained_parameters(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Count the weights that are trained: all, or those of LoRA's adapters."""
    return num_adapter_parameters(sizes, trainer) if trainer.lora_rank else sizes.parameters


def trained_bytes(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Return the bytes of all trained parameters with their gradients and moments.

    Of the matrices of the blocks Muon holds one moment, in float32, where AdamW holds two.
    """
    num_bytes = state_bytes(trainer) * trained_parameters(sizes, trainer)
    if trainer.optimizer == "muon":
        saved = 2 * DTYPE_BYTES[trainer.moments] - DTYPE_BYTES["float32"]
        num_bytes -= saved * sizes.matrices
    return num_bytes


def fit_trainer(sizes: Sizes, config: Config, gpu_gib: float | None) -> Config:
    """Return the config with `trainer.activation_checkpointing` decided if it is "auto".

    It becomes the first of CHECKPOINTING with which the peak fits a GPU of `gpu_gib`, with a margin; the last if none
    does; the first on a CPU, for which `gpu_gib` is None.
    """
    if config.trainer.activation_checkpointing != "auto":
        return config
    for kind in CHECKPOINTING:
        trainer = replace(config.trainer, activation_checkpointing=kind)
        decided = replace(config, trainer=trainer)
        if gpu_gib is None:
            break
        peak = trainer_peak(sizes, decided, gpu_gib)
        if peak * (1 + MARGIN_FRAC) + MARGIN_GIB <= gpu_gib:
            break
    return decided


def trainer_peak(sizes: Sizes, config: Config, gpu_gib: float) -> float:
    """Return the most that a trainer rank's GPU of `gpu_gib` holds at one time, with an engine that shares it; GiB."""
    moments = trainer_moments(sizes, config, gpu_gib)
    return max(sum(parts.values()) for parts in moments.values())


def trainer_moments(
    sizes: Sizes,
    config: Config,
    gpu_gib: float,
) -> dict[str, dict[str, float]]:
    """Return what a trainer rank's GPU of `gpu_gib` holds while it trains; GiB, by part.

    An engine on the same GPU is included. If it sleeps meanwhile, the time while it is awake is the second moment.
    """
    parts = trainer_gib(sizes, config)
    generator = config.generator
    if not config.roles.colocated:
        return {TRAINS: parts}
    engine = generator.gpu_memory_utilization * gpu_gib
    if cache := generator.engine.get("kv_cache_memory_bytes"):
        held = sum(_engine_weights(sizes, config).values()) + cache
        engine = held / 2**30 + MARGIN_GIB  # for what vLLM computes with
    if not generator.sleep:
        return {TRAINS: parts | {"an engine": engine}}
    at_rest = {part: gib for part, gib in parts.items() if part in STAYING}
    for part, gib in parts.items():
        if part.endswith("moments"):  # an update leaves no gradients
            gradients = DTYPE_BYTES["float32"] * trained_parameters(sizes, config.trainer)
            without_gradients = 1 - gradients / trained_bytes(sizes, config.trainer)
            at_rest[part.replace(", gradients", "")] = gib * without_gradients
    return {TRAINS: parts, AWAKE: at_rest | {"an engine": engine}}


def trainer_gib(sizes: Sizes, config: Config) -> dict[str, float]:
    """Return the parts of a trainer rank's peak, GiB."""
    trainer = config.trainer
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    num_trainers = config.roles.num_trainers
    shards = num_trainers // trainer.data_replicas
    parts = {"weights, gradients and moments": trained_bytes(sizes, trainer) / shards}
    if trainer.lora_rank:
        frozen = dtype_bytes * sizes.parameters / shards
        parts = {"frozen weights": frozen, "adapters, gradients and moments": trained_bytes(sizes, trainer) / shards}
    else:
        # A block's exist in the compute dtype and in float32. The LM head's is summed over the chunks in float32.
        summed = (dtype_bytes + 4) * sizes.block_parameters + 4 * sizes.head_outputs * sizes.hf.hidden_size
        parts["gradients before they are shared out"] = summed / trainer.tensor_parallel
    parts |= _of_a_forward(sizes, config, num_trainers, trainer.tensor_parallel, trains=True)
    if config.reference_has_model and not config.roles.num_reference_ranks:
        reference_bytes = DTYPE_BYTES["float32"] if config.reference_moves else dtype_bytes
        parts["reference"] = reference_bytes * (sizes.reference or sizes).parameters / num_trainers
    if sizes.reward_model and not config.roles.num_reference_ranks:
        parts["reward model"] = dtype_bytes * sizes.reward_model.parameters / num_trainers
    return _in_gib(parts)


def reference_gib(sizes: Sizes, config: GRPOConfig) -> dict[str, float]:
    """Return the parts of the peak of a rank that only holds frozen models; GiB. One model computes at a time."""
    num_ranks = config.roles.num_reference_ranks
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    parts = {}
    forwards = []
    if config.needs_reference:
        reference = sizes.reference or sizes
        parts["weights"] = dtype_bytes * reference.parameters / num_ranks
        forwards.append(_of_a_forward(reference, config, num_ranks, config.reference_tensor_parallel, trains=False))
    if sizes.reward_model:
        parts["reward model"] = dtype_bytes * sizes.reward_model.parameters / num_ranks
        forwards.append(_of_a_forward(sizes.reward_model, config, num_ranks, tensor_parallel=1, trains=False))
    largest = max(forwards, key=lambda forward: sum(forward.values()))
    return _in_gib(parts | largest)


def _of_a_forward(
    sizes: Sizes,
    config: Config,
    num_ranks: int,
    tensor_parallel: int,
    trains: bool,
) -> dict[str, float]:
    """Return the bytes that a forward needs besides the model, by part; with `trains` also what the backward needs."""
    trainer = config.trainer
    hf = sizes.hf
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    tokens = largest_row(config)
    # FSDP gathers two blocks, the embeddings and the LM head in the compute dtype. Without other data-parallel ranks it
    # holds a copy of all weights, or is not used where they are held in that dtype already.
    gathered = sizes.parameters - (hf.num_hidden_layers - 2) * sizes.block_parameters
    if num_ranks == tensor_parallel:
        casts = trains and not trainer.lora_rank and config.model.dtype != "float32"
        gathered = sizes.parameters if casts else 0
    # Compiled, the product h W^T of a chunk exists, and its gradient. Otherwise three float32 tensors come on top.
    chunk_tokens = min(tokens, trainer.logprob_chunk_tokens)
    logits = chunk_tokens * (2 * dtype_bytes if trainer.compile else 3 * 4 + dtype_bytes)
    values = _values_at_work(sizes, tensor_parallel)
    if has_states(hf):  # one layer at a time computes with states
        values += RULE_BYTES / dtype_bytes * hf.linear_num_value_heads * hf.linear_value_head_dim
    if trains:
        values += hf.num_hidden_layers * _values_kept(sizes, trainer)
        has_frozen_head = trainer.lora_rank and tensor_parallel == 1
        if trainer.activation_checkpointing == "none" and not has_frozen_head:
            logits += (tokens - chunk_tokens) * dtype_bytes
    return {
        "gathered weights": dtype_bytes * gathered / tensor_parallel,
        "logits": logits * sizes.head_outputs / tensor_parallel,
        "activations": dtype_bytes * tokens * values / tensor_parallel,
    }


def largest_row(config: Config) -> int:
    """Return the most tokens that a micro-batch can have: `trainer.micro_batch_tokens`, or all of a small step.

    Held-out examples of SFT may fill a micro-batch after a small step.
    """
    limit = config.trainer.micro_batch_tokens
    if isinstance(config, GRPOConfig):
        return min(limit, config.completions_per_step * config.max_sequence_tokens)
    if config.validation.interval:
        return limit
    return min(limit, config.sequences_per_step * config.max_sequence_tokens)


def _values_at_work(sizes: Sizes, tensor_parallel: int) -> float:
    """Return how many values of each token a block computes and uses in its backward, on all tensor-parallel ranks.

    A block with states is not compiled. What its rule computes with states comes on top, once for all layers.
    """
    outputs = sum(linear.out_features for linear in sizes.linears.values())
    if has_experts(sizes.hf):
        # the output of an expert is in float32; of input and output every tensor-parallel rank has all
        of_an_expert = 2 * sizes.hf.moe_intermediate_size + 2 * sizes.hf.hidden_size * tensor_parallel
        outputs += sizes.hf.num_experts_per_tok * of_an_expert
    return (EAGER_VALUES if has_states(sizes.hf) else COMPILED_VALUES) * outputs


def _values_kept(sizes: Sizes, trainer: TrainerConfig) -> float:
    """Return how many values of each token a block keeps for its backward, on all tensor-parallel ranks."""
    if trainer.activation_checkpointing in ("none", "logits"):
        return _values_at_work(sizes, trainer.tensor_parallel)
    block_input = sizes.hf.hidden_size
    if trainer.activation_checkpointing == "full":
        return block_input
    # torchtitan computes every second product again, and all that go through adapters; experts too
    adapted = trainer.lora_targets if trainer.lora_rank and trainer.tensor_parallel == 1 else ()
    outputs = sum(linear.out_features for name, linear in sizes.linears.items() if name not in adapted)
    return block_input + sizes.linears["o_proj"].in_features + outputs / 2


def generator_gib(sizes: Sizes, config: GRPOConfig) -> dict[str, float]:
    """Return a generator rank's weights, and the KV cache of `generator.max_num_seqs` sequences of full length; GiB.

    With less cache than that, vLLM runs fewer sequences at once.
    """
    num_asked = math.ceil(config.completions_at_once / max(1, config.num_engines))
    cache = min(config.generator.max_num_seqs, num_asked) * _cache_of_a_sequence(sizes, config)
    return _in_gib(_engine_weights(sizes, config) | {"KV cache, if all run at full length": cache})


def fit_engine(
    sizes: Sizes,
    config: Config,
    num_asked: int,
    gpu_gib: float | None,
) -> Config:
    """Return the config with vLLM's `max_num_seqs` and its cache decided where `generator.engine` does not say them.

    `max_num_seqs` becomes `num_asked`, the sequences that one engine gets at one time, up to MOST_NUM_SEQS; above
    MAX_NUM_SEQS only as many as the KV cache holds at half of their longest length. Sequences that grow together need
    less, unless most of them run to the limit. Then vLLM puts some off and computes them again.

    The cache holds these sequences at full length: on a CPU up to MOST_CPU_KV_CACHE_GIB, and two in any case; on a GPU
    if that is at most SMALL_CACHE_FRAC of the room for it and nothing else is cached. Otherwise vLLM takes all of that
    room. gpu_gib: of a GPU; None for a CPU.
    """
    generator = config.generator
    engine = dict(generator.engine)
    cache_of_one = _cache_of_a_sequence(sizes, config)
    if gpu_gib is None:
        most = max(MOST_CPU_KV_CACHE_GIB * 2**30, 2 * cache_of_one)
        cache = max(CPU_KV_CACHE_GIB * 2**30, min(most, num_asked * cache_of_one))
        engine.setdefault("kv_cache_memory_bytes", int(cache))
    else:
        cache = (generator.gpu_memory_utilization * gpu_gib - MARGIN_GIB) * 2**30
        cache -= sum(_engine_weights(sizes, config).values())
    cache = engine.get("kv_cache_memory_bytes", cache)
    number = min(num_asked, MOST_NUM_SEQS, max(MAX_NUM_SEQS, int(2 * cache / cache_of_one)))
    num_tokens = engine.get("max_num_batched_tokens")
    if isinstance(num_tokens, int):  # of all sequences together in a step of the engine
        number = min(number, num_tokens)
    number = engine.setdefault("max_num_seqs", max(1, number))
    needed = max(LEAST_KV_CACHE_GIB * 2**30, number * cache_of_one)
    if gpu_gib is not None and needed <= SMALL_CACHE_FRAC * cache and _caches_sequences_alone(sizes, config):
        engine.setdefault("kv_cache_memory_bytes", int(needed))
    return replace(config, generator=replace(generator, engine=engine))


def _caches_sequences_alone(sizes: Sizes, config: Config) -> bool:
    """Return whether an engine's cache has nothing but the tokens of its running sequences, all of each.

    Layers with windows or states share blocks of another size; drafts come from a model of their own; a conversation's
    tokens stay in the cache while a tool works.
    """
    if isinstance(config, GRPOConfig) and config.environment.enabled:
        return False
    if has_states(sizes.hf) or any(window is not None for window in windows_of(sizes.hf)):
        return False
    return not any(name.startswith("spec") or name == "num_gpu_blocks_override" for name in config.generator.engine)


def num_adapter_parameters(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Count the weights of LoRA's adapters: rank x (inputs + outputs) for each layer that has one."""
    adapted = [linear for name, linear in sizes.linears.items() if name in trainer.lora_targets]
    return (
        sizes.hf.num_hidden_layers
        * trainer.lora_rank
        * sum(linear.in_features + linear.out_features for linear in adapted)
    )


def _cache_of_a_sequence(sizes: Sizes, config: Config) -> float:
    """Return the bytes of the keys, values and states of one sequence of full length, on one rank of an engine."""
    generator = config.generator
    num_tokens = config.data.max_prompt_tokens + generator.max_completion_tokens
    values_of_a_token = sizes.linears["k_proj"].out_features + sizes.linears["v_proj"].out_features
    windows = windows_of(sizes.hf)
    num_kept = sum(num_tokens if window is None else min(num_tokens, window) for window in windows)  # in all layers
    states = DTYPE_BYTES["float32"] * state_values(sizes.hf)
    return (DTYPE_BYTES[config.model.dtype] * values_of_a_token * num_kept + states) / generator.tensor_parallel


def _engine_weights(sizes: Sizes, config: Config) -> dict[str, float]:
    """Return the bytes of the weights on one rank of an engine, by part."""
    return {"weights": DTYPE_BYTES[config.model.dtype] * sizes.parameters / config.generator.tensor_parallel}


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {part: size / 2**30 for part, size in parts.items()}
