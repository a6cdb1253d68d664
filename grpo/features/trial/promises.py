"""Promises of a loss: each finds a mistake that trains without an error, but computes another algorithm."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.inputs import LossInputs
from grpo.config import AlgorithmConfig
from grpo.data.layout import take_out
from grpo.features.trial.formulas import LENGTHS, LOSS_SIGNATURE, call, trial_batch, trial_inputs, try_algorithm
from grpo.types import TrainBatch

TOLERANCE = 1e-5
EXTREME = 1e4  # nats
Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]


def check_loss(config: AlgorithmConfig, policy_loss: Callable[..., Any]) -> Iterator[tuple[str, bool, str]]:
    """Check the loss that a config names; see `checks`. policy_loss: that of the page.

    Raises ValueError if it cannot be called, or has no gradient.
    """
    try_algorithm(config)
    config = config.resolved
    loss = partial(policy_loss, algorithm=config)
    return checks(partial(call, f"loss {config.loss}", LOSS_SIGNATURE, loss))


def checks(loss: Loss) -> Iterator[tuple[str, bool, str]]:
    """Yield four promises, whether the loss keeps each, and what to look for if it does not."""
    batch = trial_batch()
    expected_2N = values_and_gradients(loss, batch)
    packed = [values_and_gradients(loss, batch, num_rows) for num_rows in (1, 2, 3)]
    yield (
        "The same sequences packed into rows in other ways, or split into micro-batches, have the same loss.",
        all(torch.allclose(packed_2N, expected_2N, atol=TOLERANCE, rtol=TOLERANCE) for packed_2N in packed),
        "Take statistics over sequences (grpo.algorithm.inputs.sequence_means), not over rows or over what is in this "
        "call",
    )

    far = [
        values_and_gradients(loss, replace(batch, generator_logprobs_N=batch.old_logprobs_N + extreme))
        for extreme in (EXTREME, -EXTREME)
    ]
    yield (
        "A log-ratio of +-1e4 gives a finite loss and gradient.",
        bool(torch.cat(far).isfinite().all()),
        "Clamp the log-ratio before exp (as the built-in losses do at +-20)",
    )

    without = replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))
    _, gradients_N = values_and_gradients(loss, without)
    yield (
        "Without an advantage there is no gradient.",
        not gradients_N.any(),
        f"It is up to {gradients_N.abs().max():.2g}; meant so only for a regulariser",
    )

    on_policy = replace(batch, generator_logprobs_N=batch.old_logprobs_N)
    _, gradients_N = values_and_gradients(loss, on_policy)
    agreement_N = gradients_N * batch.advantages_N
    yield (
        "On-policy, a descent step makes tokens with a positive advantage likelier and those with a negative one "
        "rarer.",
        bool(agreement_N.any() and (agreement_N <= 0).all()),
        "Is a minus missing? Or does the log-prob cancel out?",
    )


def values_and_gradients(
    loss: Loss,
    batch: TrainBatch,
    num_rows: int = len(LENGTHS),
) -> Tensor:
    """Return each token's loss and the gradient of their sum by its log-prob, [2, N], in the order of `batch`.


    num_rows: number of micro-batches, one for each sequence by default.
    """
    values_N = torch.zeros(batch.num_tokens)
    policy_N = batch.old_logprobs_N.clone().requires_grad_()
    for micro, x in trial_inputs(batch, policy_N, num_rows):
        loss_BT, _ = loss(x)
        loss_BT = loss_BT.where(x.loss_mask_BT, 0)
        loss_BT.sum().backward()
        index_L, values_N[index_L] = take_out(loss_BT.detach(), micro)
    return torch.stack([values_N, policy_N.grad])
