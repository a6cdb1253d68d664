"""A trial call of the loss, the advantages and the aggregation that a config names, before any GPU is used."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo.algorithm.advantages import ADVANTAGES, AdvantageInputs, named_advantages
from grpo.algorithm.aggregation import AGGREGATIONS, UpdateTotals, named_aggregation
from grpo.algorithm.inputs import LossInputs, Metrics
from grpo.algorithm.losses import CLIPPED_LOSSES, named_loss
from grpo.config import AlgorithmConfig
from grpo.config.user_files import cause_and_line
from grpo.types import TrainBatch


def try_algorithm(config: AlgorithmConfig) -> None:
    """Call the user's functions, and a loss with options, on a few tokens.

    Raises ValueError for what does not fit, and for what a function raises, with the line of its file.
    """
    config = config.resolved
    x = trial_tokens(with_reference=config.kl_coef > 0)
    if config.loss not in CLIPPED_LOSSES:
        signature = "loss(x, config, *, option=1.0)"
        output = _call(f"loss {config.loss}", signature, named_loss(config), x)
        check_loss_output(output, x, config.loss)
        loss_BT, _ = output
        loss_BT.sum().backward()
    elif config.loss_options:
        raise ValueError(f"loss {config.loss} has no options, but loss_options is {config.loss_options}; drop them")
    if config.advantages not in ("group_std", *ADVANTAGES):
        function = named_advantages(config.advantages)
        rewards = trial_rewards()
        if config.kl_coef and config.kl_in == "reward":  # as in the run, where the penalty is part of no function
            rewards = replace(rewards, rewards_PG=rewards.rewards_PG - 1)
        _call(f"advantages {config.advantages}", "advantages(x)", function, rewards)
    if config.aggregation not in ("sequence_mean", *AGGREGATIONS):
        check_aggregation(config.aggregation, x)


def _call(what: str, signature: str, function: Callable, *arguments: Any) -> Any:
    """Call a function. If it raises, raise ValueError with the cause and, if it is in a user's file, the line."""
    try:
        return function(*arguments)
    except Exception as error:  # a user's function may raise anything
        _, _, spec = what.partition(" ")
        file, _, _ = spec.rpartition(":")
        raise ValueError(f"{what}{cause_and_line(error, file)}; it is called as {signature}") from error


def trial_tokens(with_reference: bool) -> LossInputs:
    """Return two sequences, of two tokens and of one, and a position that does not count."""
    old_BT = torch.tensor([[-1.1, -1.9, -0.5, 0.0]])
    return LossInputs(
        logprobs_BT=torch.tensor([[-1.0, -2.0, -0.5, 0.0]], requires_grad=True),
        old_logprobs_BT=old_BT,
        generator_logprobs_BT=1.1 * old_BT,
        ref_logprobs_BT=0.9 * old_BT if with_reference else None,
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, 0.0]]),
        entropy_BT=-old_BT,
        loss_mask_BT=old_BT < 0,
        sequence_BT=torch.tensor([[0, 0, 1, -1]]),
        num_loss_tokens_BT=torch.tensor([[2, 2, 1, 1]]),
        num_sequences=2,
    )


def trial_rewards() -> AdvantageInputs:
    """Return two groups of three completions of two tokens; one completion has no reward."""
    first_PG = [[1.0, 0.0, -1.0], [1.0, 1.0, 1.0]]
    second_PG = [[0.5, -1.0, -1.0], [0.0, 1.0, -1.0]]
    parts_FPG = torch.tensor([first_PG, second_PG]).double()
    has_FPG = parts_FPG >= 0  # -1 stands for None
    parts_FPG = parts_FPG.where(has_FPG, 0)
    weights_F = torch.tensor([1.0, 0.5]).double()
    ones_S = torch.ones(6)
    ids_N = torch.ones(12).long()
    batch = TrainBatch(
        ids_N=ids_N,
        loss_mask_N=ids_N > 0,
        lengths_S=2 * ones_S.long(),
        sequence_S=torch.arange(6),
        temperatures_S=ones_S,
        versions_S=torch.zeros(6).long(),
        truncated_S=ones_S < 0,
        generator_logprobs_N=-ids_N.float(),
    )
    return AdvantageInputs(
        rewards_PG=torch.einsum("f,fpg->pg", weights_F, parts_FPG),
        has_PG=has_FPG.any(dim=0),
        parts_FPG=parts_FPG,
        has_FPG=has_FPG,
        weights_F=weights_F,
        batch=batch,
    )


def check_aggregation(name: str, x: LossInputs) -> None:
    """Raise ValueError unless an aggregation's results for two sequences add up to its result for both together."""
    totals = UpdateTotals(num_tokens=3, num_sequences=2, max_completion_tokens=4)
    signature = "aggregation(loss_BT, x, totals)"
    loss_BT = torch.tensor([[1.0, 2.0, 4.0, 0.0]])
    function = named_aggregation(name)
    results = []
    for part_BT in (loss_BT.where(x.sequence_BT == 0, 0), loss_BT.where(x.sequence_BT == 1, 0), loss_BT):
        results.append(_call(f"aggregation {name}", signature, function, part_BT, x, totals))
    first, second, whole = results
    is_scalar = isinstance(whole, Tensor) and whole.shape == ()
    if not is_scalar or not torch.allclose(whole, first + second):
        raise ValueError(
            f"aggregation {name} gives {whole} for two sequences, and {first} and {second} for each alone; return "
            "a sum over loss_BT, divided only by what `totals` counts over the whole update"
        )


def check_loss_output(output: tuple[Tensor, Metrics], x: LossInputs, name: str) -> None:
    """Raise ValueError unless a loss returned floats that depend on `logprobs_BT`, and detached metrics, all [B, T]."""
    shape = tuple(x.loss_mask_BT.shape)
    is_pair = isinstance(output, tuple) and len(output) == 2
    if not is_pair or not isinstance(output[1], dict):
        raise ValueError(f"loss {name} returned {_kind_of(output)}; return (loss_BT, dict of metrics)")
    loss_BT, metrics = output
    if not _is_tensor(loss_BT, shape) or not loss_BT.is_floating_point():
        raise ValueError(
            f"loss {name} returned a loss that is {_kind_of(loss_BT)}; return one floating number per position, "
            f"shape {shape}, and leave mask and mean to algorithm.aggregation"
        )
    if x.logprobs_BT.requires_grad and not loss_BT.requires_grad:
        raise ValueError(f"loss {name} returned a loss without gradient; compute it from x.logprobs_BT")
    for key, value_BT in metrics.items():
        if not isinstance(key, str) or not _is_tensor(value_BT, shape):
            raise ValueError(
                f"metric {key!r} of loss {name} is {_kind_of(value_BT)}; return one value per position, shape {shape}"
            )
        if value_BT.requires_grad:
            raise ValueError(f"metric {key!r} of loss {name} carries a gradient; detach it")


def _is_tensor(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
