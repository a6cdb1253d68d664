"""Policy losses of tokens, except GRPO's clipped surrogate, which is in train_grpo.py; and how your own is loaded.

Everything is `[B, T]`, aligned with the position that *predicts* a token, and pure. A policy loss is

    loss(x: LossInputs, config: AlgorithmConfig, **options) -> (loss_BT, metrics)

whose options are keyword arguments with defaults, set by `algorithm.loss_options`. To try another algorithm, write such
a function in a file of your own and set `algorithm.loss` to `path/file.py:function`.

Metrics are detached `[B, T]` tensors (bool or float) of per-token values. They are logged as `loss/NAME`: the mean over
the loss tokens of the whole step, or the maximum (0 if all are negative) where the name ends in `max`. So a metric does
not depend on how an update was split. A loss returns the same names each time it is called.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo.algorithm.inputs import MAX_LOG_RATIO, LossInputs, Metrics, clamped, sequence_means
from grpo.config import AlgorithmConfig
from grpo.config.user_files import check_options, load_function

# The losses that are the clipped surrogate of train_grpo.py: PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7),
# taken over by GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) and, with
# clip_high above clip_low, DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 8). They differ in clips, advantages and
# aggregation (`config.PAPER_DEFAULTS`).
CLIPPED_LOSSES = ("grpo", "dr_grpo", "dapo")
# A ratio above this, or below its inverse, was clamped (up to the rounding of exp)
HELD_RATIO = math.exp(MAX_LOG_RATIO) * (1 - 1e-6)


def clip_metrics(ratio_BT: Tensor, x: LossInputs, config: AlgorithmConfig) -> Metrics:
    """Return the clipped surrogate's metrics of each token. The ratio is the token's, or its whole sequence's.

    `clip_low_frac` (ratio below 1 - clip_low and A < 0: the gradient is cut), `clip_high_frac` (ratio above
    1 + clip_high and A > 0), `clip_frac` (either), `ratio_mean`, `ratio_max`, and `active_frac` (it has a gradient: A
    is not 0 and nothing cut it; at a log-ratio of +-20 the ratio is held constant).
    """
    ratio_BT = ratio_BT.detach()
    low_BT = (ratio_BT < 1 - config.clip_low) & (x.advantages_BT < 0)
    high_BT = (ratio_BT > 1 + config.clip_high) & (x.advantages_BT > 0)
    return _cut_metrics(ratio_BT, x, low_BT, high_BT)


def _cut_metrics(ratio_BT: Tensor, x: LossInputs, low_BT: Tensor, high_BT: Tensor) -> Metrics:
    """Return the metrics of a ratio without gradient whose tokens are cut where `low_BT` or `high_BT` is True."""
    cut_BT = low_BT | high_BT
    return {
        "clip_low_frac": low_BT,
        "clip_high_frac": high_BT,
        "clip_frac": cut_BT,
        "ratio_mean": ratio_BT,
        "ratio_max": ratio_BT,
        "active_frac": (x.advantages_BT != 0) & ~cut_BT & ~is_held(ratio_BT),
    }


def gspo(x: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Compute GSPO: the surrogate with one ratio per sequence, exp(mean of log policy / old over its loss tokens).

    Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7, in its token form (GSPO-token): the ratio at a token is
    sg[s] * exp(logp - sg[logp]), where s is the sequence's ratio and sg stops the gradient. Its value is s, its
    gradient at every token s, so with `sequence_mean` it is GSPO's.

    Metrics: those of the surrogate, of the sequence's ratio at each of its tokens.
    """
    means_BT = sequence_means((x.logprobs_BT - x.old_logprobs_BT).detach(), x)
    # the bracket is exactly 0, so the value is the mean's
    ratio_BT = clamped(means_BT + (x.logprobs_BT - x.logprobs_BT.detach())).exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_BT = -torch.minimum(ratio_BT * x.advantages_BT, clipped_BT * x.advantages_BT)
    return loss_BT, clip_metrics(ratio_BT, x, config)


