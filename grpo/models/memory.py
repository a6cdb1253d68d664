"""GPU memory of each role by arithmetic, from the model's config.json and the run's config alone; nothing is loaded.

Weights and layers are counted on the model's own module, without memory for them (torch's meta device). The sizes are
those of the largest moment; what was measured in configs/RESULTS.md is within 15 % of what comes out
(tests/unit/models/test_memory.py). Left out: what the allocator wastes, NCCL's buffers and CUDA graphs, together a few
GiB.
"""

import math
from dataclasses import dataclass, replace
from operator import sub

import transformers
from torch import nn

from grpo.config import GRPOConfig, SFTConfig, TrainerConfig
from grpo.config.fields import MAX_NUM_SEQS, MOST_NUM_SEQS, Config
from grpo.models.experts import MixtureBlock
from grpo.models.families import empty_policy, family_of

# Of an engine on a CPU
CPU_KV_CACHE_GIB = 1 / 16
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# Of the arithmetic and of a GPU, for what the arithmetic leaves out
MARGIN_FRAC, MARGIN_GIB = 0.05, 3.0
# What a trainer rank holds besides weights with moments while an engine samples
STAYING = ("frozen weights", "reference", "reward model")
# Moments of a trainer rank
TRAINS, AWAKE = "while it trains", "while the engine is awake"
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
    head: nn.Module
    """The LM head, on the meta device; its weight is [V, D]."""
    routed: tuple[int, int, int]
    """Experts that a token goes to in each block, their width, and the number of all; zeros without experts."""
    reward_model: "Sizes | None" = None
    """The parts of the model that scores it."""


def sizes_of(hf: transformers.PretrainedConfig, reward_model: transformers.PretrainedConfig | None = None) -> Sizes:
    """Count a model's parts on its module, and a reward model's, if there is one."""
    module, places = empty_policy(hf), family_of(hf).linears
    blocks = list(module.layers.values())
    return Sizes(
        parameters=_numel(module),
        blocks=[_numel(block) for block in blocks],
        linears=[{name: block.get_submodule(place) for name, place in places.items()} for block in blocks],
        head=module.lm_head,
        routed=_routed(blocks[0]),
        reward_model=sizes_of(reward_model) if reward_model else None,
    )


def _routed(block: nn.Module) -> tuple[int, int, int]:
    if not isinstance(block, MixtureBlock):
        return 0, 0, 0
    num_experts, width, _ = block.moe.routed_experts.inner_experts.w1_EFD.shape
    return block.moe.router.top_k, width, num_experts


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def state_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes of a trained parameter: float32 weight and gradient, and AdamW's two moments."""
    return 4 + 4 + 2 * DTYPE_BYTES[trainer.moments]


def fit_trainer(sizes: Sizes, config: Config, gpu_gib: float | None) -> Config:
    """Return the config with `trainer.activation_checkpointing` decided if it is "auto".

    It becomes the first of CHECKPOINTING with which the peak fits a GPU of `gpu_gib`, with a margin; the last if none
    does; the first on a CPU, for which `gpu_gib` is None.
    """
    if config.trainer.activation_checkpointing != "auto":
        return config
    for kind in CHECKPOINTING:
        decided = replace(config, trainer=replace(config.trainer, activation_checkpointing=kind))
        if gpu_gib is None or trainer_peak(sizes, decided, gpu_gib) * (1 + MARGIN_FRAC) + MARGIN_GIB <= gpu_gib:
            break
    return decided


def trainer_peak(sizes: Sizes, config: GRPOConfig | SFTConfig, gpu_gib: float) -> float:
    """Return the most that a trainer rank's GPU of `gpu_gib` holds at one time, with an engine that shares it; GiB."""
    return max(sum(parts.values()) for parts in trainer_moments(sizes, config, gpu_gib).values())


