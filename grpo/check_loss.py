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
from grpo.data.layout import take_out
from grpo.run.command_line import subject_of, tool_config
from grpo.run.trial import LENGTHS, trial_batch, trial_inputs, try_algorithm
from grpo.types import TrainBatch
from grpo.watch.failures import refuse_bad_input, run_rank
from train_grpo import policy_loss

TOLERANCE = 1e-5
EXTREME = 1e4  # nats
PACKINGS = {"one packed row": 1, "two micro-batches": 2, "three micro-batches": 3}
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
    batch = trial_batch()
    expected = torch.cat(values_and_gradients(loss, batch))
    for packing, num_rows in PACKINGS.items():
        packed = torch.cat(values_and_gradients(loss, batch, num_rows))
        if not torch.allclose(packed, expected, atol=TOLERANCE, rtol=TOLERANCE):  # NaN agrees with nothing
            return (
                f"{packing}: loss or gradient differs from one sequence per row. Take statistics over sequences "
                "(grpo.algorithm.inputs.sequence_means), not over rows or over what is in this call"
            )
    return None


def check_extreme_ratios(loss: Loss) -> str | None:
    """Try tokens whose probability has changed by a factor of e^10000, up and down."""
    batch = trial_batch()
    for log_ratio, advantage in itertools.product((EXTREME, -EXTREME), (1.0, -1.0)):
        batch = replace(
            batch,
            generator_logprobs_N=batch.old_logprobs_N - log_ratio,
            advantages_N=torch.full_like(batch.advantages_N, advantage),
        )
        if not torch.cat(values_and_gradients(loss, batch)).isfinite().all():
            return (
                f"log-ratio {log_ratio:g} with advantage {advantage:g}: not finite. Clamp the log-ratio before exp (as "
                "the built-in losses do at +-20)"
            )
    return None


def check_no_advantage(loss: Loss) -> str | None:
    """Look for a gradient where every advantage is 0."""
    batch = trial_batch()
    batch = replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))
    largest = values_and_gradients(loss, batch)[1].abs().max()
    if largest > 0:
        return f"advantages of 0 give a gradient of up to {largest:.2g}; meant so only for a regulariser"
    return None


def check_direction(loss: Loss) -> str | None:
    """Compare the sign of each token's gradient with the sign of its advantage, at ratio 1."""
    batch = trial_batch()
    batch = replace(batch, generator_logprobs_N=batch.old_logprobs_N)
    agreement_N = values_and_gradients(loss, batch)[1] * batch.advantages_N
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


def values_and_gradients(
    loss: Loss,
    batch: TrainBatch,
    num_rows: int = len(LENGTHS),
) -> tuple[Tensor, Tensor]:
    """Return each token's loss and the gradient of their sum by its log-prob, both [N], in the order of `batch`.

    num_rows: number of micro-batches, one for each sequence by default.
    """
    values_N = torch.zeros(batch.num_tokens)
    policy_N = batch.old_logprobs_N.clone().requires_grad_()
    for micro, x in trial_inputs(batch, policy_N, num_rows):
        loss_BT, _ = loss(x)
        loss_BT = loss_BT.where(x.loss_mask_BT, 0)
        loss_BT.sum().backward()
        index_M, values_N[index_M] = take_out(loss_BT.detach(), micro)
    return values_N, policy_N.grad


if __name__ == "__main__":
    sys.exit(run_rank(main))
