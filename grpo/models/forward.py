"""A step's batch through a sharded model, micro-batch by micro-batch: what trainer and reference have in common."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from grpo.config import TrainerConfig
from grpo.data.batches import take_out
from grpo.data.packing import Packing, pack
from grpo.models.build import ShardedModel
from grpo.types import MicroBatch, SharedPrompts, TrainBatch

# Row lengths are rounded up to this many tokens. On GPU: flex attention's blocks are 128 wide, and few distinct lengths
# mean few recompilations. Any multiple suits the CPU; 16 divides over tensor-parallel ranks.
ROW_MULTIPLE = {"cuda": 512, "cpu": 16}


def pack_for(model: ShardedModel, batch: TrainBatch, trainer: TrainerConfig) -> Packing:
    """The batch in rows for the model's data-parallel ranks, the same on each of them."""
    multiple = ROW_MULTIPLE[model.device.type]
    return pack(batch, model.num_data_ranks, trainer.micro_batch_tokens, multiple, trainer.share_prompts)


def micro_batches(packing: Packing, model: ShardedModel) -> Iterator[tuple[MicroBatch, bool]]:
    """This rank's micro-batches, on its device, which is not waited for; each with whether it is the last.

    The next one is laid out before one is handed out: for all but the first two, while the device is busy.
    """
    laid_out = (
        MicroBatch(**{name: _on_device(value, model.device) for name, value in vars(micro).items()})
        for micro in packing.micro_batches(model.data_rank)
    )
    micro = next(laid_out)
    for following in laid_out:
        yield micro, False
        micro = following
    yield micro, True


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, SharedPrompts):
        return SharedPrompts(*(_on_device(part, device) for part in value))
    if not isinstance(value, torch.Tensor):
        return value
    if device.type == "cuda":  # from memory that may be swapped out, a copy waits for all that was launched before
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


@torch.no_grad()
def token_logprobs(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> torch.Tensor:
    """Log-probs of this rank's part of the tokens: float32 [N] on the CPU, 0 where other ranks fill in.

    Summed over the role's ranks (tensor-parallel ranks fill in once) it is the whole batch's, of the tokens that count
    in the loss; of others it may be 0. Collective over the role.
    """
    logprobs_N = torch.zeros(batch.num_tokens)
    packing = pack_for(model, batch, trainer)
    found = [(micro, model.logprobs(micro)[0]) for micro, _ in micro_batches(packing, model)]
    for micro, logprobs_BT in found if model.tensor_parallel_rank == 0 else ():
        index_M, logprobs_M = take_out(logprobs_BT, micro)
        logprobs_N[index_M.cpu()] = logprobs_M.cpu()
    forget_forwards(model.module)
    return logprobs_N


def forget_forwards(module: torch.nn.Module) -> None:
    """After forwards without a backward: drop what FSDP noted of them for it, and would forget only in it.

    Else the memory of a reference grows, by some 40 bytes for each of its blocks and micro-batches.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            for group in state._fsdp_param_groups:
                group._post_forward_indices.clear()
