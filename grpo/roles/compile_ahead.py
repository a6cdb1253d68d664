"""Compiling before there is anything to train on: trainers and references do it while engines start on other ranks.

torch.compile makes code for the first row's length and, at a row of another length, code for all lengths. So two
made-up rows leave nothing to compile for the steps to come. What comes of them is dropped: weights, optimizer, random
state and metrics stay as they are.
"""

import math

import torch

from grpo.config import GRPOConfig
from grpo.data.batches import make_batch
from grpo.models.build import ROW_MULTIPLE, compiles
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.types import MicroBatch, Sample, TrainBatch

PROMPT_TOKENS = 3  # of made-up prompts: two of them are shared, and sizes of 0 and 1 are compiled for themselves


def compiles_ahead(config: GRPOConfig, roles: Roles) -> bool:
    """Whether this rank learns with compiled code while engines start elsewhere; colocated, nothing would be gained."""
    learns_apart = roles.learns and bool(roles.replicas) and not roles.generates
    return learns_apart and compiles(config.trainer, roles.device)


def compile_ahead(config: GRPOConfig, trainer: Trainer | None, reference: Reference | None, roles: Roles) -> None:
    """Run every pass of a step over the made-up rows. Collective over the trainers, and over the references."""

    def objective(micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
        # a gradient comes from the entropy too only if the run's does: the LM head has another backward then
        return logprobs_BT.sum() + config.algorithm.entropy_coef * entropy_BT.sum(), {}

    shares = config.trainer.share_prompts and config.group_size > 1
    for row_tokens in row_lengths(config, ROW_MULTIPLE[roles.device.type]):
        num_rows = (trainer or reference).model.num_data_ranks
        batch = made_up_batch(row_tokens, num_rows, config.max_sequence_tokens, PROMPT_TOKENS if shares else 1)
        if trainer and (config.recomputes_old_logprobs or config.overlap_steps):  # where a step has a forward alone
            trainer.logprobs(batch)
        if trainer:
            trainer.forward_backward(batch, objective, StepMetrics(batch.num_sequences))
            trainer.zero_gradient()
        if reference:
            reference.logprobs(batch)
    if roles.device.type == "cuda":
        torch.cuda.synchronize()


def row_lengths(config: GRPOConfig, multiple: int) -> list[int]:
    """Two lengths in tokens that `multiple` divides, as short as shows all shapes; one if a micro-batch has no more.

    The first is a whole chunk of the LM head, which most chunks of a step are; the other one leaves a rest.
    """
    longest = config.trainer.micro_batch_tokens // multiple * multiple or multiple
    first = min(max(config.trainer.logprob_chunk_tokens // multiple, 1) * multiple, longest)
    second = first + multiple if first < longest else first - multiple
    return [first, second] if second else [first]


def made_up_batch(row_tokens: int, num_rows: int, longest: int, prompt_tokens: int = 1) -> TrainBatch:
    """Sequences of up to `longest` tokens that fill `num_rows` rows, each with one prompt; all behind it count.

    A prompt of more than one token is shared in its row, by two sequences or more.
    """
    shared = prompt_tokens - 1
    number = max(math.ceil((row_tokens - shared) / (longest - shared)), 2 if shared else 1)
    shorter, rest = divmod(row_tokens - shared, number)
    lengths = [shared + shorter + (index < rest) for index in range(number)]
    samples = [
        Sample(torch.full((length,), row), torch.arange(length) >= prompt_tokens, prompt_tokens=prompt_tokens)
        for row in range(num_rows)
        for length in lengths
    ]
    return make_batch(samples)
