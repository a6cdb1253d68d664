"""The loss as the loop puts it together: what corrections and several updates do to its value and its metrics."""

import dataclasses
import math
import pathlib

import pytest
import torch

from grpo.config import AlgorithmConfig, GRPOConfig
from grpo.config.recipes import complete
from grpo.data.packing import MicroBatch, build_micro_batch, make_batch
from grpo.types import TrainBatch
from train_grpo import policy_loss

# one prompt token and two completion tokens; the generator gave the second a probability 10 times too small
LOGPROBS = [-1.0, -2.0]
GENERATOR = [-1.0, -2.0 - math.log(10)]


def step(algorithm: AlgorithmConfig, **options) -> tuple[float, dict[str, list[float]], list[float]]:
    """Loss, metrics of the two tokens, and the gradient by their log-probs."""
    batch: TrainBatch = make_batch([[5]], [[6, 7]], [GENERATOR])
    batch = dataclasses.replace(batch, advantages_S=torch.tensor([1.0]))
    micro: MicroBatch = build_micro_batch(batch, [[0]], row_length=4)
    logprobs_BT = torch.tensor([[*LOGPROBS, 0.0, 0.0]], requires_grad=True)
    config = complete(GRPOConfig(algorithm=algorithm))
    loss, counted_BT, metrics = policy_loss(config, batch, **options)(micro, logprobs_BT, torch.zeros(1, 4))
    loss.backward()
    assert counted_BT.tolist() == [[True, True, False, False]]
    return loss.item(), {name: x[0, :2].tolist() for name, x in metrics.items()}, logprobs_BT.grad[0, :2].tolist()


@pytest.mark.parametrize(
    ("correction", "weights", "active"),
    [
        ("none", [1, 1], [1, 1]),
        ("truncate", [1, 2], [1, 1]),  # policy over generator is 10, cut off at 2
        ("mask_tokens", [1, 0], [1, 0]),
        ("mask_sequences", [0, 0], [0, 0]),  # geometric mean of 1 and 10: 3.16, above 2
    ],
)
def test_corrections_weigh_the_gradient(correction, weights, active):
    # ratio 1, advantage 1, mean of two tokens: each has the gradient -weight / 2
    loss, metrics, gradient = step(AlgorithmConfig(importance_correction=correction))
    assert gradient == pytest.approx([-weight / 2 for weight in weights])
    assert loss == pytest.approx(-sum(weights) / 2)
    assert metrics["active_share"] == active
    assert metrics["corrected_share"] == [weight != 1 for weight in weights]
    assert metrics["mismatch/mean"] == pytest.approx([0, math.log(10)])


def test_a_loss_of_ones_own_may_log_active_share_as_numbers(tmp_path: pathlib.Path):
    (tmp_path / "loss.py").write_text(
        "def f(inputs, config):\n"
        "    loss = -inputs.logprobs_BT.where(inputs.mask_BT, 0)\n"
        "    return loss, {'active_share': loss.detach() * 0 + 0.5}\n"
    )
    _, metrics, _ = step(AlgorithmConfig(loss=f"{tmp_path}/loss.py:f", importance_correction="mask_tokens"))
    assert metrics["active_share"] == [0.5, 0]


def test_a_later_update_does_not_take_training_for_a_mismatch():
    """With the generator's old log-probs nobody knows the policy of the step's start any more."""
    generator = AlgorithmConfig(old_logprobs="generator")
    _, first, _ = step(generator)
    _, later, _ = step(generator, first_update=False)
    assert first.keys() - later.keys() == {
        "mismatch/mean",
        "mismatch/max",
        "mismatch/kl",
        "weight",
        "weight_squared",
    }
    # with a recomputed start it is known in every update
    batch = dataclasses.replace(make_batch([[5]], [[6, 7]], [GENERATOR]), advantages_S=torch.tensor([1.0]))
    batch = dataclasses.replace(batch, old_logprobs_C=torch.tensor(GENERATOR))
    micro = build_micro_batch(batch, [[0]], row_length=4)
    loss = policy_loss(complete(GRPOConfig()), batch, first_update=False)
    _, _, metrics = loss(micro, torch.tensor([[-3.0, -3.0, 0.0, 0.0]], requires_grad=True), torch.zeros(1, 4))
    assert metrics["mismatch/mean"].tolist() == [[0, 0, 0, 0]]  # start and generator agree, however far it moved
    assert metrics["ratio_mean"][0, 0].item() == pytest.approx(math.exp(-2))
