"""REINFORCE in which a mistake weighs half, and tokens the policy is sure of are left alone."""

import torch

SURE = 0.999  # probability


def gentle(inputs, config):
    """Loss of each token [B, T], and what to log about it.

    `inputs` has logprobs_BT (with gradient), old_logprobs_BT, advantages_BT, mask_BT (the tokens that count),
    sequence_BT and lengths_BT; `config` is the section `algorithm`. Sums and means are not made here.
    """
    logprobs_BT = inputs.logprobs_BT.where(inputs.mask_BT, 0)
    weights_BT = torch.where(inputs.advantages_BT < 0, 0.5, 1.0)
    sure_BT = logprobs_BT.detach().exp() > SURE
    loss_BT = -weights_BT * inputs.advantages_BT * logprobs_BT
    metrics = {"weight_mean": weights_BT, "sure_share": sure_BT}  # means over the tokens that count
    return loss_BT.where(inputs.mask_BT & ~sure_BT, 0), metrics
