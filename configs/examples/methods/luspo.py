"""LUSPO: GSPO in which a sequence weighs by its length (Liu et al. 2026, arXiv:2602.05261).

FILE=configs/examples/methods/luspo.py
torchrun --nproc_per_node=8 train_grpo.py --algorithm.loss $FILE:luspo

GSPO's loss of a sequence is that of its ratio, however long it is, so each token of a long answer moves less. LUSPO
multiplies it by the number of the sequence's loss tokens. A KL term is not multiplied.
"""

from dataclasses import replace

from grpo.algorithm.losses import gspo


def luspo(x, config, *, clip_low=0.002, clip_high=0.0025):
    """Return GSPO's loss with the paper's clips, times the length; the aggregation must be `sequence_mean`.

    The gradient is longer than GSPO's by about the mean length; `trainer.max_grad_norm` and Adam make up for that.
    Metrics: those of GSPO.
    """
    loss_BT, metrics = gspo(x, replace(config, clip_low=clip_low, clip_high=clip_high))
    return loss_BT * x.num_loss_tokens_BT, metrics
