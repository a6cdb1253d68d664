"""What a step's metrics are when it had several updates."""

import math

import pytest
import torch

from grpo.roles.trainer import Update, merge_updates


def update(num_counted: float, loss: float, **metrics: float) -> Update:
    return Update(metrics, loss, 2 * loss, 1e-3, num_counted, torch.empty(0))


def test_means_are_over_tokens_and_maxima_are_maxima():
    # 10 tokens of mean 1 and 30 of mean 3: 100 / 40 = 2.5
    merged = merge_updates([update(10, 1.0, entropy=1.0, ratio_max=5.0), update(30, 3.0, entropy=3.0, ratio_max=4.0)])
    assert merged == {"entropy": 2.5, "ratio_max": 5.0, "loss": 2.0, "grad_norm": 4.0, "learning_rate": 1e-3}


def test_updates_without_a_token_or_without_the_metric_do_not_count():
    nothing = update(0, 0.0, entropy=math.nan, ratio_max=math.nan)
    merged = merge_updates(
        [update(10, 1.0, entropy=1.0, ratio_max=5.0, weight=0.5), nothing, update(30, 1.0, entropy=3.0)]
    )
    assert merged["entropy"] == 2.5 and merged["ratio_max"] == 5.0 and merged["weight"] == 0.5
    assert merged["loss"] == pytest.approx(2 / 3)
    assert all(math.isnan(merge_updates([nothing])[name]) for name in ("entropy", "ratio_max"))
