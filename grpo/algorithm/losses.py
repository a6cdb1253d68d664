"""Per-token policy losses, the built-in ones and how a user's own is loaded.

Everything is `[B, T]`, aligned with the position that *predicts* a token, and pure. A policy loss is

    loss(inputs: LossInputs, config: AlgorithmConfig, **options) -> (loss_BT, metrics)

whose options are keyword arguments with defaults, set by `algorithm.loss_options`. To try another algorithm, write such
a function in a file of your own and set `algorithm.loss` to `path/file.py:function`.

Metrics are detached `[B, T]` tensors (bool or float) of per-token values; outside the mask they are 0 or False, but
are not looked at. They are logged as `loss/NAME`: the mean over the loss tokens of the whole step, or the maximum (0 if
all are negative) where the name ends in `max`. So a metric does not depend on how an update was split. A loss returns
the same names each time it is called.
"""

import inspect
from collections.abc import Callable

import torch

from grpo.algorithm.inputs import MAX_LOG_RATIO, LossInputs, Metrics, clamped, masked_log_ratio, sequence_means
from grpo.config import AlgorithmConfig, check_loss_name
from grpo.config.user_files import check_options, load_function

PolicyLoss = Callable[[LossInputs, AlgorithmConfig], tuple[torch.Tensor, Metrics]]