def cispo(x: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Compute CISPO: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * logp; sg stops the gradient.

    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5. The weight is clipped, not the surrogate, so every token
    with an advantage keeps a gradient.

    Metrics, each of a token: `clip_low_frac` and `clip_high_frac` (the weight is held at its lower or upper bound,
    whatever the sign of A), `clip_frac` (either), `ratio_mean`, `ratio_max` (before the clip), `active_frac`
    (neither A nor the weight is 0).
    """
    ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT).detach().exp()
    factors_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    low_BT = ratio_BT < 1 - config.clip_low
    high_BT = ratio_BT > 1 + config.clip_high
    metrics = _cut_metrics(ratio_BT, x, low_BT, high_BT)
    metrics["active_frac"] = (x.advantages_BT != 0) & (factors_BT != 0)
    return -factors_BT * x.advantages_BT * x.logprobs_BT, metrics


def sapo(
    x: LossInputs,
    config: AlgorithmConfig,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """Compute SAPO: -f(ratio) * A with the soft gate f = 4 / tau * p, p = sigmoid(tau * (ratio - 1)).

    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347. tau is temperature_positive where
    A > 0 and temperature_negative elsewhere. The gradient by logp is -4 p (1 - p) * ratio * A: on-policy that of
    the plain policy gradient, and it fades smoothly on either side. Beyond a log-ratio of +-20 there is none.

    Metrics, each of a token: `gate_mean`, the gradient's weight 4 p (1 - p) (1 at ratio 1, 0 where the gate is shut),
    `ratio_mean`, `ratio_max`, `active_frac` (A is not 0, and the gradient's weight not 0 in this precision).
    """
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ValueError(f"{temperature_positive=} and {temperature_negative=} must be above 0")
    ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT).exp()
    negative_BT = torch.full_like(ratio_BT, temperature_negative)
    temperatures_BT = negative_BT.masked_fill(x.advantages_BT > 0, temperature_positive)
    gate_BT = torch.sigmoid(temperatures_BT * (ratio_BT - 1))
    loss_BT = -4 / temperatures_BT * gate_BT * x.advantages_BT

    ratio_BT = ratio_BT.detach()
    gate_BT = gate_BT.detach()
    factors_BT = 4 * gate_BT * (1 - gate_BT)
    return loss_BT, {
        "gate_mean": factors_BT,
        "ratio_mean": ratio_BT,
        "ratio_max": ratio_BT,
        "active_frac": (x.advantages_BT != 0) & (factors_BT > 0) & ~is_held(ratio_BT),
    }


def reinforce(x: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Compute the plain policy gradient: -A * logp (Williams 1992, "Simple statistical gradient-following").

    With a truncated ratio in front of it, it is `cispo`, whose clip_low of 1 leaves the lower bound out.

    Metrics, each of a token: `ratio_mean`, `ratio_max`, `active_frac` (A is not 0).
    """
    ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT).detach().exp()
    metrics = {"ratio_mean": ratio_BT, "ratio_max": ratio_BT, "active_frac": x.advantages_BT != 0}
    return -x.advantages_BT * x.logprobs_BT, metrics


LOSSES = {
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def named_loss(config: AlgorithmConfig) -> Callable[[LossInputs], tuple[Tensor, Metrics]]:
    """Return the loss that the config names, with its options bound.

    Raises what `load_function` and `check_options` raise.
    """
    function = LOSSES.get(config.loss) or load_function(config.loss, "loss")
    options = dict(config.loss_options)
    check_options(function, options, f"loss {config.loss}", "algorithm.loss_options")
    return lambda x: function(x, config, **options)


def is_held(ratio_BT: Tensor) -> Tensor:
    """Return bool [B, T]: the log-ratio was clamped, so its token has no gradient."""
    return (ratio_BT > HELD_RATIO) | (ratio_BT < 1 / HELD_RATIO)
