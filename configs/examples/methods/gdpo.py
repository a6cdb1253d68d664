"""GDPO: each reward function is scaled in its group before the weighted sum (Liu et al. 2026, arXiv:2601.05242).

FILE=configs/examples/methods/gdpo.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.advantages $FILE:gdpo

Each function's (value - mean) / (std + 1e-4) of the group is weighted and summed. So functions of different scale or
spread keep their weights, while in a sum of rewards one would drown the other. The sums are divided by (std of all sums
of the step + 1e-4); their mean is already 0.
"""

import torch

from grpo.algorithm.advantages import group_mean_std


def gdpo(x):
    """Return the advantages [P, G]. A None is left out of its function's statistics and adds 0 to its completion's sum.

    Raises ValueError if the rewards hold a KL penalty, which is part of no reward function.
    """
    weighted_PG = torch.einsum("f,fpg->pg", x.weights_F, x.parts_FPG).where(x.has_PG, 0)
    if not torch.allclose(x.rewards_PG.where(x.has_PG, 0), weighted_PG, rtol=1e-4, atol=1e-5):
        raise ValueError("gdpo sees reward functions, and no penalty of algorithm.kl_in reward; set kl_in loss")
    mean, std = group_mean_std(x.parts_FPG.flatten(0, 1), x.has_FPG.flatten(0, 1))  # [F * P, 1]
    scaled_FPG = ((x.parts_FPG.flatten(0, 1) - mean) / (std + 1e-4)).view(x.parts_FPG.shape).where(x.has_FPG, 0)
    sums_PG = torch.einsum("f,fpg->pg", x.weights_F, scaled_FPG)
    return sums_PG / ((sums_PG.square().sum() / (x.has_PG.sum() - 1).clamp(min=1)).sqrt() + 1e-4)
