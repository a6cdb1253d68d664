"""A step's batch through a sharded model, micro-batch by micro-batch: what trainer and reference have in common."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from grpo.config import TrainerConfig
from grpo.data.packing import (
    MicroBatchPlan,
    build_micro_batch,
    padding_frac,
    plan_micro_batches,
    row_length,
    shared_frac,
    take_out,
)
from grpo.data.shared_prompts import Prompts, prompts_of
from grpo.models.build import ShardedModel
from grpo.types import MicroBatch, SharedPrompts, TrainBatch

# Row lengths are rounded up to this many tokens. On GPU: flex attention's blocks are 128 wide, and few distinct lengths
# mean few recompilations. Any multiple suits the CPU; 16 divides over tensor-parallel ranks.
ROW_MULTIPLE = {"cuda": 512, "cpu": 16}


def micro_batches(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> Iterator[MicroBatch]:
    """This data-parallel rank's micro-batches of the step, on its device, which is not waited for.

    Every rank plans from the same lengths, so nothing is communicated; all ranks get the same number of micro-batches.
    """
    plan, lengths, multiple, prompts = _plan(batch, model, trainer)
    packed = row_length(plan, lengths, multiple, prompts=prompts) if trainer.packing else None
    for index, rows in enumerate(plan[model.data_rank]):
        length = packed or row_length(plan, lengths, multiple, index)
        values = vars(build_micro_batch(batch, rows, length, multiple=multiple, prompts=prompts))
        yield MicroBatch(**{name: _on_device(value, model.device) for name, value in values.items()})


def with_last(micros: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Each with whether it is the last.

    The next one is laid out before one is handed out: for all but the first two, while the device is busy.
    """
    micro = next(micros)
    for following in micros:
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


def packing_metrics(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> dict[str, float]:
    """Of the micro-batches of all ranks: the share of positions that hold no token and, where prompts are shared, of
    tokens that need no position of their own. The same on every rank."""
    plan, lengths, multiple, prompts = _plan(batch, model, trainer)
    found = {"packing/padding_frac": padding_frac(plan, lengths, multiple, trainer.packing, prompts)}
    if prompts:
        found["packing/shared_frac"] = shared_frac(plan, lengths, prompts)
    return found


def _plan(
    batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig
) -> tuple[MicroBatchPlan, list[int], int, Prompts | None]:
    """The micro-batches of all ranks; the lengths they follow from, what rows are rounded up to, prompts to share."""
    lengths, multiple = batch.lengths_S.tolist(), ROW_MULTIPLE[model.device.type]
    prompts = prompts_of(batch) if trainer.share_prompts and trainer.packing else None
    settings = model.num_data_ranks, trainer.micro_batch_tokens, trainer.packing, multiple, prompts
    return plan_micro_batches(lengths, *settings), lengths, multiple, prompts


@torch.no_grad()
def token_logprobs(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> torch.Tensor:
    """Log-probs of this rank's part of the tokens: float32 [N] on the CPU, 0 where other ranks fill in.

    Summed over the role's ranks (tensor-parallel ranks fill in once) it is the whole batch's, of the tokens that count
    in the loss; of others it may be 0. Collective over the role.
    """
    logprobs_N = torch.zeros(batch.num_tokens)
    found = [(micro, model.logprobs(micro)[0]) for micro in micro_batches(batch, model, trainer)]
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
