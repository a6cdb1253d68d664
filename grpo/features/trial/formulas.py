"""A user's loss, advantages and aggregation on a few made-up tokens, before any GPU is used.

A start calls them once. `check_loss` also finds mistakes that train without an error, but compute another algorithm.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import AdvantageInputs, named_advantages
from grpo.algorithm.aggregation import UpdateTotals, named_aggregation
from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.losses import CLIPPED_LOSSES, named_loss
from grpo.config import AlgorithmConfig
from grpo.config.user_files import cause_and_line
from grpo.config.values import names_function
from grpo.data.batches import make_batch
from grpo.data.layout import plan
from grpo.types import MicroBatch, Piece, Rollout, TrainBatch

LOSS_SIGNATURE = "loss(x, config, *, option=1.0)"


def try_algorithm(config: AlgorithmConfig) -> None:
    """Call the user's functions, and a loss with options, on a few tokens.

    Raises ValueError for what does not fit, and for what a function raises, with the line of its file.
    """
    config = config.resolved
    batch = trial_batch()
    if not config.kl_coef:
        batch = replace(batch, ref_logprobs_N=None)
    policy_N = batch.old_logprobs_N.clone().requires_grad_()
    _, x = next(trial_inputs(batch, policy_N))
    if config.loss not in CLIPPED_LOSSES:
        output = call(f"loss {config.loss}", LOSS_SIGNATURE, named_loss(config), x)
        check_loss_output(output, x, config.loss)
        loss_BT, _ = output
        loss_BT.sum().backward()
    elif config.loss_options:
        raise ValueError(f"loss {config.loss} has no options, but loss_options is {config.loss_options}; drop them")
    if names_function(config.advantages):
        if config.kl_coef and config.kl_in == "reward":
            batch = replace(batch, rewards_R=batch.rewards_R - 1)  # a penalty, which is part of no function
        groups = AdvantageInputs.of(batch, 3, {"reward": 1.0})
        call(f"advantages {config.advantages}", "advantages(x)", named_advantages(config.advantages), groups)
    if names_function(config.aggregation):
        _check_aggregation(config.aggregation, x, UpdateTotals.of(batch, max_completion_tokens=8))


def check_loss(config: AlgorithmConfig, policy_loss: Callable[..., Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield four promises, whether the loss that a config names keeps each, and what to look for if it does not.

    policy_loss: that of the page. Raises ValueError if the loss cannot be called, or has no gradient.
    """
    try_algorithm(config)
    config = config.resolved
    batch = trial_batch()
    packings = [values_and_gradients(policy_loss, config, batch, num_rows) for num_rows in (1, 2, 3, 6)]
    packings_K2N = torch.stack(packings)
    yield (
        "The same sequences packed into rows in other ways, or split into micro-batches, have the same loss.",
        torch.allclose(packings_K2N, packings_K2N[:1], atol=1e-5),
        "Take statistics over sequences (grpo.algorithm.inputs.sequence_means), not over rows or over what is in this "
        "call",
    )

    sign_N = (-1) ** batch.owner_N  # each, with advantages of either sign
    far = replace(batch, generator_logprobs_N=batch.old_logprobs_N + 1e4 * sign_N)
    far_2N = values_and_gradients(policy_loss, config, far)
    yield (
        "A log-ratio of +-1e4 gives a finite loss and gradient.",
        bool(far_2N.isfinite().all()),
        "Clamp the log-ratio before exp (as the built-in losses do at +-20)",
    )

    without = replace(batch, advantages_N=0 * batch.advantages_N)
    _, gradients_N = values_and_gradients(policy_loss, config, without)
    yield (
        "Without an advantage there is no gradient.",
        not gradients_N.any(),
        f"It is up to {gradients_N.abs().max():.2g}; meant so only for a regulariser",
    )

    on_policy = replace(batch, generator_logprobs_N=batch.old_logprobs_N)
    _, gradients_N = values_and_gradients(policy_loss, config, on_policy)
    agreement_N = gradients_N * batch.advantages_N
    yield (
        "On-policy, a descent step makes tokens with a positive advantage likelier and those with a negative one "
        "rarer.",
        bool(agreement_N.any() and (agreement_N <= 0).all()),
        "Is a minus missing? Or does the log-prob cancel out?",
    )


# ---- What the functions are called on, and how


