"""A method of one's own: REINFORCE that forgives mistakes, with advantages that one lucky completion does not spoil.

FILE=configs/examples/my_method.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:gentle --algorithm.advantages $FILE:over_median
"""

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


def over_median(x):
    """Return each reward less the median of its group [P, G].

    `x` has rewards_PG and has_PG, which rewards there are; parts_FPG, has_FPG and weights_F of the reward functions;
    and `batch`, the step's tokens. An advantage for each token, [N], may be returned too.
    """
    medians_P1 = x.rewards_PG.where(x.has_PG, torch.nan).nanmedian(dim=1, keepdim=True).values
    return x.rewards_PG - medians_P1
