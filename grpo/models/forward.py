"""A step's batch through a sharded model, micro-batch by micro-batch: what trainer and reference have in common."""

import dataclasses
from collections.abc import Iterator

import torch

from grpo.config import TrainerConfig
from grpo.data.packing import MicroBatch, build_micro_batch, gather_completions, plan_micro_batches, row_length
from grpo.models.build import ShardedModel
from grpo.types import TrainBatch

# Row lengths are rounded up to this many tokens. On GPU: flex attention's blocks are 128 wide, and few distinct lengths
# mean few recompilations. Any multiple suits the CPU; 16 divides over tensor-parallel ranks.
ROW_MULTIPLE = {"cuda": 512, "cpu": 16}


def micro_batches(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> Iterator[MicroBatch]:
    """This data-parallel rank's micro-batches of the step, on its device.

    Every rank plans from the same lengths, so nothing is communicated; all ranks get the same number of micro-batches.
    """
    lengths, multiple = batch.lengths_S.tolist(), ROW_MULTIPLE[model.device.type]
    plan = plan_micro_batches(lengths, model.num_data_ranks, trainer.micro_batch_tokens, trainer.packing, multiple)
    for index, rows in enumerate(plan[model.data_rank]):
        length = row_length(plan, lengths, multiple, micro_batch=None if trainer.packing else index)
        micro = build_micro_batch(batch, rows, length)
        yield MicroBatch(**{f.name: getattr(micro, f.name).to(model.device) for f in dataclasses.fields(micro)})


@torch.no_grad()
def completion_logprobs(batch: TrainBatch, model: ShardedModel, trainer: TrainerConfig) -> torch.Tensor:
    """Log-probs of this rank's share of the completion tokens: float32 [C] on the CPU, 0 where other ranks fill in.

    Summed over the role's ranks (tensor-parallel ranks fill in once) it is the whole batch's. Collective over the role.
    """
    logprobs_C = torch.zeros(batch.num_completion_tokens)
    fills_in = model.tensor_parallel_rank == 0
    for micro in micro_batches(batch, model, trainer):
        logprobs_BT, _ = model.logprobs(micro)
        index_M, logprobs_M = gather_completions(logprobs_BT, batch, micro)
        if fills_in:
            logprobs_C[index_M.cpu()] = logprobs_M.cpu()
    return logprobs_C
