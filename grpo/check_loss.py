"""Is this loss right? Six checks on a CPU, in a second, before a run depends on it: `python -m grpo.check_loss LOSS`.

    python -m grpo.check_loss path/file.py:function     your own
    python -m grpo.check_loss gspo                      or a built-in one

Each check is a mistake that trains without an error and gives a different algorithm than the one written down. What is
left out: whether the idea is good. Exit code 1 if a check fails.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable

import torch

from grpo.algorithm.losses import LossInputs, PolicyLoss, check_loss_output, load_loss
from grpo.config import AlgorithmConfig, GRPOConfig
from grpo.config.recipes import complete

LENGTHS = (
    5,
    1,
    3,
    4,
)  # counted tokens of each sequence; each has a prompt position and a last one that predict nothing
ADVANTAGES = (1.0, -0.5, -2.0, 0.7)
TOLERANCE = 1e-5
EXTREME = 1e4  # nats


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Counted tokens of all sequences, laid end to end."""

    logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor


def main(arguments: list[str]) -> int:
    """Print one line per check; returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    name = arguments[0]
    config = complete(GRPOConfig(algorithm=AlgorithmConfig(loss=name))).algorithm
    loss = load_loss(name)
    failures = 0
    for check, question in CHECKS.items():
        try:
            complaint = check(loss, config)
        except Exception as error:  # a user's function may raise anything; the other checks go on
            complaint = f"{type(error).__name__}: {error}"
        failures += complaint is not None
        print(f"{'FAILS' if complaint else 'holds'}  {question}" + (f"\n       {complaint}" if complaint else ""))
    return 1 if failures else 0


# ---------------------------------------------------------------------------------------------------------------------
# The checks: None, or what is wrong


def shapes(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """One loss per position, metrics per position and detached."""
    inputs = lay_out(some_tokens(), [[0, 1, 2, 3]])
    check_loss_output(loss(inputs, config), inputs, config.loss)
    return None


def masked_positions(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """NaN and infinity outside the mask change nothing."""
    expected = values_and_gradients(loss, config, some_tokens(), [[[0, 1, 2, 3]]])
    for poison in (torch.nan, torch.inf, -torch.inf):
        got = values_and_gradients(loss, config, some_tokens(), [[[0, 1, 2, 3]]], poison)
        if not same(got, expected):
            return (
                f"{poison} outside the mask reaches loss or gradient: replace what is outside with "
                "`.where(inputs.mask_BT, 0)` before computing, and do not multiply with the mask (0 * nan is nan)"
            )
    return None


def packing(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """The same sequences packed into rows in other ways, or split into micro-batches, have the same loss."""
    expected = values_and_gradients(loss, config, some_tokens(), [[[0], [1], [2], [3]]])
    ways = {
        "one packed row": [[[0, 1, 2, 3]]],
        "another order": [[[3, 1], [2, 0]]],
        "two micro-batches": [[[0, 2]], [[1], [3]]],
    }
    for way, micro_batches in ways.items():
        if not same(values_and_gradients(loss, config, some_tokens(), micro_batches), expected):
            return (
                f"{way}: loss or gradient differs from one sequence per row. Take statistics over sequences "
                "(grpo.algorithm.losses.sequence_means), not over rows or over what is in this call"
            )
    return None


def extreme_ratios(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """A log-ratio of +-1e4 gives a finite loss and gradient."""
    for sign, advantage in itertools.product((1, -1), (1, -1)):
        tokens = some_tokens()
        tokens = dataclasses.replace(
            tokens,
            old_logprobs_N=tokens.logprobs_N - sign * EXTREME,
            advantages_N=torch.full_like(tokens.advantages_N, float(advantage)),
        )
        for values in values_and_gradients(loss, config, tokens, [[[0, 1, 2, 3]]]):
            if not values.isfinite().all():
                return (
                    f"log-ratio {sign * EXTREME:g} with advantage {advantage}: not finite. Clamp the log-ratio before "
                    "exp (the built-in losses do at +-20)"
                )
    return None


def no_advantage(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """Without an advantage there is no gradient."""
    tokens = some_tokens()
    tokens = dataclasses.replace(tokens, advantages_N=torch.zeros_like(tokens.advantages_N))
    _, gradients = values_and_gradients(loss, config, tokens, [[[0, 1, 2, 3]]])
    if gradients.abs().max() > 0:
        return f"advantages of 0 give a gradient of up to {gradients.abs().max():.2g}; meant so only for a regulariser"
    return None


def direction(loss: PolicyLoss, config: AlgorithmConfig) -> str | None:
    """On-policy, a descent step makes tokens with a positive advantage likelier and those with a negative one rarer."""
    tokens = some_tokens()
    tokens = dataclasses.replace(tokens, old_logprobs_N=tokens.logprobs_N.clone())
    _, gradients = values_and_gradients(loss, config, tokens, [[[0, 1, 2, 3]]])
    if (gradients * tokens.advantages_N > 0).any():
        return "the gradient by log-prob has the sign of the advantage at some token: is a minus missing?"
    if not (gradients * tokens.advantages_N < 0).any():
        return "no token has a gradient: is the log-prob detached?"
    return None


CHECKS: dict[Callable[[PolicyLoss, AlgorithmConfig], str | None], str] = {
    shapes: "one loss and one value of each metric per position",
    masked_positions: "nothing outside the mask matters, not even NaN",
    packing: "packing, order and micro-batches do not matter",
    extreme_ratios: "log-ratios of +-1e4 stay finite, forward and backward",
    no_advantage: "no advantage, no gradient",
    direction: "on-policy it follows the advantage",
}


# ---------------------------------------------------------------------------------------------------------------------
# Sequences as tensors


def some_tokens() -> Tokens:
    """Log-ratios between -0.5 and 0.5, so that clips cut some tokens and not others."""
    generator = torch.Generator().manual_seed(0)
    logprobs_N = -2 * torch.rand(sum(LENGTHS), generator=generator) - 0.1
    log_ratio_N = torch.rand(sum(LENGTHS), generator=generator) - 0.5
    advantages_N = torch.tensor(ADVANTAGES).repeat_interleave(torch.tensor(LENGTHS))
    return Tokens(logprobs_N, logprobs_N - log_ratio_N, advantages_N)


def lay_out(tokens: Tokens, rows: Iterable[list[int]], poison: float = 0.0) -> LossInputs:
    """Rows of sequences as the loss sees them in a run; `poison` stands wherever the mask is False."""
    counted, ids, width = slots(rows)
    pick_BT = counted.clamp(min=0)
    mask_BT = counted >= 0

    def spread(values_N: torch.Tensor) -> torch.Tensor:
        return values_N[pick_BT].masked_fill(~mask_BT, poison)

    lengths_S = torch.tensor([*LENGTHS, 1])  # the last one for padding, which has id -1
    return LossInputs(
        logprobs_BT=spread(tokens.logprobs_N).requires_grad_(),
        old_logprobs_BT=spread(tokens.old_logprobs_N),
        advantages_BT=spread(tokens.advantages_N),
        mask_BT=mask_BT,
        sequence_BT=ids,
        lengths_BT=lengths_S[ids],
        num_sequences=len(LENGTHS),
    )


def slots(rows: Iterable[list[int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """For each position the index of its counted token (-1: none) and of its sequence (-1: padding), and the width."""
    starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]
    counted = [[i for s in row for i in (-1, *range(starts[s], starts[s] + LENGTHS[s]), -1)] for row in rows]
    ids = [[s for s in row for _ in range(LENGTHS[s] + 2)] for row in rows]
    width = max(map(len, ids)) + 2
    pad = [[*row, *[-1] * (width - len(row))] for row in counted], [[*row, *[-1] * (width - len(row))] for row in ids]
    return torch.tensor(pad[0]), torch.tensor(pad[1]), width


def values_and_gradients(
    loss: PolicyLoss,
    config: AlgorithmConfig,
    tokens: Tokens,
    micro_batches: list[list[list[int]]],
    poison: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each counted token and the gradient of their sum by its log-prob, both [N], in the order of `tokens`.

    A gradient outside the mask that is not 0 makes the result NaN.
    """
    values_N, gradients_N = torch.zeros(sum(LENGTHS)), torch.zeros(sum(LENGTHS))
    for rows in micro_batches:
        inputs = lay_out(tokens, rows, poison)
        loss_BT, _ = loss(inputs, config)
        loss_BT.where(inputs.mask_BT, 0).sum().backward()
        index_M = slots(rows)[0][inputs.mask_BT]
        values_N[index_M] = loss_BT.detach()[inputs.mask_BT]
        gradients_N[index_M] = inputs.logprobs_BT.grad[inputs.mask_BT]
        if not (inputs.logprobs_BT.grad[~inputs.mask_BT] == 0).all():
            gradients_N[index_M] = torch.nan
    return values_N, gradients_N


def same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Both pairs agree to TOLERANCE; NaN agrees with nothing."""
    return all(torch.allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE) for a, b in zip(got, expected, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
