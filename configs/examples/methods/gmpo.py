"""GMPO: the geometric mean of a sequence's clipped ratios in place of their mean (Zhao et al. 2025, arXiv:2507.20673).

FILE=configs/examples/methods/gmpo.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:gmpo

The loss of a sequence is -A * exp(mean of log c over its loss tokens). Here c is the token's ratio policy / old, cut
off at exp(log_clip) where A is above 0, and below exp(-log_clip) where A is below 0. An outlier among the ratios then
moves a sequence less than in a sum.
"""

import torch

from grpo.algorithm.inputs import clamped, sequence_means


def gmpo(x, config, *, log_clip=0.4):
    """Return a loss whose mean over the tokens of a sequence has the value and the gradient of the sequence's loss.

    So the aggregation must be `sequence_mean`. The paper's clip, from exp(-0.4) to exp(0.4), is wider than GRPO's.
    Metrics: `clip_low_frac`, `clip_high_frac`, `clip_frac` (tokens whose ratio was cut, so that they have no gradient),
    `ratio_mean`, `ratio_max` (of tokens, before the cut), `active_frac` (A is not 0 and the ratio was not cut).
    """
    log_ratios_BT = clamped(x.logprobs_BT - x.old_logprobs_BT)
    high_BT = (log_ratios_BT > log_clip) & (x.advantages_BT > 0)
    low_BT = (log_ratios_BT < -log_clip) & (x.advantages_BT < 0)
    cut_BT = torch.where(high_BT, log_clip, torch.where(low_BT, -log_clip, log_ratios_BT))
    means_BT = sequence_means(cut_BT.detach(), x)
    # the bracket is exactly 0, so the value is the mean's
    ratios_BT = (means_BT + (cut_BT - cut_BT.detach())).exp()
    token_ratios_BT = log_ratios_BT.detach().exp()
    return -ratios_BT * x.advantages_BT, {
        "clip_low_frac": low_BT,
        "clip_high_frac": high_BT,
        "clip_frac": low_BT | high_BT,
        "ratio_mean": token_ratios_BT,
        "ratio_max": token_ratios_BT,
        "active_frac": (x.advantages_BT != 0) & ~(low_BT | high_BT),
    }
