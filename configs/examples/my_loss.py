"""REINFORCE in which a mistake weighs half, and tokens the policy is sure of are left alone."""

import torch


def gentle(inputs, config, *, sure=0.999):
    """Loss of each token [B, T], and what to log about it.

    `inputs` has logprobs_BT (with gradient), old_logprobs_BT, generator_logprobs_BT, ref_logprobs_BT (None without a
    reference), advantages_BT, loss_mask_BT (the tokens that count), sequence_BT and num_loss_tokens_BT; `config` is the
    section `algorithm`; `sure`, a probability, comes from `--algorithm.loss-options`. Means are not taken here.
    """
    logprobs_BT = inputs.logprobs_BT.where(inputs.loss_mask_BT, 0)
    weights_BT = torch.where(inputs.advantages_BT < 0, 0.5, 1.0)
    sure_BT = logprobs_BT.detach().exp() > sure
    loss_BT = -weights_BT * inputs.advantages_BT * logprobs_BT
    metrics = {"weight_mean": weights_BT, "sure_frac": sure_BT}  # logged as loss/weight_mean, ...: means over tokens
    return loss_BT.where(inputs.loss_mask_BT & ~sure_BT, 0), metrics