def trainer_moments(sizes: Sizes, config: GRPOConfig | SFTConfig, gpu_gib: float) -> dict[str, dict[str, float]]:
    """Return what a trainer rank's GPU of `gpu_gib` holds while it trains; GiB, by part.

    An engine on the same GPU is there too. If it sleeps meanwhile, the time while it is awake is the second moment.
    """
    parts, generator = trainer_gib(sizes, config), config.generator
    if not config.roles.colocated:
        return {TRAINS: parts}
    engine = generator.gpu_memory_utilization * gpu_gib
    if cache := generator.engine.get("kv_cache_memory_bytes"):
        engine = (_engine_weights(sizes, config) + cache) / 2**30
    if not generator.sleep:
        return {TRAINS: parts | {"an engine": engine}}
    at_rest = {part: gib for part, gib in parts.items() if part in STAYING}
    for part, gib in parts.items():
        if part.endswith("moments"):  # an update leaves no gradients
            without_gradients = 1 - DTYPE_BYTES["float32"] / state_bytes(config.trainer)
            at_rest[part.replace(", gradients", "")] = gib * without_gradients
    return {TRAINS: parts, AWAKE: at_rest | {"an engine": engine}}


def trainer_gib(sizes: Sizes, config: GRPOConfig | SFTConfig) -> dict[str, float]:
    """Return the parts of a trainer rank's peak, GiB.

    It is reached in the backward of a full micro-batch, when all activations are there and, from the second micro-batch
    on, all gradients: in the LM head's, or in that of the last block, if that takes more, as mixtures of experts may.
    """
    trainer, roles, dtype_bytes = config.trainer, config.roles, DTYPE_BYTES[config.model.dtype]
    shards = roles.num_trainers // trainer.data_replicas
    if trainer.lora_rank:
        adapters = state_bytes(trainer) * num_adapter_parameters(sizes, trainer) / shards
        frozen = dtype_bytes * sizes.parameters / shards
        states = {"frozen weights": frozen, "adapters, gradients and moments": adapters}
    else:
        states = {"weights, gradients and moments": state_bytes(trainer) * sizes.parameters / shards}
    activations = dtype_bytes * trainer.micro_batch_tokens * _saved_values(sizes, config) / trainer.tensor_parallel
    parts = {
        **states,
        **_of_a_forward(sizes, config, roles.num_trainers, trainer.tensor_parallel, trains=True),
        "activations": activations,
    }
    if config.reference_has_model and not roles.num_reference_ranks:
        parts["reference"] = dtype_bytes * sizes.parameters / roles.num_trainers
    if sizes.reward_model and not roles.num_reference_ranks:
        parts["reward model"] = dtype_bytes * sizes.reward_model.parameters / roles.num_trainers
    return _gib(parts)


def reference_gib(sizes: Sizes, config: GRPOConfig) -> dict[str, float]:
    """Return the parts of the peak of a rank that only holds frozen models; GiB.

    The reference is taken to be of the policy's size. One model computes at a time.
    """
    num_references, models = config.roles.num_references, {}
    if config.needs_reference:
        models["weights"] = sizes, config.reference_tensor_parallel
    if sizes.reward_model:
        models["reward model"] = sizes.reward_model, 1
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    weights = {name: dtype_bytes * of.parameters / num_references for name, (of, _) in models.items()}
    forwards = [_of_a_forward(of, config, num_references, ranks) for of, ranks in models.values()]
    return _gib(weights | max(forwards, key=lambda parts: sum(parts.values())))


def generator_gib(sizes: Sizes, config: GRPOConfig) -> dict[str, float]:
    """Return a generator rank's weights, and the KV cache of `generator.max_num_seqs` sequences of full length; GiB.

    With less cache than that, vLLM runs fewer sequences at once.
    """
    num_asked = math.ceil(config.completions_at_once / max(1, config.num_engines))
    cache = min(config.generator.max_num_seqs, num_asked) * _cache_of_a_sequence(sizes, config)
    return _gib({"weights": _engine_weights(sizes, config), "KV cache, if all run at full length": cache})


