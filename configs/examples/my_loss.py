"""REINFORCE in which a mistake weighs half, and tokens the policy is sure of are left alone."""

import torch


def gentle(x, config, *, sure=0.999):
    """Return the loss of each token [B, T], and what to log about it.

    `x` has logprobs_BT (with gradient), old_logprobs_BT, generator_logprobs_BT, ref_logprobs_BT (None without a
    reference), advantages_BT, entropy_BT, all 0 where loss_mask_BT says that a token does not count, sequence_BT and
    num_loss_tokens_BT; `config` is the section `algorithm`; `sure`, a probability, comes from
    `--algorithm.loss-options`. Means are not taken here.
    """
    weights_BT = torch.where(x.advantages_BT < 0, 0.5, 1.0)
    sure_BT = x.logprobs_BT.detach().exp() > sure
    loss_BT = -weights_BT * x.advantages_BT * x.logprobs_BT
    metrics = {"weight_mean": weights_BT, "sure_frac": sure_BT}  # logged as loss/weight_mean, ...: means over tokens
    return loss_BT.where(~sure_BT, 0), metrics
