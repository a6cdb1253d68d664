"""The updates of a step with a real trainer: learning rates, weight decay, and whose the old log-probs are."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from grpo.config import AlgorithmConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.roles.metrics import StepMetrics
from grpo.roles.trainer import Trainer
from grpo.types import Sample, TrainBatch
from tests.tiny_models import make_tiny
from train_grpo import update

pytestmark = pytest.mark.usefixtures("one_rank")
ROLES = SimpleNamespace(device=torch.device("cpu"), is_driver=False)
TWO_BY_TWO = AlgorithmConfig(num_mini_batches=2, num_epochs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")


def trainer_of(folder: str, num_steps: int = 10, **options) -> Trainer:
    options = {"learning_rate": 0.01, "compile": False, "activation_checkpointing": "none"} | options
    return Trainer(ModelConfig(dtype="float32"), TrainerConfig(**options), folder, num_steps, ROLES)


def step_batch() -> TrainBatch:
    """Two groups of two sequences: one prompt token and three completion tokens each, advantages 1 and -1."""
    mask_T = torch.tensor([False, True, True, True])
    samples = [Sample(torch.tensor([5, 6 + i, 7, 8 - i]), mask_T, torch.full((4,), -3.0)) for i in range(4)]
    return dataclasses.replace(make_batch(samples), advantages_N=torch.tensor([1.0, -1, -1, 1]).repeat_interleave(4))


def take_step(trainer: Trainer, algorithm: AlgorithmConfig) -> dict[str, float]:
    metrics = StepMetrics(4)
    update(GRPOConfig(algorithm=algorithm, group_size=2), trainer, step_batch(), 0.0, metrics)
    return metrics.means()


# Ten steps, of which two warm up; 8 steps lead from the peak to 0.2 of it, which an eleventh would have
RATES = {
    "constant": [0.5] + [1] * 9,
    "linear": [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
    "cosine": [0.5, 1] + [0.2 + 0.4 * (1 + math.cos(math.pi * n / 8)) for n in range(8)],
}


@pytest.mark.parametrize("schedule", RATES)
def test_the_rates_of_ten_steps(folder, schedule):
    """They follow the steps, however many updates a step has."""
    trainer = trainer_of(folder, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    rates = [take_step(trainer, TWO_BY_TWO)["learning_rate"] for _ in range(10)]
    assert rates == pytest.approx([0.01 * rate for rate in RATES[schedule]])


def test_weight_decay_takes_its_share_of_each_weight(folder):
    """AdamW's: beside the step of the gradient, learning rate x decay x weight is taken off."""
    plain, decayed = trainer_of(folder), trainer_of(folder, weight_decay=0.5)
    before = [p.detach().clone() for p in plain.model.module.parameters()]
    for trainer in (plain, decayed):
        take_step(trainer, AlgorithmConfig())
    parameters = (t.model.module.parameters() for t in (plain, decayed))
    for start, one, other in zip(before, *parameters, strict=True):
        torch.testing.assert_close(other, one - 0.01 * 0.5 * start, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("old_logprobs", ["policy", "generator"])
def test_all_updates_of_a_step_compare_with_one_policy(folder, old_logprobs, num_epochs, monkeypatch):
    """With that at the start of the step, or with the generator: not with the one that the update before left."""
    trainer, batch, found = trainer_of(folder), step_batch(), []
    policy_N = trainer.logprobs(batch)
    start_N = policy_N if old_logprobs == "policy" else batch.generator_logprobs_N
    real = trainer.forward_backward

    def forward_backward(mini_batch, *arguments):
        found.append(mini_batch.old_logprobs_N)
        real(mini_batch, *arguments)

    monkeypatch.setattr(trainer, "forward_backward", forward_backward)
    algorithm = AlgorithmConfig(num_mini_batches=2, num_epochs=num_epochs, old_logprobs=old_logprobs)
    metrics, mask_N = take_step(trainer, algorithm), batch.loss_mask_N
    assert len(found) == 2 * num_epochs and all(len(old_N) == 8 for old_N in found)
    for epoch in (found[:2], found[2:])[:num_epochs]:
        assert torch.equal(torch.cat(epoch)[mask_N], start_N[mask_N])
    # the policy at the start is known in every update, or, if it is the generator's, in the first alone
    apart_N = (policy_N - batch.generator_logprobs_N).abs().view(2, 8)
    apart_N = apart_N if old_logprobs == "policy" else apart_N[:1]
    assert metrics["mismatch/mean"] == pytest.approx(apart_N[mask_N.view(2, 8)[: len(apart_N)]].mean().item(), rel=1e-5)
    moved_N = (trainer.logprobs(batch) - start_N)[mask_N].abs()
    assert moved_N.min() > 1e-3  # the comparison means something
