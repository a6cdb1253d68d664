"""Per-token policy losses, KL estimators, generator mismatch, and the one aggregation that turns losses into a scalar.

Everything is `[B, T]`, aligned with the position that *predicts* a token (see `packing.MicroBatch`), and pure. A policy
loss is `loss(inputs: LossInputs, config: AlgorithmConfig) -> (loss_BT, metrics)`. To try another algorithm, write such
a function in a file of your own and set `algorithm.loss` to `path/file.py:function`.

Metrics are detached `[B, T]` tensors (bool or float) of per-token values; outside the mask they are 0 or False, but
nobody looks there. Over the counted tokens of the whole step the trainer takes their mean, or their maximum (0 if all
are negative) where the name ends in `max`. So a metric does not depend on how an update was split. A
loss logs the same names each time it is called.

Masked-out positions may hold anything (inf, nan): they are replaced with `where` before any arithmetic that could
overflow, because 0 * nan is nan, forward and backward. Inside the mask nothing is repaired: a NaN log-prob or
advantage there gives a NaN loss. So the caller takes sequences without a reward (NaN advantage) out of the mask.

Layer 0: pure functions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo.config import Aggregation, AlgorithmConfig
from grpo.config.user_files import load_function

# exp(20) = 4.9e8: far beyond any ratio that means something, and its sum over a step is still far from overflowing.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss sees of one micro-batch: [B, T], aligned with the position that predicts a token."""

    logprobs_BT: torch.Tensor
    """Natural log-probs of the tokens by the policy as it is now, with gradient."""
    old_logprobs_BT: torch.Tensor
    """The ratio's denominator, detached."""
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    """bool: the tokens that count."""
    sequence_BT: torch.Tensor
    """int64: index of the sequence of each position, -1 on padding. A row may hold several sequences; a sequence is
    never split over rows or micro-batches."""
    lengths_BT: torch.Tensor
    """int64: counted tokens of this position's sequence; at least 1, also where the mask is False."""
    num_sequences: int
    """Of the batch: every index in `sequence_BT` is below it."""


Metrics = dict[str, torch.Tensor]

# Logged for every loss, so no loss may use these names.
RESERVED_METRICS = {"loss", "entropy", "kl", "ess", "weight", "weight_squared", "mismatch/kl", "corrected_share"}
RESERVED_METRICS |= {"mismatch/mean", "mismatch/max", "grad_norm", "learning_rate", "tokens_per_second"}

PolicyLoss = Callable[[LossInputs, AlgorithmConfig], tuple[torch.Tensor, Metrics]]


# ---------------------------------------------------------------------------------------------------------------------
# Policy losses