def clipped(inputs: LossInputs, config: AlgorithmConfig, *, dual_clip: float = 0.0) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = policy / old.

    PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7), taken over by GRPO (Shao et al. 2024, arXiv:2402.03300,
    eq. 3), Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) and, with clip_high above clip_low, DAPO (Yu et al. 2025,
    arXiv:2503.14476, eq. 8): the three differ in clips, advantages and aggregation (`config.PAPER_DEFAULTS`), not here.
    With `dual_clip` above 1, where A < 0 the objective is at least dual_clip * A (Ye et al. 2020, arXiv:1912.09729).
    Beyond a log-ratio of +-20 the ratio is held constant, so such a token has no gradient.

    Metrics, each of a token: `clip_low_frac` (ratio below 1 - clip_low and A < 0: the gradient is cut),
    `clip_high_frac` (ratio above 1 + clip_high and A > 0), `clip_frac` (either), with dual_clip `dual_clip_frac`
    (ratio above dual_clip and A < 0), `ratio_mean`, `ratio_max`, and `active_frac` (it has a gradient: A is not 0 and
    nothing cut it).
    """
    return _clipped_surrogate(_log_ratio(inputs), inputs, config, dual_clip)


def gspo(inputs: LossInputs, config: AlgorithmConfig, *, dual_clip: float = 0.0) -> tuple[torch.Tensor, Metrics]:
    """GSPO: `clipped` with one ratio for a whole sequence, exp(mean over its loss tokens of log policy / old).

    Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7, in its token form (GSPO-token): the ratio at a token is
    sg[s] * exp(logp - sg[logp]), where s is the sequence's ratio and sg stops the gradient. Its value is s, its
    gradient at every token s, so with `sequence_mean` it is GSPO's. dual_clip as in `clipped`.

    Metrics: those of `clipped`, of the sequence's ratio at each of its tokens.
    """
    logprobs_BT = inputs.logprobs_BT.where(inputs.loss_mask_BT, 0)
    means_BT = sequence_means(_log_ratio(inputs).detach(), inputs)
    # the bracket is exactly 0, so the value is the mean's
    return _clipped_surrogate(means_BT + (logprobs_BT - logprobs_BT.detach()), inputs, config, dual_clip)


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """CISPO: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * logp; sg stops the gradient.

    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5. The weight is clipped, not the surrogate, so every token
    with an advantage keeps a gradient.

    Metrics, each of a token: `clip_low_frac` and `clip_high_frac` (the weight is held at its lower or upper bound,
    whatever the sign of A), `clip_frac` (either), `ratio_mean`, `ratio_max` (before the clip), `active_frac` (A is
    not 0).
    """
    ratio_BT = clamped(_log_ratio(inputs)).detach().exp()
    weights_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    low_BT = (ratio_BT < 1 - config.clip_low) & inputs.loss_mask_BT
    high_BT = (ratio_BT > 1 + config.clip_high) & inputs.loss_mask_BT
    return _weighted_logprobs(weights_BT, inputs), {
        "clip_low_frac": low_BT,
        "clip_high_frac": high_BT,
        "clip_frac": low_BT | high_BT,
        **_ratio_metrics(ratio_BT, inputs),
        "active_frac": (_advantages(inputs) != 0) & (weights_BT != 0),
    }


def sapo(
    inputs: LossInputs,
    config: AlgorithmConfig,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[torch.Tensor, Metrics]:
    """SAPO: -f(ratio) * A with the soft gate f = 4 / tau * p, p = sigmoid(tau * (ratio - 1)).

    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347. tau is temperature_positive where
    A > 0 and temperature_negative elsewhere. The gradient by logp is -4 p (1 - p) * ratio * A: on-policy that of
    the plain policy gradient, and it fades smoothly on either side. Beyond a log-ratio of +-20 there is none.

    Metrics, each of a token: `gate_mean`, the gradient's weight 4 p (1 - p) (1 at ratio 1, 0 where the gate is shut),
    `ratio_mean`, `ratio_max`, `active_frac` (A is not 0, and the gradient's weight not 0 in this precision).
    """
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ValueError(f"{temperature_positive=} and {temperature_negative=} must be above 0")
    log_ratio_BT = _log_ratio(inputs)
    advantages_BT = _advantages(inputs)
    ratio_BT = clamped(log_ratio_BT).exp()
    negative_BT = torch.full_like(ratio_BT, temperature_negative)
    temperatures_BT = negative_BT.masked_fill(advantages_BT > 0, temperature_positive)
    gate_BT = torch.sigmoid(temperatures_BT * (ratio_BT - 1))
    loss_BT = -4 / temperatures_BT * gate_BT * advantages_BT

    gate_BT = gate_BT.detach()
    weights_BT = 4 * gate_BT * (1 - gate_BT)
    held_BT = log_ratio_BT.detach().abs() > MAX_LOG_RATIO
    return loss_BT, {
        "gate_mean": weights_BT.where(inputs.loss_mask_BT, 0),
        **_ratio_metrics(ratio_BT, inputs),
        "active_frac": (advantages_BT != 0) & (weights_BT > 0) & ~held_BT,
    }


def reinforce(
    inputs: LossInputs, config: AlgorithmConfig, *, max_importance_weight: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """The policy gradient as it is: -w * A * logp, w = 1 (Williams 1992, "Simple statistical gradient-following").

    With max_importance_weight above 0, w is the ratio policy / old without gradient, cut off there (truncated
    importance sampling, Ionides 2008); logp's gradient is never cut.

    Metrics, each of a token: with max_importance_weight `weight_cut_frac` (the ratio was above it), `ratio_mean`,
    `ratio_max` (before the cut), `active_frac` (A is not 0).
    """
    if max_importance_weight < 0:
        raise ValueError(f"max_importance_weight={max_importance_weight} must not be negative; 0 leaves the weight out")
    ratio_BT = clamped(_log_ratio(inputs)).detach().exp()
    weights_BT = torch.ones_like(ratio_BT)
    metrics = {}
    if max_importance_weight > 0:
        weights_BT = ratio_BT.clamp(max=max_importance_weight)
        metrics["weight_cut_frac"] = (ratio_BT > max_importance_weight) & inputs.loss_mask_BT
    metrics |= _ratio_metrics(ratio_BT, inputs)
    return _weighted_logprobs(weights_BT, inputs), {**metrics, "active_frac": _advantages(inputs) != 0}


LOSSES: dict[str, PolicyLoss] = {
    "grpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def configured_loss(config: AlgorithmConfig) -> Callable[[LossInputs], tuple[torch.Tensor, Metrics]]:
    """The loss that the config names, with its options bound and its metrics named `loss/...`.

    Raises what `load_loss` and `check_options` raise.
    """
    config = config.resolved
    function, options = load_loss(config.loss), dict(config.loss_options)
    check_options(function, options, f"loss {config.loss}", "algorithm.loss_options")

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        loss_BT, metrics = function(inputs, config, **options)
        return loss_BT, {f"loss/{name}": value_BT for name, value_BT in metrics.items()}

    return loss


def load_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or the user's function written `path/file.py:function`.

    Raises ValueError if there is none or it does not take two arguments, and whatever the user's file raises.
    """
    if name in LOSSES:
        return LOSSES[name]
    check_loss_name(name)
    function = load_function(name, "loss")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"loss {name} cannot be called with two arguments: {error}; "
            "write it as def loss(inputs: LossInputs, config: AlgorithmConfig, *, option=1.0)"
        ) from error
    return function


