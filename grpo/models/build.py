"""A Hugging Face folder as a sharded torchtitan model with its weights, and a step's batch through it.

Left out: pipeline parallelism, quantized checkpoints.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.utils import set_default_dtype

from grpo.config import ModelConfig, TrainerConfig
from grpo.config.fields import MICRO_BATCH_TOKENS
from grpo.data.layout import Layout, plan, take_out
from grpo.models.attention import (
    CheckpointingOfSpreadExperts,
    SelectiveCheckpointing,
    allow_any_length,
    choose_attention,
)
from grpo.models.blocks import NormedBlock, set_norm_shardings
from grpo.models.context import share_rows
from grpo.models.experts import ExpertsReader, local_part
from grpo.models.families import Policy, family_of, has_experts, has_states, titan_config
from grpo.models.hf_folder import read_hf_config
from grpo.models.lora import adapted_paths, add_adapters, is_adapter
from grpo.models.muon import Optimizers, muon_group
from grpo.types import MicroBatch, TrainBatch

# A run decides what is "auto" before it builds a model, if grpo/features/machine is there.
CHECKPOINTING_OF_BLOCKS = {
    "none": None,
    "logits": None,
    "selective": SelectiveCheckpointing.Config(),
    "auto": SelectiveCheckpointing.Config(),
    "full": FullAC.Config(),
}
# Row lengths are rounded up to this many tokens. On GPU: flex attention's blocks are 128 wide, and few distinct lengths
# mean few recompilations. Any multiple suits the CPU; 16 divides over tensor-parallel ranks.
ROW_MULTIPLE = {"cuda": 512, "cpu": 16}


@dataclass
class ShardedModel:
    """A model spread over this role's ranks, and what is needed to move weights between it and HF names."""

    module: nn.Module
    names: StateDictAdapter
    """From torchtitan's names of tensors to Hugging Face's."""
    parallel_dims: ParallelDims
    trainer: TrainerConfig
    """How rows are packed."""
    device: torch.device
    folder: str
    """Hugging Face folder the weights came from."""
    name: str
    """The folder's hub name, if it has one, else the folder."""
    holds_copy: bool = False
    """Whether FSDP keeps its copy of the parameters in the compute dtype from one forward or backward to the next.

    So it does where a rank has the whole layers, unless most weights are frozen (LoRA).
    """

    @property
    def data_ranks(self) -> dist.ProcessGroup | None:
        """Group of the data-parallel ranks, which share a batch out; None if there is only one."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        if mesh is None or mesh.size() == 1:
            return None
        return mesh.get_group()

    def rank_among(self, mesh: str) -> int:
        """Return this rank's index among those that share out a batch ("batch"), a row ("cp") or a layer ("tp")."""
        ranks = self.parallel_dims.get_optional_mesh(mesh)
        return ranks.get_local_rank() if ranks else 0

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, sharded: all parameters, or with LoRA those of the adapters."""
        state = self.module.state_dict()
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        return adapters or state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Undo `state_dict`."""
        self.module.load_state_dict(self.module.state_dict() | state)

    @torch.no_grad()
    def move_towards(self, other: "ShardedModel", share: float) -> None:
        """Make each weight (1 - share) x itself + share x that of the other model, which is sharded alike."""
        pairs = zip(self.module.parameters(), other.module.parameters(), strict=True)
        for weight, new in pairs:
            local_part(weight).lerp_(local_part(new), share)

    def lay_out(self, batch: TrainBatch) -> tuple[Layout, Iterator[tuple[MicroBatch, bool]]]:
        """Lay a batch out in rows for the data-parallel ranks, and write this rank's micro-batches, one at a time.

        Each comes on the rank's device, with whether it is the last. The layout is the same on all ranks. A model with
        states shares no prompts. "auto" rows, which only a run decides, are as long as they may become.
        """
        max_tokens = self.trainer.micro_batch_tokens
        if max_tokens == "auto":
            max_tokens = max(MICRO_BATCH_TOKENS, int(batch.lengths_S.max()))
        layout = plan(
            batch,
            num_ranks=self.data_ranks.size() if self.data_ranks else 1,
            max_tokens=max_tokens,
            multiple=ROW_MULTIPLE[self.device.type],
            share_prompts=self.trainer.share_prompts and 0 not in self.module.config.windows,
            num_stretches=self.parallel_dims.cp,
        )
        return layout, self._written(layout)

    def accumulate(self, is_last: bool) -> None:
        """Say before a micro-batch whether it is the last one before the gradients are used.

        If FSDP holds a copy of the weights, it adds up the copy's gradients in float32 until the last micro-batch.
        Replicas send each other their sums during the last one's backward.
        """
        if self.holds_copy:
            self.module.set_requires_gradient_sync(is_last)
        elif isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(is_last)

    def drop_copy(self) -> None:
        """Free the weights that FSDP gathered or cast for these forwards and backwards, including the LM head."""
        for submodule in self.module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()

    def _written(self, layout: Layout) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's micro-batches on its device, and whether each is the last. Does not wait for the device.

        Each is written when it is asked for, while the device computes with the one before it.
        """
        rank = self.rank_among("batch")
        num_left = len(layout.rows[rank])
        for micro in layout.micro_batches(rank, self.rank_among("cp")):
            num_left -= 1
            fields = tree_map_only(Tensor, partial(_on_device, device=self.device), vars(micro))
            yield MicroBatch(**fields), not num_left

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (logprobs_BT, entropy_BT) of a micro-batch's targets, float32, nats, at their sampling temperatures.

        They are 0 without a gradient at places that are not in the micro-batch's `scored_M`. The micro-batch lies on
        this rank's device. Collective over the role's ranks.
        """
        return self.module(micro)

    @torch.no_grad()
    def token_logprobs(self, batch: TrainBatch) -> Tensor:
        """Return log-probs of this rank's part of the tokens: float32 [N] on the CPU, 0 for other ranks' tokens.

        The sum over the role's ranks has the whole batch's, once for all ranks that share a row or a layer. Tokens that
        do not count in the loss may have 0. Collective over the role's ranks.
        """
        logprobs_N = torch.zeros(batch.num_tokens)
        _, micro_batches = self.lay_out(batch)
        # all forwards are launched before the first result is read, which waits for the device
        results = []
        for micro, _ in micro_batches:
            logprobs_BT, _ = self.logprobs(micro)
            results.append((micro, logprobs_BT))
        if self.rank_among("tp") == self.rank_among("cp") == 0:
            for micro, logprobs_BT in results:
                index_L, logprobs_L = take_out(logprobs_BT, micro)
                logprobs_N[index_L.cpu()] = logprobs_L.cpu()
        forget_forwards(self.module)
        self.drop_copy()
        return logprobs_N

    def clip_gradients(self, max_norm: float) -> float:
        """Scale gradients down to a global norm of at most `max_norm`; returns the norm before.

        Collective over the role's ranks.
        """
        parameters = list(self.module.parameters())
        ep_enabled = self.parallel_dims.ep_enabled  # then experts' norms are summed over ranks of their own
        norm = titan_dist.clip_grad_norm_(
            parameters,
            max_norm,
            foreach=True,
            ep_enabled=ep_enabled,
        )
        return float(norm)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":  # from memory that may be swapped out, a copy waits for all that was launched before
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def forget_forwards(module: nn.Module) -> None:
    """Drop FSDP's notes about forwards that have no backward, as a reference's.

    Otherwise its memory grows by some 40 bytes for each block and micro-batch.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            state = submodule._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()


def compiles(trainer: TrainerConfig, device: torch.device) -> bool:
    """Say whether blocks and LM head are compiled: on GPUs, unless the recipe says no."""
    return trainer.compile and device.type == "cuda"


def build_model(
    model: ModelConfig,
    trainer: TrainerConfig,
    folder: str,
    *,
    device: torch.device,
    tensor_parallel: int,
    frozen: bool = False,
    moves: bool = False,
    scores: bool = False,
    seed: int = 0,
) -> ShardedModel:
    """Shard a Hugging Face folder's model over the default process group and load its weights.

    A trained model keeps float32 master weights; a frozen one holds `model.dtype`, no gradients and no replicas, and
    each rank takes its rows alone. With `moves` it holds float32, so that a small move is not rounded away. With LoRA,
    weights are held in `model.dtype` without gradients, and adapters in float32 with them, which start from `seed`.
    With `scores`, `logprobs` are a reward model's scores. Collective over the role's ranks.
    """
    adapted = trainer.lora_rank > 0 and not frozen
    # spmd_types, torchtitan's default, fails for more than one rank on this torch
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        tensor_parallel_degree=tensor_parallel,
        data_parallel_replicate_degree=1 if frozen else trainer.data_replicas,
        expert_parallel_degree=1 if frozen else trainer.expert_parallel,
    )
    context_parallel = 1 if frozen else trainer.context_parallel
    keeps_dtype = adapted or (frozen and not moves)
    training = TrainingConfig(
        dtype=model.dtype if keeps_dtype else "float32",
        mixed_precision_param=model.dtype,
    )
    titan_dist.set_spmd_backend(parallelism.spmd_backend)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own start would, which an existing group skips

    hf = read_hf_config(folder, scores)
    compiled = compiles(trainer, device)
    keep_logits = trainer.activation_checkpointing == "none" and not frozen
    attention = choose_attention(model, device)
    config = titan_config(
        hf,
        attention,
        trainer.logprob_chunk_tokens,
        compiled,
        keep_logits,
    )
    if not has_states(hf):  # those are never tensor-parallel
        _set_shardings(config, parallelism, training)
    with torch.device("meta"), set_default_dtype(getattr(torch, training.dtype)):
        module = config.build()
        if adapted:
            add_adapters(module, adapted_paths(hf, trainer), trainer, seed)

    # torchtitan has context parallelism of its own, which knows no documents: it hears of more data-parallel ranks
    parallel_dims = ParallelDims.from_config(
        replace(parallelism, context_parallel_degree=context_parallel),
        dist.get_world_size(),
    )
    if context_parallel > 1:
        share_rows(module, parallel_dims.get_mesh("cp").get_group())
    # Without other such ranks there is nothing to gather; then FSDP only casts, and what needs no cast needs no FSDP,
    # which would hold all weights a second time. Replicas of one rank gather nothing either, and add up gradients.
    alone = parallel_dims.get_optional_mesh("loss") is None
    whole = parallel_dims.dp_shard * parallel_dims.cp == 1
    titan_dims = copy.copy(parallel_dims)
    titan_dims.cp = 1
    casts = model.dtype != training.dtype
    # The loop over chunks of states has another length in each row, and would be compiled each time. Plain attention
    # makes tensors of lengths that are in a tensor, which torch cannot compile.
    compiles_blocks = compiled and not has_states(hf) and attention != "documents"
    if compiles_blocks and has_experts(hf) and model.dtype == "float32":  # torch 2.13 cannot
        raise ValueError(
            "experts are compiled in bfloat16 alone, and model.dtype is float32; take --trainer.no-compile or "
            "--model.dtype bfloat16"
        )
    checkpointing = None if frozen else CHECKPOINTING_OF_BLOCKS[trainer.activation_checkpointing]
    if parallel_dims.ep_enabled and isinstance(checkpointing, SelectiveCheckpointing.Config):
        checkpointing = CheckpointingOfSpreadExperts.Config()
    module = parallelize_qwen3(
        module,
        parallel_dims=titan_dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiles_blocks, components=["model"]),
        ac_config=checkpointing,
        dump_folder="",
        skip_dp=alone and not casts,
    )
    holds_copy = whole and not adapted and (casts or not alone)
    if holds_copy:  # otherwise each forward and backward would cast, or copy, all weights again
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
    if compiles_blocks and attention == "flash":
        for block in module.layers.values():
            block.register_forward_pre_hook(allow_any_length)
    names = family_of(hf).names(config)
    _load_weights(module, names, folder, device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name) if adapted else not frozen)
    name = folder if model.is_built else model.path
    return ShardedModel(
        module,
        names,
        parallel_dims,
        trainer,
        device,
        folder,
        name,
        holds_copy,
    )


def _set_shardings(
    config: Policy.Config,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
) -> None:
    """Let torchtitan write into a model's config how each of its submodules is sharded."""
    titan = SimpleNamespace(parallelism=parallelism, training=training, debug=DebugConfig())
    config.update_from_config(config=titan)
    for block in config.layers:
        if isinstance(block, NormedBlock.Config):
            set_norm_shardings(block)
    if parallelism.tensor_parallel_degree > 1:  # LogprobHead reduces over the vocabulary itself
        states = config.lm_head.sharding_config.state_shardings
        config.lm_head.sharding_config = ShardingConfig(state_shardings=states)