def clipped(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = policy / old.

    PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7), taken over by GRPO (Shao et al. 2024, arXiv:2402.03300,
    eq. 3), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) and, with clip_high above clip_low, DAPO (Yu et al. 2025,
    arXiv:2503.14476, eq. 8): the three differ in clips, advantages and aggregation (`config.PAPER_DEFAULTS`), not here.
    With dual_clip above 1, where A < 0 the objective is at least dual_clip * A (Ye et al. 2020, arXiv:1912.09729).
    Beyond a log-ratio of +-20 the ratio is held constant, so such a token has no gradient.

    Metrics, each of a token: `clip_low_share` (ratio below 1 - clip_low and A < 0: the gradient is cut),
    `clip_high_share` (ratio above 1 + clip_high and A > 0), `clip_share` (either), with dual_clip `dual_clip_share`
    (ratio above dual_clip and A < 0), `ratio_mean`, `ratio_max`, and `active_share` (it has a gradient: A is not 0 and
    nothing cut it).
    """
    return _clipped_surrogate(_log_ratio(inputs), inputs, config)


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """GSPO: `clipped` with one ratio for a whole sequence, exp(mean over its counted tokens of log policy / old).

    Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7, in its token form (GSPO-token): the ratio at a token is
    sg[s] * exp(logp - sg[logp]), where s is the sequence's ratio and sg stops the gradient. Its value is s, its
    gradient at every token s, so with `sequence_mean` it is GSPO's. dual_clip as in `clipped`.

    Metrics: those of `clipped`, of the sequence's ratio at each of its tokens.
    """
    logprobs_BT = inputs.logprobs_BT.where(inputs.mask_BT, 0)
    means_BT = sequence_means(_log_ratio(inputs).detach(), inputs)
    # the bracket is exactly 0, so the value is the mean's
    return _clipped_surrogate(means_BT + (logprobs_BT - logprobs_BT.detach()), inputs, config)


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """CISPO: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * logp; sg stops the gradient.

    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5. The weight is clipped, not the surrogate, so every token
    with an advantage keeps a gradient.

    Metrics, each of a token: `clip_low_share` and `clip_high_share` (the weight is held at its lower or upper bound,
    whatever the sign of A), `clip_share` (either), `ratio_mean`, `ratio_max` (before the clip), `active_share` (A is
    not 0).
    """
    ratio_BT = _clamped(_log_ratio(inputs)).detach().exp()
    weights_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    low_BT = (ratio_BT < 1 - config.clip_low) & inputs.mask_BT
    high_BT = (ratio_BT > 1 + config.clip_high) & inputs.mask_BT
    return _weighted_logprobs(weights_BT, inputs), {
        "clip_low_share": low_BT,
        "clip_high_share": high_BT,
        "clip_share": low_BT | high_BT,
        **_ratio_metrics(ratio_BT, inputs),
        "active_share": (_advantages(inputs) != 0) & (weights_BT != 0),
    }


def sapo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """SAPO: -f(ratio) * A with the soft gate f = 4 / tau * p, p = sigmoid(tau * (ratio - 1)).

    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347. tau is sapo_temperature_positive where
    A > 0 and sapo_temperature_negative elsewhere. The gradient by logp is -4 p (1 - p) * ratio * A: on-policy that of
    the plain policy gradient, and it fades smoothly on either side. Beyond a log-ratio of +-20 there is none.

    Metrics, each of a token: `gate_mean`, the gradient's weight 4 p (1 - p) (1 at ratio 1, 0 where the gate is shut),
    `ratio_mean`, `ratio_max`, `active_share` (A is not 0, and the gradient's weight not 0 in this precision).
    """
    log_ratio_BT = _log_ratio(inputs)
    advantages_BT = _advantages(inputs)
    ratio_BT = _clamped(log_ratio_BT).exp()
    negative_BT = torch.full_like(ratio_BT, config.sapo_temperature_negative)
    temperatures_BT = negative_BT.masked_fill(advantages_BT > 0, config.sapo_temperature_positive)
    gate_BT = torch.sigmoid(temperatures_BT * (ratio_BT - 1))
    loss_BT = -4 / temperatures_BT * gate_BT * advantages_BT

    gate_BT = gate_BT.detach()
    weights_BT = 4 * gate_BT * (1 - gate_BT)
    held_BT = log_ratio_BT.detach().abs() > MAX_LOG_RATIO
    return loss_BT, {
        "gate_mean": weights_BT.where(inputs.mask_BT, 0),
        **_ratio_metrics(ratio_BT, inputs),
        "active_share": (advantages_BT != 0) & (weights_BT > 0) & ~held_BT,
    }


def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """The policy gradient as it is: -w * A * logp, w = 1 (Williams 1992, "Simple statistical gradient-following").

    With max_importance_weight above 0, w is the ratio policy / old without gradient, cut off there (truncated
    importance sampling, Ionides 2008); logp's gradient is never cut.

    Metrics, each of a token: with max_importance_weight `weight_cut_share` (the ratio was above it), `ratio_mean`,
    `ratio_max` (before the cut), `active_share` (A is not 0).
    """
    ratio_BT = _clamped(_log_ratio(inputs)).detach().exp()
    weights_BT = torch.ones_like(ratio_BT)
    metrics = {}
    if config.max_importance_weight > 0:
        weights_BT = ratio_BT.clamp(max=config.max_importance_weight)
        metrics["weight_cut_share"] = (ratio_BT > config.max_importance_weight) & inputs.mask_BT
    metrics |= _ratio_metrics(ratio_BT, inputs)
    return _weighted_logprobs(weights_BT, inputs), {**metrics, "active_share": _advantages(inputs) != 0}


LOSSES: dict[str, PolicyLoss] = {
    "grpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def load_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or the user's function written `path/file.py:function`.

    Raises:
        ValueError: the name is unknown, the file or the function does not exist, or it does not take two arguments.
        Whatever the user's file raises when it runs.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ValueError(
            f"algorithm.loss={name!r} is unknown; use {', '.join(LOSSES)}, or write your own as path/file.py:function"
        )
    function = load_function(name, "loss")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"loss {name} cannot be called with two arguments: {error}; "
            "write it as def loss(inputs: LossInputs, config: AlgorithmConfig)"
        ) from error
    return function


def check_loss_output(output: tuple[torch.Tensor, Metrics], inputs: LossInputs, name: str) -> None:
    """Refuse what a user's loss must not return; looks at types and shapes only, so it never waits for the device.

    Args:
        output: what `loss(inputs, config)` returned.
        name: of the loss, for the message.

    Raises:
        ValueError: it is not a pair of a floating [B, T] loss that depends on `logprobs_BT` and a dict of detached
            [B, T] metrics.
    """
    shape = tuple(inputs.mask_BT.shape)
    if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict)):
        raise ValueError(f"loss {name} returned {_describe(output)}; return (loss_BT, dict of metrics)")
    loss_BT, metrics = output
    if not (isinstance(loss_BT, torch.Tensor) and loss_BT.shape == shape and loss_BT.is_floating_point()):
        raise ValueError(
            f"loss {name} returned a loss that is {_describe(loss_BT)}; return one floating number per position, "
            f"shape {shape}, and leave mask and mean to algorithm.aggregation"
        )
    if inputs.logprobs_BT.requires_grad and not loss_BT.requires_grad:
        raise ValueError(f"loss {name} returned a loss without gradient; compute it from inputs.logprobs_BT")
    reserved = RESERVED_METRICS & metrics.keys()
    if reserved:
        raise ValueError(f"loss {name} logs {', '.join(sorted(reserved))}, which the run logs itself; rename it")
    for key, value_BT in metrics.items():
        if not (isinstance(key, str) and isinstance(value_BT, torch.Tensor) and value_BT.shape == shape):
            raise ValueError(
                f"metric {key!r} of loss {name} is {_describe(value_BT)}; return one value per position, shape {shape}"
            )
        if value_BT.requires_grad:
            raise ValueError(f"metric {key!r} of loss {name} carries a gradient; detach it")


def try_loss(config: AlgorithmConfig) -> None:
    """Load the loss and call it once on three tokens, so that a mistake in a user's file shows before any GPU is used.

    Raises:
        ValueError: see `load_loss` and `check_loss_output`.
        Whatever the user's function raises.
    """
    logprobs_BT = torch.tensor([[-1.0, -2.0, -0.5, 0.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=torch.tensor([[-1.1, -1.9, -0.5, 0.0]]),
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, 0.0]]),
        mask_BT=torch.tensor([[True, True, True, False]]),
        sequence_BT=torch.tensor([[0, 0, 1, -1]]),
        lengths_BT=torch.tensor([[2, 2, 1, 1]]),
        num_sequences=2,
    )
    output = load_loss(config.loss)(inputs, config)
    check_loss_output(output, inputs, config.loss)
    output[0].sum().backward()


def sequence_means(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """At each counted token the mean of the values over its sequence's counted tokens; [B, T], 0 outside the mask.

    Over sequences, never over rows, which may hold several of them.
    """
    # float64, so that the order in which a GPU adds does not show; padding (-1) gets a slot of its own
    slots_BT = inputs.sequence_BT + 1
    sums = torch.zeros(inputs.num_sequences + 1, dtype=torch.float64, device=values_BT.device)
    sums = sums.index_add(0, slots_BT.flatten(), values_BT.where(inputs.mask_BT, 0).double().flatten())
    means_BT = sums[slots_BT] / inputs.lengths_BT
    return means_BT.to(values_BT.dtype).where(inputs.mask_BT, 0)


# ---------------------------------------------------------------------------------------------------------------------
# KL to the reference


def kl(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token; [B, T], 0 outside the mask.

    With x = log policy - log reference (Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html):
    `k1` x: unbiased, noisy, can be negative. As a loss it teaches nothing, since its gradient, that of logp, has mean 0
    over tokens sampled from the policy; as a part of the reward it is the right one.
    `k2` x^2 / 2: biased, never negative; its gradient x * grad logp is, on-policy, in expectation that of the true KL.
    `k3` exp(-x) - 1 + x: unbiased, never negative; but its gradient (1 - exp(-x)) * grad logp is not the KL's.
    `k3_k2_gradient`: the value of k3 and the gradient of k2, k2 - sg[k2] + sg[k3].
    On these gradients: Tang and Munos 2025, arXiv:2506.09477. They are those of each token's own KL: what a token does
    to the KL of the tokens after it is left out. x is clamped to +-20; beyond it there is no gradient.

    Raises:
        ValueError: `estimator` is unknown.
    """
    log_ratio_BT = _clamped(_masked_difference(logprobs_BT, ref_logprobs_BT, mask_BT))
    if estimator == "k1":
        return log_ratio_BT
    k2_BT = log_ratio_BT.square() / 2
    if estimator == "k2":
        return k2_BT
    # expm1, because near 0 the terms cancel: in float32 exp(1e-4) - 1e-4 - 1 has not one correct digit
    k3_BT = torch.expm1(-log_ratio_BT) + log_ratio_BT
    if estimator == "k3":
        return k3_BT
    if estimator == "k3_k2_gradient":
        return (k2_BT - k2_BT.detach()) + k3_BT.detach()
    raise ValueError(f"kl_estimator={estimator!r} is unknown; use 'k1', 'k2', 'k3' or 'k3_k2_gradient'")


# ---------------------------------------------------------------------------------------------------------------------
# A generator that is not quite the policy


def mismatch(policy_logprobs_BT: torch.Tensor, generator_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> Metrics:
    """How far the trainer's log-probs of the sampled tokens are from the generator's, as metrics; detached.

    With d = policy - generator: `mismatch/mean` and `mismatch/max` are |d| in nats; `mismatch/kl`
    exp(d) - 1 - d, the k3 estimate of KL(generator || policy) on the generator's own samples (see `kl`); `weight`
    exp(d) and `weight_squared`, whose means `effective_sample_size` takes. The last three clamp d to +-20.
    """
    difference_BT = _masked_difference(policy_logprobs_BT.detach(), generator_logprobs_BT.detach(), mask_BT)
    clamped_BT = _clamped(difference_BT)
    weight_BT = clamped_BT.exp().where(mask_BT, 0)
    return {
        "mismatch/mean": difference_BT.abs(),
        "mismatch/max": difference_BT.abs(),
        "mismatch/kl": clamped_BT.expm1() - clamped_BT,
        "weight": weight_BT,
        "weight_squared": weight_BT.square(),
    }


def effective_sample_size(mean_weight: float, mean_squared_weight: float) -> float:
    """Share of the tokens that are worth as much as unweighted ones: mean(w)^2 / mean(w^2), in (0, 1] (Kish 1965).

    Takes the step's means of `weight` and `weight_squared` from `mismatch`. 1 for a step without a counted token.
    """
    if mean_squared_weight == 0:
        return 1.0
    return min(mean_weight**2 / mean_squared_weight, 1.0)  # rounding can push equal weights above 1


def correction_weights(
    policy_logprobs_BT: torch.Tensor,
    generator_logprobs_BT: torch.Tensor,
    inputs: LossInputs,
    kind: str,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to multiply the per-token loss with, because the generator sampled from not quite the policy it should have.

    With w = policy / generator of a token, clamped to exp(+-20):
    `none`: 1. `truncate`: min(w, high), truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"). `mask_tokens`: w where it lies in [low, high], else 0 (IcePop; Ling
    Team 2025, arXiv:2510.18855). `mask_sequences`: 1 for a sequence whose geometric mean of w lies in [low, high], 0
    for all tokens of another one.
    A token of weight 0 stays in the loss's denominator, which is counted before any forward: masking makes a step
    smaller, it does not give the remaining tokens more weight.

    Returns:
        weights [B, T], detached, 1 outside the mask; and bool [B, T], the counted tokens that were cut off or masked.

    Raises:
        ValueError: `kind` is unknown.
    """
    mask_BT = inputs.mask_BT
    difference_BT = _masked_difference(policy_logprobs_BT.detach(), generator_logprobs_BT.detach(), mask_BT)
    if kind == "none":
        return torch.ones_like(difference_BT), torch.zeros_like(mask_BT)
    if kind not in ("truncate", "mask_tokens", "mask_sequences"):
        raise ValueError(f"correction={kind!r} is unknown; use 'none', 'truncate', 'mask_tokens' or 'mask_sequences'")
    if kind == "mask_sequences":
        difference_BT = sequence_means(difference_BT, inputs)
    ratio_BT = _clamped(difference_BT).exp()
    if kind == "truncate":
        corrected_BT = (ratio_BT > high) & mask_BT
        weights_BT = ratio_BT.clamp(max=high)
    else:
        corrected_BT = ((ratio_BT < low) | (ratio_BT > high)) & mask_BT
        kept_BT = ratio_BT if kind == "mask_tokens" else torch.ones_like(ratio_BT)
        weights_BT = kept_BT.masked_fill(corrected_BT, 0)
    return weights_BT.where(mask_BT, 1), corrected_BT


# ---------------------------------------------------------------------------------------------------------------------
# Aggregation


def aggregate(
    loss_BT: torch.Tensor, mask_BT: torch.Tensor, lengths_BT: torch.Tensor, kind: Aggregation, denominator: float
) -> torch.Tensor:
    """This micro-batch's share of the step's loss: a scalar. Shares add up over micro-batches and ranks.

    `token_mean` and `fixed_horizon` sum the masked-in tokens; `sequence_mean` weighs each by 1 / the counted tokens of
    its sequence, which `lengths_BT` holds at every masked-in position (above 0 elsewhere).

    Args:
        denominator: `step_denominator` of the whole optimizer step, not of this micro-batch.

    Raises:
        ValueError: `kind` is unknown, or the denominator is not above 0.
    """
    if not denominator > 0:
        raise ValueError(
            f"denominator={denominator} must be above 0; step_denominator gives at least 1 for an empty step"
        )
    loss_BT = loss_BT.where(mask_BT, 0)
    if kind == "sequence_mean":
        loss_BT = loss_BT / lengths_BT
    elif kind not in ("token_mean", "fixed_horizon"):
        raise _unknown_aggregation(kind)
    return loss_BT.sum() / denominator


def step_denominator(counted_lengths_S: torch.Tensor, kind: Aggregation, max_completion_tokens: int) -> float:
    """What the summed loss of one optimizer step is divided by, counted over all its sequences before any forward.

    `token_mean`: the counted tokens (DAPO). `sequence_mean`: the number of sequences that have one (GRPO).
    `fixed_horizon`: that number x `max_completion_tokens` (Dr. GRPO, arXiv:2503.20783), so a token weighs the same in
    long and short completions. At least 1, so that a step in which nothing counts divides by one.

    Args:
        counted_lengths_S: int [S], tokens of each completion that count (`TrainBatch.counted_lengths_S`); 0 for a
            sequence that does not.
    """
    num_sequences = int((counted_lengths_S > 0).sum())
    if kind == "token_mean":
        count = int(counted_lengths_S.sum())
    elif kind == "sequence_mean":
        count = num_sequences
    elif kind == "fixed_horizon":
        count = num_sequences * max_completion_tokens
    else:
        raise _unknown_aggregation(kind)
    return float(max(count, 1))


# ---------------------------------------------------------------------------------------------------------------------
# Shared by the losses


def _clipped_surrogate(
    log_ratio_BT: torch.Tensor, inputs: LossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, Metrics]:
    """`clipped` for a given log-ratio (0 outside the mask, not yet clamped), of tokens or of whole sequences."""
    advantages_BT = _advantages(inputs)
    ratio_BT = _clamped(log_ratio_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)

    # outside the mask the advantage is 0, so none of these holds there
    low_BT = (ratio_BT < 1 - config.clip_low) & (advantages_BT < 0)
    high_BT = (ratio_BT > 1 + config.clip_high) & (advantages_BT > 0)
    cut_BT = low_BT | high_BT
    metrics = {"clip_low_share": low_BT, "clip_high_share": high_BT, "clip_share": cut_BT}
    if config.dual_clip > 1:
        dual_BT = (ratio_BT > config.dual_clip) & (advantages_BT < 0)
        objective_BT = objective_BT.where(~dual_BT, config.dual_clip * advantages_BT)
        metrics["dual_clip_share"] = dual_BT
        cut_BT = cut_BT | dual_BT
    held_BT = log_ratio_BT.detach().abs() > MAX_LOG_RATIO
    metrics |= _ratio_metrics(ratio_BT, inputs)
    return -objective_BT, {**metrics, "active_share": (advantages_BT != 0) & ~cut_BT & ~held_BT}


def _weighted_logprobs(weights_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-weight * A * logp, 0 outside the mask."""
    return -weights_BT * _advantages(inputs) * inputs.logprobs_BT.where(inputs.mask_BT, 0)


def _ratio_metrics(ratio_BT: torch.Tensor, inputs: LossInputs) -> Metrics:
    ratio_BT = ratio_BT.detach().where(inputs.mask_BT, 0)
    return {"ratio_mean": ratio_BT, "ratio_max": ratio_BT}


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return _masked_difference(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)


def _advantages(inputs: LossInputs) -> torch.Tensor:
    return inputs.advantages_BT.where(inputs.mask_BT, 0)


def _masked_difference(above_BT: torch.Tensor, below_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log(above / below); 0 outside the mask whatever stands there, and so is its gradient."""
    return (above_BT - below_BT).where(mask_BT, 0)


def _clamped(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _unknown_aggregation(kind: str) -> ValueError:
    return ValueError(f"aggregation={kind!r} is unknown; use 'token_mean', 'sequence_mean' or 'fixed_horizon'")
