"""A published loss as a file: PPO's clip, with a second bound for mistakes (Ye et al. 2020, arXiv:1912.09729).

FILE=configs/examples/dual_clip.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:dual_clip --algorithm.aggregation token_mean
"""

import torch

from grpo.algorithm.inputs import clamped
from grpo.algorithm.losses import clip_metrics


def dual_clip(x, config, *, bound=3.0):
    """Return the clipped surrogate, and `bound` * A where A < 0 and the ratio is above `bound`.

    Metrics: those of the surrogate and `dual_clip_frac`, tokens that the second bound cut.
    """
    if not bound > 1:
        raise ValueError(f"{bound=} must be above 1")
    ratio_BT = clamped(x.logprobs_BT - x.old_logprobs_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_BT = -torch.minimum(ratio_BT * x.advantages_BT, clipped_BT * x.advantages_BT)
    cut_BT = (ratio_BT.detach() > bound) & (x.advantages_BT < 0)
    metrics = clip_metrics(ratio_BT, x, config)
    metrics["dual_clip_frac"] = cut_BT
    metrics["active_frac"] = metrics["active_frac"] & ~cut_BT
    return loss_BT.where(~cut_BT, -bound * x.advantages_BT), metrics
