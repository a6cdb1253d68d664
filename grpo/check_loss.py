"""Is this loss right? Four checks on a CPU, in seconds, before a run depends on it: `python -m grpo.check_loss LOSS`.

    python -m grpo.check_loss path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_loss gspo [RECIPE.py] [--field value ...]                      or a built-in one

Each check finds a mistake that trains without an error, but computes another algorithm than the one written down. Flags
are those of a run, such as `--algorithm.loss-options alpha 2`; without a recipe the rest is as in train_grpo.py. What
is left out: whether the idea is good. Exit code 1 if a check fails.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.trial import try_algorithm
from grpo.data.batches import build_micro_batch, make_batch, take_out
from grpo.run.command_line import subject_of, tool_config
from grpo.types import Sample, TrainBatch
from grpo.watch.failures import refuse_bad_input, run_rank
from train_grpo import policy_loss

LENGTHS = (5, 1, 3, 4)  # loss tokens of each sequence, between a prompt token and a last one that is excluded
ADVANTAGES = (1.0, -0.5, -2.0, 0.7)
TOLERANCE = 1e-5
EXTREME = 1e4  # nats
ONE_ROW = [[[0, 1, 2, 3]]]  # all sequences packed into the one row of one micro-batch
Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]


def main(arguments: list[str] | None = None) -> int:
    """Print one line per check, and return the exit code."""
    loss_name, flags = subject_of(__doc__, arguments)
    with refuse_bad_input():
        config = tool_config([*flags, "--algorithm.loss", loss_name])
        try_algorithm(config.algorithm)  # refuses one without gradient
    loss = partial(policy_loss, algorithm=config.algorithm.resolved)
    exit_code = 0
    for promise, check in CHECKS.items():
        try:
            complaint = check(loss)
        except Exception as error:  # a user's function may raise anything; the other checks go on
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            exit_code = 1
            print(f"FAILS  {promise}\n       {complaint}")
        else:
            print(f"holds  {promise}")
    return exit_code


# ---------------------------------------------------------------------------------------------------------------------
# The checks. Each returns None, or what is wrong


def check_packing(loss: Loss) -> str | None:
    """Compare one sequence per row with other ways to pack the same sequences."""
    one_per_row = [[[0], [1], [2], [3]]]
    expected = torch.cat(values_and_gradients(loss, four_sequences(), one_per_row))
    packings = {
        "one packed row": ONE_ROW,
        "another order": [[[3, 1], [2, 0]]],
        "two micro-batches": [[[0, 2]], [[1], [3]]],
    }
    for packing, micro_batches in packings.items():
        packed = torch.cat(values_and_gradients(loss, four_sequences(), micro_batches))
        if not torch.allclose(packed, expected, atol=TOLERANCE, rtol=TOLERANCE):  # NaN agrees with nothing
            return (
                f"{packing}: loss or gradient differs from one sequence per row. Take statistics over sequences "
                "(grpo.algorithm.inputs.sequence_means), not over rows or over what is in this call"
            )
    return None


def check_extreme_ratios(loss: Loss) -> str | None:
    """Try tokens whose probability has changed by a factor of e^10000, up and down."""
    policy_N = four_sequences().old_logprobs_N
    for log_ratio, advantage in itertools.product((EXTREME, -EXTREME), (1.0, -1.0)):
        advantages_N = torch.full_like(policy_N, advantage)
        tokens = four_sequences(generator_logprobs_N=policy_N - log_ratio, advantages_N=advantages_N)
        numbers = torch.cat(values_and_gradients(loss, tokens, ONE_ROW))
        if not numbers.isfinite().all():
            return (
                f"log-ratio {log_ratio:g} with advantage {advantage:g}: not finite. Clamp the log-ratio before exp (as "
                "the built-in losses do at +-20)"
            )
    return None


def check_no_advantage(loss: Loss) -> str | None:
    """Look for a gradient where every advantage is 0."""
    zeros_N = torch.zeros_like(four_sequences().advantages_N)
    tokens = four_sequences(advantages_N=zeros_N)
    _, gradients_N = values_and_gradients(loss, tokens, ONE_ROW)
    largest = gradients_N.abs().max()
    if largest > 0:
        return f"advantages of 0 give a gradient of up to {largest:.2g}; meant so only for a regulariser"
    return None


def check_direction(loss: Loss) -> str | None:
    """Compare the sign of each token's gradient with the sign of its advantage, at ratio 1."""
    tokens = four_sequences(generator_logprobs_N=four_sequences().old_logprobs_N)
    _, gradients_N = values_and_gradients(loss, tokens, ONE_ROW)
    agreement_N = gradients_N * tokens.advantages_N
    if (agreement_N > 0).any():
        return "the gradient by log-prob has the sign of the advantage at some token: is a minus missing?"
    if not (agreement_N < 0).any():
        return "no token has a gradient: does the log-prob cancel out?"
    return None


CHECKS = {
    "The same sequences packed into rows in other ways, or split into micro-batches, have the same loss.": (
        check_packing
    ),
    "A log-ratio of +-1e4 gives a finite loss and gradient.": check_extreme_ratios,
    "Without an advantage there is no gradient.": check_no_advantage,
    "On-policy, a descent step makes tokens with a positive advantage likelier and those with a negative one rarer.": (
        check_direction
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Sequences as tensors


def four_sequences(**changes: Tensor) -> TrainBatch:
    """Return a batch whose `old_logprobs_N` are the policy's.

    Its log-ratios lie between -0.5 and 0.5, so that clips cut some tokens.
    """
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in LENGTHS:
        position_T = torch.arange(length + 2)
        loss_mask_T = (position_T > 0) & (position_T <= length)
        logprobs_T = -2 * torch.rand(length + 2, generator=generator) - 0.6
        samples.append(Sample(position_T, loss_mask_T, logprobs_T))
    batch = make_batch(samples)
    policy_N = batch.generator_logprobs_N + torch.rand(batch.num_tokens, generator=generator) - 0.5
    advantages_N = torch.tensor(ADVANTAGES)[batch.owner_N]
    tokens = {
        "old_logprobs_N": policy_N,
        "ref_logprobs_N": policy_N - 0.1,
        "advantages_N": advantages_N.where(batch.loss_mask_N, 0),
    }
    return replace(batch, **tokens | changes)


def values_and_gradients(
    loss: Loss,
    tokens: TrainBatch,
    micro_batches: list[list[list[int]]],
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and the gradient of their sum by its log-prob, both [N], in the order of `tokens`.

    micro_batches: the rows of each micro-batch, and the sequences of each row.
    """
    values_N = torch.zeros(tokens.num_tokens)
    gradients_N = torch.zeros(tokens.num_tokens)
    for rows in micro_batches:
        micro = build_micro_batch(tokens, rows, row_length=tokens.num_tokens + 2)  # padding has index -1
        policy_BT = micro.old_logprobs_BT.clone().requires_grad_()
        micro = replace(micro, old_logprobs_BT=micro.generator_logprobs_BT)
        x = LossInputs.of(micro, policy_BT, -policy_BT)
        loss_BT, _ = loss(x)
        loss_BT = loss_BT.where(x.loss_mask_BT, 0)
        loss_BT.sum().backward()
        index_M, values_M = take_out(loss_BT.detach(), micro)
        _, gradients_M = take_out(policy_BT.grad, micro)
        values_N[index_M] = values_M
        gradients_N[index_M] = gradients_M
    return values_N, gradients_N


if __name__ == "__main__":
    sys.exit(run_rank(main))
