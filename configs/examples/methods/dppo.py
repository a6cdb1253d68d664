"""DPPO: tokens leave the loss by their distance from the sampler, not by a ratio (Qi et al. 2026, arXiv:2602.04879).

FILE=configs/examples/methods/dppo.py
FLAGS="--algorithm.advantages group_mean --algorithm.aggregation fixed_horizon --algorithm.old-logprobs generator"
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:dppo $FLAGS

The loss is -ratio * A, without the tokens that would take the policy further out of its trust region. The ratio is
policy / old, and old is the sampler. A token is left out if ratio > 1 and A > 0, or ratio < 1 and A < 0, while the two
distributions of "this token or another" differ by more than `threshold`. So a rare token may change its ratio many
times over, and a likely one less than a clip would allow.
"""

import torch

from grpo.algorithm.inputs import clamped
from grpo.algorithm.losses import is_held

THRESHOLDS = {"tv": 0.15, "kl": 0.05}  # by divergence, the paper's


def dppo(x, config, *, divergence="tv", threshold=None):
    """Return the loss of the tokens within the trust region.

    With p the policy's probability of the token and q the old one, `divergence` tv is |p - q|, and kl is
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Metrics: `clip_low_frac` (left out, A < 0), `clip_high_frac` (left
    out, A > 0), `clip_frac` (either), `divergence_mean`, `ratio_mean`, `ratio_max`, `active_frac` (A is not 0, and it
    is neither left out nor held at the largest ratio).
    """
    if divergence not in THRESHOLDS:
        raise ValueError(f"{divergence=} is unknown; use tv or kl")
    if threshold is None:
        threshold = THRESHOLDS[divergence]
    if not threshold > 0:
        raise ValueError(f"{threshold=} must be above 0")
    log_ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT)
    ratio_BT = log_ratio_BT.exp()
    logprobs_BT = x.logprobs_BT.detach().clamp(max=0)
    old_BT = x.old_logprobs_BT.clamp(max=0)
    if divergence == "tv":
        divergence_BT = (logprobs_BT.exp() - old_BT.exp()).abs()
    else:
        other_BT, old_other_BT = ((-p.expm1()).clamp(min=torch.finfo(p.dtype).tiny) for p in (logprobs_BT, old_BT))
        divergence_BT = old_other_BT * (old_other_BT.log() - other_BT.log()) - old_BT.exp() * log_ratio_BT.detach()
    far_BT = divergence_BT > threshold
    low_BT = far_BT & (log_ratio_BT.detach() < 0) & (x.advantages_BT < 0)
    high_BT = far_BT & (log_ratio_BT.detach() > 0) & (x.advantages_BT > 0)
    cut_BT = low_BT | high_BT
    loss_BT = (-ratio_BT * x.advantages_BT).where(~cut_BT, 0)
    ratio_BT = ratio_BT.detach()
    return loss_BT, {
        "divergence_mean": divergence_BT,
        "clip_low_frac": low_BT,
        "clip_high_frac": high_BT,
        "clip_frac": cut_BT,
        "ratio_mean": ratio_BT,
        "ratio_max": ratio_BT,
        "active_frac": (x.advantages_BT != 0) & ~cut_BT & ~is_held(ratio_BT),
    }