def trial_batch() -> TrainBatch:
    """Return six sequences, two groups of three. `old_logprobs_N` are the policy's, up to 0.4 from the generator's."""
    rollouts = []
    for length in (5, 1, 3, 4, 2, 2):  # loss tokens, between a prompt token and a last one that is excluded
        position_T = torch.arange(length + 2)
        loss_mask_T = (position_T > 0) & (position_T <= length)
        logprobs_T = -1 - position_T / 4
        piece = Piece(position_T, loss_mask_T, logprobs_T)
        rollouts.append(Rollout.alone(piece))
    batch = make_batch(rollouts)
    difference_N = torch.arange(batch.num_tokens) % 5 / 5 - 0.4
    policy_N = batch.generator_logprobs_N + difference_N
    advantages_S = torch.tensor([1.0, -0.5, -2.0, 0.7, 0.2, -1.0])
    rewards_R = (advantages_S > 0).float()
    return replace(
        batch,
        old_logprobs_N=policy_N,
        ref_logprobs_N=policy_N - 0.1,
        advantages_N=advantages_S[batch.owner_N].where(batch.loss_mask_N, 0),
        rewards_R=rewards_R,
        has_reward_R=torch.arange(6) != 2,
        parts_FR=rewards_R[None],
    )


def trial_inputs(
    batch: TrainBatch,
    policy_N: Tensor,
    num_rows: int = 1,
) -> Iterator[tuple[MicroBatch, LossInputs]]:
    """Lay a batch out in rows, each a micro-batch, and yield what a loss sees of it under the policy's log-probs."""
    layout = plan(batch, num_ranks=num_rows, max_tokens=batch.num_tokens)
    for rank in range(num_rows):
        micro = next(layout.micro_batches(rank))
        micro = replace(micro, old_logprobs_BT=micro.generator_logprobs_BT)
        policy_BT = policy_N[micro.token_BT.clamp(min=0)]
        yield micro, LossInputs.of(micro, policy_BT, -policy_BT)


def values_and_gradients(
    policy_loss: Callable,
    config: AlgorithmConfig,
    batch: TrainBatch,
    num_rows: int = 6,
) -> Tensor:
    """Return each token's loss and the gradient of their sum by its log-prob, [2, N], in the order of `batch`.

    num_rows: number of micro-batches, one for each sequence by default.
    """
    values_N = torch.zeros(batch.num_tokens)
    policy_N = batch.old_logprobs_N.clone().requires_grad_()
    for micro, x in trial_inputs(batch, policy_N, num_rows):
        loss_BT, _ = call(f"loss {config.loss}", LOSS_SIGNATURE, policy_loss, x, config)
        loss_L = loss_BT[x.loss_mask_BT]
        loss_L.sum().backward()
        values_N[micro.token_BT[x.loss_mask_BT]] = loss_L.detach()
    return torch.stack([values_N, policy_N.grad])


def call(what: str, signature: str, function: Callable, *arguments: Any) -> Any:
    """Call a function. If it raises, raise ValueError with the cause and, if it is in a user's file, the line."""
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        file = what.partition(" ")[2].rpartition(":")[0]
        raise ValueError(f"{what}{cause_and_line(error, file)}; it is called as {signature}") from error


def _check_aggregation(name: str, x: LossInputs, totals: UpdateTotals) -> None:
    """Raise ValueError unless an aggregation's results for two groups add up to its result for both together."""
    loss_BT = -x.generator_logprobs_BT
    first_BT = loss_BT.where(x.sequence_BT < 3, 0)
    whole, first, second = (
        call(f"aggregation {name}", "aggregation(loss_BT, x, totals)", named_aggregation(name), part_BT, x, totals)
        for part_BT in (loss_BT, first_BT, loss_BT - first_BT)
    )
    if not isinstance(whole, Tensor) or whole.ndim or not torch.allclose(whole, first + second):
        raise ValueError(
            f"aggregation {name} gives {whole} for two groups, and {first} and {second} for each alone; return "
            "a sum over loss_BT, divided only by what `totals` counts over the whole update"
        )


def check_loss_output(output: Any, x: LossInputs, name: str) -> None:
    """Raise ValueError unless a loss returned floats that depend on `logprobs_BT`, and detached metrics, all [B, T]."""
    shape = x.loss_mask_BT.shape
    match output:
        case (loss_BT, dict() as metrics):
            pass
        case _:
            raise ValueError(f"loss {name} returned a {type(output).__name__}; return (loss_BT, dict of metrics)")
    for what, value_BT in {"its loss": loss_BT, **metrics}.items():
        if not isinstance(value_BT, Tensor) or value_BT.shape != shape:
            own_shape = tuple(getattr(value_BT, "shape", ()))
            raise ValueError(
                f"loss {name}: {what} is a {type(value_BT).__name__} of shape {own_shape}; return one number per"
                f" position, shape {tuple(shape)}, and leave mask and mean to algorithm.aggregation"
            )
        if what in metrics and value_BT.requires_grad:
            raise ValueError(f"loss {name}: {what} carries a gradient; detach it")
    if not loss_BT.requires_grad:
        raise ValueError(f"loss {name}: its loss has no gradient; compute it from x.logprobs_BT")