def check_loss_output(output: tuple[torch.Tensor, Metrics], inputs: LossInputs, name: str) -> None:
    """Raise ValueError unless a loss returned a floating [B, T] loss and a dict of detached [B, T] metrics.

    The loss must depend on `logprobs_BT`. Looks at types and shapes only, so it never waits for the device.
    """
    shape = tuple(inputs.loss_mask_BT.shape)
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
    for key, value_BT in metrics.items():
        if not (isinstance(key, str) and isinstance(value_BT, torch.Tensor) and value_BT.shape == shape):
            raise ValueError(
                f"metric {key!r} of loss {name} is {_describe(value_BT)}; return one value per position, shape {shape}"
            )
        if value_BT.requires_grad:
            raise ValueError(f"metric {key!r} of loss {name} carries a gradient; detach it")


def try_loss(config: AlgorithmConfig) -> None:
    """Load the loss and call it once on three tokens, so that a mistake in a user's file shows before any GPU is used.

    Raises what `configured_loss`, `check_loss_output` and the user's function raise.
    """
    inputs = LossInputs(
        logprobs_BT=torch.tensor([[-1.0, -2.0, -0.5, 0.0]], requires_grad=True),
        old_logprobs_BT=torch.tensor([[-1.1, -1.9, -0.5, 0.0]]),
        generator_logprobs_BT=torch.tensor([[-1.1, -2.1, -0.5, 0.0]]),
        ref_logprobs_BT=torch.tensor([[-1.2, -1.8, -0.4, 0.0]]) if config.kl_coef > 0 else None,
        advantages_BT=torch.tensor([[1.0, 1.0, -1.0, 0.0]]),
        loss_mask_BT=torch.tensor([[True, True, True, False]]),
        sequence_BT=torch.tensor([[0, 0, 1, -1]]),
        num_loss_tokens_BT=torch.tensor([[2, 2, 1, 1]]),
        num_sequences=2,
    )
    output = configured_loss(config)(inputs)
    check_loss_output(output, inputs, config.loss)
    output[0].sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Shared by the losses


def _clipped_surrogate(
    log_ratio_BT: torch.Tensor, inputs: LossInputs, config: AlgorithmConfig, dual_clip: float
) -> tuple[torch.Tensor, Metrics]:
    """`clipped` for a given log-ratio (0 outside the mask, not yet clamped), of tokens or of whole sequences."""
    if dual_clip and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1, or 0 to turn it off")
    advantages_BT = _advantages(inputs)
    ratio_BT = clamped(log_ratio_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)

    # outside the mask the advantage is 0, so none of these holds there
    low_BT = (ratio_BT < 1 - config.clip_low) & (advantages_BT < 0)
    high_BT = (ratio_BT > 1 + config.clip_high) & (advantages_BT > 0)
    cut_BT = low_BT | high_BT
    metrics = {"clip_low_frac": low_BT, "clip_high_frac": high_BT, "clip_frac": cut_BT}
    if dual_clip > 1:
        dual_BT = (ratio_BT > dual_clip) & (advantages_BT < 0)
        objective_BT = objective_BT.where(~dual_BT, dual_clip * advantages_BT)
        metrics["dual_clip_frac"] = dual_BT
        cut_BT = cut_BT | dual_BT
    held_BT = log_ratio_BT.detach().abs() > MAX_LOG_RATIO
    metrics |= _ratio_metrics(ratio_BT, inputs)
    return -objective_BT, {**metrics, "active_frac": (advantages_BT != 0) & ~cut_BT & ~held_BT}


def _weighted_logprobs(weights_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """-weight * A * logp, 0 outside the mask."""
    return -weights_BT * _advantages(inputs) * inputs.logprobs_BT.where(inputs.loss_mask_BT, 0)


def _ratio_metrics(ratio_BT: torch.Tensor, inputs: LossInputs) -> Metrics:
    ratio_BT = ratio_BT.detach().where(inputs.loss_mask_BT, 0)
    return {"ratio_mean": ratio_BT, "ratio_max": ratio_BT}


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.loss_mask_BT)


def _advantages(inputs: LossInputs) -> torch.Tensor:
    return inputs.advantages_BT.where(inputs.loss_mask_BT, 0)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