def _load_weights(
    module: nn.Module,
    names: StateDictAdapter,
    folder: str,
    device: torch.device,
) -> None:
    """Give a sharded module on the meta device memory and the folder's weights. Collective over the role's ranks."""
    for submodule in module.modules():
        if device.type == "cpu" and isinstance(submodule, FSDPModule):
            submodule.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    ropes: dict[tuple, nn.Module] = {}
    for attention in list(module.modules()):
        if isinstance(attention, GQAttention):
            # before they have memory: tables of 131,072 positions for each of 28 layers are 3.5 GiB
            config = attention.rope.config
            attention.rope = ropes.setdefault((config.inv_freq, config.attention_factor), attention.rope)
    module.to_empty(device=device)
    with torch.no_grad():
        module.init_weights(buffer_device=None)
    tensors = names.to_hf(module.state_dict())
    dcp.load(tensors, storage_reader=ExpertsReader(folder))  # into the module's own memory


def _cast_moments(dtype: torch.dtype, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].to(dtype)


def build_optimizer(
    model: ShardedModel,
    trainer: TrainerConfig,
    num_steps: int,
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """Build `trainer.optimizer` over the parameters that have a gradient, and the learning rate over `num_steps` steps.

    Between updates AdamW's moments are in `trainer.moments`; its updates compute in float32.
    """
    adamw = default_adamw(
        lr=trainer.learning_rate,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
    )
    adamw.implementation = "fused"  # foreach takes five times as long on a CPU, and memory for its temporaries
    if trainer.moments == "bfloat16":
        adamw.implementation = "fused_opt_states_bf16"
    if trainer.optimizer == "muon":
        adamw.param_groups.insert(0, muon_group(trainer))
    optimizer = Optimizers(adamw, model_parts=[model.module])
    if trainer.moments == "bfloat16":
        for torch_optimizer in optimizer:
            # torch loads moments in the dtype of the weights, and its CPU kernel takes no other dtype
            torch_optimizer.register_load_state_dict_post_hook(partial(_cast_moments, torch.bfloat16))
            if model.device.type == "cpu":
                torch_optimizer.register_step_pre_hook(partial(_cast_moments, torch.float32))
                torch_optimizer.register_step_post_hook(partial(_cast_moments, torch.bfloat16))
    optimizer.make_moments(getattr(torch, trainer.moments))
    constant = trainer.schedule == "constant"
    schedule = LRSchedulersContainer.Config(
        warmup_steps=trainer.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else trainer.schedule,
        min_lr_factor=trainer.min_lr_ratio,
    )
    # in a run that ends before its warm-up does, torchtitan would make that as short as the run
    return optimizer, schedule.build(optimizers=optimizer, training_steps=max(num_steps, trainer.warmup_steps))