def fit_engine(sizes: Sizes, config: Config, num_asked: int, gpu_gib: float | None) -> Config:
    """Return the config with vLLM's `max_num_seqs` decided, if `generator.engine` does not say it.

    It becomes `num_asked`, the sequences that one engine gets at one time, up to MOST_NUM_SEQS; above MAX_NUM_SEQS only
    as many as the KV cache holds at half of their longest length. Sequences that grow together need less, unless most
    of them run to the limit. Then vLLM puts some off and computes them again. gpu_gib: of a GPU; None for a CPU.
    """
    generator = config.generator
    if "max_num_seqs" in generator.engine:
        return config
    cache = CPU_KV_CACHE_GIB * 2**30
    if gpu_gib is not None:
        cache = (generator.gpu_memory_utilization * gpu_gib - MARGIN_GIB) * 2**30 - _engine_weights(sizes, config)
    cache = generator.engine.get("kv_cache_memory_bytes", cache)
    num_with_room = int(2 * cache / _cache_of_a_sequence(sizes, config))
    number = min(num_asked, MOST_NUM_SEQS, max(MAX_NUM_SEQS, num_with_room))
    num_tokens = generator.engine.get("max_num_batched_tokens")
    if isinstance(num_tokens, int):  # of all sequences together in a step of the engine
        number = min(number, num_tokens)
    engine = {**generator.engine, "max_num_seqs": max(1, number)}
    return replace(config, generator=replace(generator, engine=engine))


