"""What a step's metrics are when it had several micro-batches and updates."""

import dataclasses
import math

import pytest
import torch

from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.types import MicroBatch
from tests.rollouts import sequence
from tests.rows import one_row

LENGTHS = (10, 30, 5)


def micro_batch(sequences: list[int], counts: bool = True) -> MicroBatch:
    """Some of three sequences, of one prompt token and `LENGTHS` loss tokens."""
    lengths = [LENGTHS[index] for index in sequences]
    samples = [sequence(torch.ones(1 + n).long(), torch.arange(1 + n) > (0 if counts else n)) for n in lengths]
    return one_row(dataclasses.replace(make_batch(samples), sequence_S=torch.tensor(sequences)))


def add(metrics: StepMetrics, micro: MicroBatch, loss: float, **values: float) -> None:
    """A micro-batch in which every loss token has these values, and every other position has NaN."""
    nan_BT = torch.full(micro.loss_mask_BT.shape, math.nan)
    tensors = {name.replace("__", "/"): nan_BT.masked_fill(micro.loss_mask_BT, x) for name, x in values.items()}
    metrics.add(micro, torch.tensor(loss), tensors)


def test_means_are_over_tokens_and_maxima_are_maxima():
    # two updates of 10 tokens of mean 1 and 30 of mean 3: 100 / 40 = 2.5
    metrics = StepMetrics(3)
    add(metrics, micro_batch([0]), 1.0, entropy=1.0, ratio_max=5.0)
    metrics.reduce(None)
    metrics.record(grad_norm=2.0)
    assert metrics.means() == {"entropy": 1.0, "ratio_max": 5.0, "loss": 1.0, "grad_norm": 2.0}
    add(metrics, micro_batch([1]), 3.0, entropy=3.0, ratio_max=4.0)
    metrics.reduce(None)
    metrics.record(grad_norm=6.0)
    assert metrics.means() == {"entropy": 2.5, "ratio_max": 5.0, "loss": 2.0, "grad_norm": 4.0}
    assert metrics.num_loss_tokens == 40


def test_micro_batches_of_one_update_add_up():
    # the same tokens in two micro-batches; the loss's parts are summed, not averaged
    metrics = StepMetrics(3)
    add(metrics, micro_batch([0]), 1.0, entropy=1.0, ratio_max=-2.0)
    add(metrics, micro_batch([1]), 3.0, entropy=3.0, ratio_max=-4.0)
    metrics.reduce(None)
    assert metrics.means() == {"entropy": 2.5, "ratio_max": 0.0, "loss": 4.0}  # a maximum is at least 0
    add(metrics, micro_batch([0]), 1.0, entropy=1.0)
    with pytest.raises(ValueError, match=r"\['entropy'\] .*\['kl'\]"):
        add(metrics, micro_batch([1]), 1.0, kl=1.0)


def test_updates_without_a_token_or_without_the_metric_do_not_count():
    nothing = micro_batch([0], counts=False)
    metrics = StepMetrics(3)
    add(metrics, nothing, 0.0, entropy=7.0, ratio_max=7.0)
    metrics.reduce(None)
    assert metrics.means()["loss"] == 0 and metrics.num_loss_tokens == 0
    assert all(math.isnan(metrics.means()[name]) for name in ("entropy", "ratio_max"))
    add(metrics, micro_batch([0]), 1.0, entropy=1.0, ratio_max=5.0, weight=0.5)
    metrics.reduce(None)
    add(metrics, micro_batch([1]), 1.0, entropy=3.0)
    metrics.reduce(None)
    assert metrics.means() == {"entropy": 2.5, "ratio_max": 5.0, "weight": 0.5, "loss": pytest.approx(2 / 3)}


def test_the_mismatch_is_kept_for_each_rollout_of_the_step():
    metrics = StepMetrics(3)
    assert metrics.rollout_means(torch.arange(3)) == [None, None, None]
    add(metrics, micro_batch([0, 2]), 1.0, mismatch__mean=0.5)
    metrics.reduce(None)
    assert metrics.rollout_means(torch.arange(3)) == [0.5, None, 0.5]
    add(metrics, micro_batch([2]), 1.0, mismatch__mean=1.5)  # 5 tokens of 0.5 and 5 of 1.5
    metrics.reduce(None)
    assert metrics.rollout_means(torch.arange(3)) == [0.5, None, 1.0]
    # the first and the last are sequences of one rollout: 10 tokens of 0.5, 10 of 1 on average
    assert metrics.rollout_means(torch.tensor([0, 1, 0])) == [0.75, None]
