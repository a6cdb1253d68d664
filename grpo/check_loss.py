"""Is this loss right? Four checks on a CPU, in seconds, before a run depends on it: `python -m grpo.check_loss LOSS`.

    python -m grpo.check_loss path/file.py:function [RECIPE.py] [--field value ...]     your own
    python -m grpo.check_loss gspo [RECIPE.py] [--field value ...]                      or a built-in one

Each check is a mistake that trains without an error and gives a different algorithm than the one written down. Flags
are those of a run, such as `--algorithm.loss-options alpha 2`; without a recipe the rest is as in train_grpo.py. What
is left out: whether the idea is good. Exit code 1 if a check fails.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.trial import try_algorithm
from grpo.config import GRPOConfig
from grpo.config.recipes import for_one_process, load
from grpo.data.batches import build_micro_batch, make_batch, take_out
from grpo.run.command_line import DEFAULT_RECIPES, subject_of
from grpo.types import Sample, TrainBatch
from train_grpo import policy_loss

LENGTHS = (5, 1, 3, 4)  # loss tokens of each sequence, between a prompt token and a last one that is excluded
ADVANTAGES = (1.0, -0.5, -2.0, 0.7)
TOLERANCE = 1e-5
EXTREME = 1e4  # nats
ONE_ROW = [[[0, 1, 2, 3]]]  # all sequences packed into the one row of one micro-batch
Loss = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def main(arguments: list[str]) -> int:
    """Print one line per check; returns the exit code."""
    name, rest = subject_of(__doc__, arguments)
    try:
        config = load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], [*rest, "--algorithm.loss", name], for_one_process)
        try_algorithm(config.algorithm)  # as a run does before it starts
    except ValueError as error:
        print(f"error: {error}")
        return 1
    loss, code = partial(policy_loss, algorithm=config.algorithm.resolved), 0
    for check in CHECKS:
        try:
            complaint = check(loss)
        except Exception as error:  # a user's function may raise anything; the other checks go on
            complaint = f"{type(error).__name__}: {error}"
        print(f"FAILS  {check.__doc__}\n       {complaint}" if complaint else f"holds  {check.__doc__}")
        code |= complaint is not None
    return code


# ---------------------------------------------------------------------------------------------------------------------
# The checks: None, or what is wrong. The docstring is what `main` prints


def packing(loss: Loss) -> str | None:
    """The same sequences packed into rows in other ways, or split into micro-batches, have the same loss."""
    expected = torch.cat(values_and_gradients(loss, some_tokens(), [[[0], [1], [2], [3]]]))
    ways = {
        "one packed row": ONE_ROW,
        "another order": [[[3, 1], [2, 0]]],
        "two micro-batches": [[[0, 2]], [[1], [3]]],
    }
    for way, micro_batches in ways.items():
        found = torch.cat(values_and_gradients(loss, some_tokens(), micro_batches))
        if not torch.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE):  # NaN agrees with nothing
            return (
                f"{way}: loss or gradient differs from one sequence per row. Take statistics over sequences "
                "(grpo.algorithm.inputs.sequence_means), not over rows or over what is in this call"
            )
    return None


def extreme_ratios(loss: Loss) -> str | None:
    """A log-ratio of +-1e4 gives a finite loss and gradient."""
    policy_N = some_tokens().old_logprobs_N
    for log_ratio, advantage in itertools.product((EXTREME, -EXTREME), (1.0, -1.0)):
        advantages_N = torch.full_like(policy_N, advantage)
        tokens = some_tokens(generator_logprobs_N=policy_N - log_ratio, advantages_N=advantages_N)
        if not torch.cat(values_and_gradients(loss, tokens, ONE_ROW)).isfinite().all():
            return (
                f"log-ratio {log_ratio:g} with advantage {advantage:g}: not finite. Clamp the log-ratio before exp (as "
                "the built-in losses do at +-20)"
            )
    return None


def no_advantage(loss: Loss) -> str | None:
    """Without an advantage there is no gradient."""
    advantages_N = torch.zeros_like(some_tokens().advantages_N)
    _, gradients = values_and_gradients(loss, some_tokens(advantages_N=advantages_N), ONE_ROW)
    if gradients.abs().max() > 0:
        return f"advantages of 0 give a gradient of up to {gradients.abs().max():.2g}; meant so only for a regulariser"
    return None


def direction(loss: Loss) -> str | None:
    """On-policy, a descent step makes tokens with a positive advantage likelier and those with a negative one rarer."""
    tokens = some_tokens(generator_logprobs_N=some_tokens().old_logprobs_N)
    _, gradients = values_and_gradients(loss, tokens, ONE_ROW)
    if (gradients * tokens.advantages_N > 0).any():
        return "the gradient by log-prob has the sign of the advantage at some token: is a minus missing?"
    if not (gradients * tokens.advantages_N < 0).any():
        return "no token has a gradient: is the log-prob detached?"
    return None


CHECKS = (packing, extreme_ratios, no_advantage, direction)


# ---------------------------------------------------------------------------------------------------------------------
# Sequences as tensors


def some_tokens(**changes: torch.Tensor) -> TrainBatch:
    """The policy's log-probs as `old_logprobs_N`; log-ratios between -0.5 and 0.5, so that clips cut some tokens."""
    generator = torch.Generator().manual_seed(0)
    samples, policy = [], []
    for length in LENGTHS:
        position_T = torch.arange(length + 2)
        policy.append(-2 * torch.rand(length + 2, generator=generator) - 0.1)
        sampled_T = policy[-1] - (torch.rand(length + 2, generator=generator) - 0.5)
        samples.append(Sample(position_T, (position_T > 0) & (position_T <= length), sampled_T))
    batch, policy_N = make_batch(samples), torch.cat(policy)
    advantages_N = torch.tensor(ADVANTAGES)[batch.owner_N].where(batch.loss_mask_N, 0)
    tokens = {"old_logprobs_N": policy_N, "ref_logprobs_N": policy_N - 0.1, "advantages_N": advantages_N}
    return replace(batch, **tokens | changes)


def values_and_gradients(
    loss: Loss, tokens: TrainBatch, micro_batches: list[list[list[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss and the gradient of their sum by its log-prob, both [N], in the order of `tokens`.

    micro_batches: of each its rows, of each row its sequences.
    """
    values_N, gradients_N = torch.zeros(tokens.num_tokens), torch.zeros(tokens.num_tokens)
    for rows in micro_batches:
        micro = build_micro_batch(tokens, rows, row_length=tokens.num_tokens + 2)  # always with padding
        policy_BT = micro.old_logprobs_BT.clone().requires_grad_()
        micro = replace(micro, old_logprobs_BT=micro.generator_logprobs_BT)
        x = LossInputs.of(micro, policy_BT, -policy_BT)
        loss_BT = loss(x)[0].where(x.loss_mask_BT, 0)
        loss_BT.sum().backward()
        index_M, values_M = take_out(loss_BT.detach(), micro)
        values_N[index_M] = values_M
        gradients_N[index_M] = take_out(policy_BT.grad, micro)[1]
    return values_N, gradients_N


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