def num_adapter_parameters(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Count the weights of LoRA's adapters: rank x (inputs + outputs) for each layer that has one."""
    adapted = [block[name] for block in sizes.linears for name in trainer.lora_targets if name in block]
    return trainer.lora_rank * sum(linear.in_features + linear.out_features for linear in adapted)


def _cache_of_a_sequence(sizes: Sizes, config: Config) -> float:
    """Bytes of the keys and values of one sequence of full length, on one rank of an engine."""
    generator = config.generator
    num_tokens = config.data.max_prompt_tokens + generator.max_completion_tokens
    values_of_a_token = sum(block[name].out_features for block in sizes.linears for name in ("k_proj", "v_proj"))
    return DTYPE_BYTES[config.model.dtype] * values_of_a_token * num_tokens / generator.tensor_parallel


def _engine_weights(sizes: Sizes, config: GRPOConfig | SFTConfig) -> float:
    """Bytes of the weights on one rank of an engine."""
    return DTYPE_BYTES[config.model.dtype] * sizes.parameters / config.generator.tensor_parallel


def _of_a_forward(
    sizes: Sizes, config: GRPOConfig | SFTConfig, num_ranks: int, tensor_parallel: int, trains: bool = False
) -> dict[str, float]:
    """Bytes of what a forward needs besides activations, and with `trains` the LM head's backward."""
    trainer, dtype_bytes, head = config.trainer, DTYPE_BYTES[config.model.dtype], sizes.head.weight
    # FSDP gathers two blocks at a time, and the embeddings and the LM head, in the compute dtype. Without other
    # data-parallel ranks it holds a copy of all weights, and is not used where they are held in that dtype already.
    trains_head = trains and not trainer.lora_rank
    gathered = 2 * max(sizes.blocks) + sizes.parameters - sum(sizes.blocks)
    if num_ranks == tensor_parallel:
        casts = trains_head and config.model.dtype != "float32"  # the master weights' dtype
        gathered = sizes.parameters if casts else 0
    vocab_size, chunk_tokens = len(head), min(trainer.micro_batch_tokens, trainer.logprob_chunk_tokens)
    # Compiled, float32 values exist only in registers: the product h W^T is there and, when trained, its gradient.
    # Otherwise three float32 tensors come on top of the product.
    bytes_of_a_logit = dtype_bytes * (2 if trains else 1) if trainer.compile else 3 * 4 + dtype_bytes
    logits = bytes_of_a_logit * chunk_tokens * vocab_size
    parts = {"logits of a chunk": logits}
    if (trains_head or (trains and tensor_parallel > 1)) and trainer.activation_checkpointing == "none":
        others = trainer.micro_batch_tokens - chunk_tokens
        parts["logits of other chunks"] = dtype_bytes * others * vocab_size
    if trains_head:  # summed over the chunks in float32
        parts["gradient of the LM head"] = 4 * head.numel()
    block = _of_a_block(sizes, config, tensor_parallel, trains)
    if block > sum(parts.values()):  # when the head is not at work
        parts = {"a block at work": block}
    parts = {"gathered weights": dtype_bytes * gathered} | parts
    return {part: size / tensor_parallel for part, size in parts.items()}


def _of_a_block(sizes: Sizes, config: GRPOConfig | SFTConfig, tensor_parallel: int, trains: bool) -> float:
    """Bytes that a block's backward, or a frozen one's forward, has for a while; on all tensor-parallel ranks."""
    trainer, dtype_bytes = config.trainer, DTYPE_BYTES[config.model.dtype]
    row = sizes.routed[0] * sizes.head.in_features * tensor_parallel  # which each rank has whole
    if not trains:  # input, output and scored output in the compute dtype, and twice in float32
        return trainer.micro_batch_tokens * row * (3 * dtype_bytes + 2 * 4)
    whole, recomputing = _values_of_blocks(sizes, config)
    again = max(map(sub, whole, recomputing)) if trainer.activation_checkpointing == "selective" else 0
    # scored rows have three gradients in float32; weights theirs in the compute dtype, and in float32 to be summed
    weights = (dtype_bytes + 4) * max(sizes.blocks) if not trainer.lora_rank else 0
    return weights + trainer.micro_batch_tokens * (dtype_bytes * again + 3 * 4 * row)


def _saved_values(sizes: Sizes, config: GRPOConfig | SFTConfig) -> float:
    """Values that the backward keeps for each token, over all blocks."""
    whole, recomputing = _values_of_blocks(sizes, config)
    if config.trainer.activation_checkpointing == "full":  # of the block at hand all is there
        return sum(linears["q_proj"].in_features for linears in sizes.linears) + max(whole)
    return sum(whole if config.trainer.activation_checkpointing in ("none", "logits") else recomputing)


def _values_of_blocks(sizes: Sizes, config: GRPOConfig | SFTConfig) -> tuple[list[float], list[float]]:
    """Values that each block keeps for a token: all that its backward uses, and those of selective checkpointing."""
    trainer, whole, recomputing = config.trainer, [], []
    chosen, width, num_experts = sizes.routed
    float32 = 4 / DTYPE_BYTES[config.model.dtype]
    for linears in sizes.linears:
        outputs = {name: linear.out_features for name, linear in linears.items()}
        block_input, attention_output = linears["q_proj"].in_features, linears["o_proj"].in_features
        # block input and the sum after attention; the products q, k, v, gate, up; rotated queries and keys, attention's
        # output, SwiGLU's activation and product. Compiled code computes the two norms' outputs again.
        norms = 0 if trainer.compile else 2 * block_input
        rotated = outputs["q_proj"] + outputs["k_proj"]
        activated = 4 * outputs.get("gate_proj", 0)
        # an expert's input, which is there for each expert of a token, and its output in float32; the router's scores.
        # With selective checkpointing all of it is computed again.
        rows = chosen * ((1 + float32) * block_input * trainer.tensor_parallel + 4 * width) + float32 * num_experts
        whole.append(2 * block_input + 2 * rotated + outputs["v_proj"] + attention_output + activated + norms + rows)
        # torchtitan recomputes every second product, of those without a bias, and all that go through adapters
        if trainer.lora_rank and trainer.tensor_parallel == 1:
            outputs = {name: size for name, size in outputs.items() if name not in trainer.lora_targets}
        plain = [size for name, size in outputs.items() if linears[name].bias is None]
        saved = sum(plain[::2]) + sum(size for name, size in outputs.items() if linears[name].bias is not None)
        recomputing.append(saved + attention_output + block_input)
    return whole, recomputing


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {part: size / 2**30 for part, size in parts.items()}
