"""The section of the configuration about the algorithm, and what the papers use; see fields.py."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from grpo.config.bounds import Above, AtLeast, AtMost
from grpo.config.kinds import Options

Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]
Advantages = Literal["group_std", "group_mean", "batch_std", "rloo", "none"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a gradient. A field that is None takes what the paper of `loss` uses (PAPER_DEFAULTS)."""

    loss: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, sapo, reinforce, or your own `path/file.py:function`."""
    advantages: Advantages | None = None
    """How a reward r becomes an advantage. group_std: (r - mean) / std of its group; group_mean: r - mean;
    batch_std: (r - mean) / std of all rewards of the step; rloo: r - mean of the others in its group;
    none: r as it is."""
    aggregation: Aggregation | None = None
    """How the losses of tokens become one number. token_mean: their mean over the whole update;
    sequence_mean: mean over sequences of the mean over a sequence's tokens;
    fixed_horizon: mean over sequences of the sum over a sequence's tokens / generator.max_completion_tokens."""
    clip_low: Annotated[float, AtLeast(0), AtMost(1)] | None = None
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, AtLeast(0)] | None = None
    """The ratio is clipped from above at 1 + clip_high."""
    loss_options: Options = field(default_factory=dict)
    """Keyword arguments of the loss, one JSON object.
    grpo, dr_grpo, dapo, gspo: '{"dual_clip": 3}'; reinforce: '{"max_importance_weight": 2}';
    sapo: '{"temperature_positive": 1, "temperature_negative": 1.05}'; your own function: what it takes."""
    kl_coef: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the KL to the reference; 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2_gradient"] = "k3"
    """Estimate of that KL per token, where d = log policy - log reference.
    k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d; k3_k2_gradient: the value of k3 with the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes. loss: a token's is added to its loss; reward: a completion's sum is taken off its reward."""
    distill_coef: Annotated[float, AtLeast(0)] = 0.0
    """On-policy distillation: weight of log teacher - log policy, which is added to each token's advantage.
    The teacher is `model.reference_path`; 0 is none. Rewards may be left out (`--reward.functions` with nothing)."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss; above 0 favours exploration."""
    mask_truncated: bool = False
    """Exclude truncated completions from the loss (DAPO's overlong filtering); the group still compares with them."""
    num_mini_batches: Annotated[int, AtLeast(1)] = 1
    """Mini-batches into which a step's groups are split, each one optimizer update."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over a step's groups, so a step has `num_mini_batches` x `num_epochs` updates."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Denominator of the ratio. policy: the trainer's log-probs at the start of the step; generator: those sampled."""
    importance_correction: Literal["none", "truncate", "mask_tokens", "mask_sequences"] | None = None
    """Makes up for a generator that differs from the policy, by weights w = policy / generator.
    none: no correction; truncate: a token's loss x min(w, high);
    mask_tokens: x w, or x 0 where w is not within low and high;
    mask_sequences: x 0 for all of a sequence whose geometric mean of w is not within low and high.
    None takes truncate if `old_logprobs` is policy, else none."""
    importance_correction_low: Annotated[float, AtLeast(0)] = 0.5
    """mask_tokens, mask_sequences: smallest w that is not masked."""
    importance_correction_high: Annotated[float, Above(0)] = 2.0
    """truncate: largest w a token gets; mask_tokens, mask_sequences: largest w that is not masked."""


# What a loss needs, in addition to its formula, to be the algorithm of its paper
PAPER_DEFAULTS = {
    "grpo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"advantages": "group_mean", "aggregation": "fixed_horizon", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"advantages": "group_std", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1 has no lower bound and does not say its upper one; 1 + 4 is that of ScaleRL (arXiv:2510.13786)
    "cispo": {"advantages": "group_std", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"advantages": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce": {"advantages": "group_mean", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2},
}
OWN_LOSS_DEFAULTS = PAPER_DEFAULTS["grpo"]  # of a loss from a user's file


def check_loss_name(name: str) -> None:
    """Raise ValueError unless it is a built-in loss or looks like a function in a file."""
    if name not in PAPER_DEFAULTS and ":" not in name:
        raise ValueError(
            f"algorithm.loss={name!r} is unknown; use {', '.join(PAPER_DEFAULTS)}, or write your own as "
            "path/file.py:function"
        )
