"""VESPO: a soft weight of whole sequences by their ratio (Shen et al. 2026, arXiv:2602.10693).

FILE=configs/examples/methods/vespo.py
FLAGS="--algorithm.aggregation token_mean --algorithm.old-logprobs generator"
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:vespo $FLAGS

W is the probability of a sequence under the policy divided by that under its sampler, a product over its loss tokens.
Its loss is -phi(W) * A * logp at each token, with phi(W) = W^k * exp(lambda * (1 - W)), without gradient: 1 where the
two agree, and near 0 far away on either side. There is no clip, and no mean over the length.
"""

import torch

from grpo.algorithm.inputs import clamped, sequence_means


def vespo(x, config, *, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0):
    """Return -phi * A * logp. The paper's k and lambda differ where A is at least 0 and where it is below.

    With `old_logprobs` generator, W has the sampler's own log-probs, so older weights and other kernels are in it.
    Metrics: `weight_mean` (phi), `ratio_mean` and `ratio_max` (W), `active_frac` (A and phi are not 0).
    """
    log_ratios_BT = sequence_means((x.logprobs_BT - x.old_logprobs_BT).detach(), x) * x.num_loss_tokens_BT
    log_ratios_BT = clamped(log_ratios_BT)
    ratios_BT = log_ratios_BT.exp()
    negative_BT = x.advantages_BT < 0
    k_BT = torch.full_like(ratios_BT, k_positive).masked_fill(negative_BT, k_negative)
    lambda_BT = torch.full_like(ratios_BT, lambda_positive).masked_fill(negative_BT, lambda_negative)
    weights_BT = (k_BT * log_ratios_BT + lambda_BT * (1 - ratios_BT)).exp()
    return -weights_BT * x.advantages_BT * x.logprobs_BT, {
        "weight_mean": weights_BT,
        "ratio_mean": ratios_BT,
        "ratio_max": ratios_BT,
        "active_frac": (x.advantages_BT != 0) & (weights_BT > 0),
    }
