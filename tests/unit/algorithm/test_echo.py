"""ECHO: what environments answered is learned beside the policy loss, as a computation by transformers says."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.algorithm.aggregation import UpdateTotals
from grpo.config import AlgorithmConfig, EnvironmentConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.data.batches import make_batch, sample_of
from grpo.metrics import StepMetrics
from grpo.roles.trainer import Trainer
from grpo.types import Completion, Piece, Prompt, TrainBatch
from tests.dist.programs.normalisation import full_gradients
from tests.tiny_models import make_tiny
from train_grpo import add_advantages, grpo_objective, update

pytestmark = pytest.mark.usefixtures("one_rank")
ROLES = SimpleNamespace(device=torch.device("cpu"), is_driver=False)
ECHO, TEMPERATURE = 0.3, 2.0
PROMPT = [5, 6, 7]
# Of each sequence what follows the prompt: ids, and S for what the policy sampled, A for answers, a point for what the
# chat template wrote. The first has the reward 2, the second none, the third was lost.
SEQUENCES = [
    ([8, 9, 4, 10, 11, 4, 12, 13], "SS.AA.SS"),
    ([9, 8, 3, 4, 13, 12, 11, 10, 4, 5], "SSS.AAAA.S"),
    ([10, 4, 9, 9, 4, 8], "S.AA.S"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")


def completion(ids: list[int], hands: str, is_lost: bool) -> Completion:
    pieces = []
    for token, hand in zip(ids, hands, strict=True):
        ids_T = torch.tensor([token])
        written = Piece(ids_T, torch.tensor([False]), observed=hand == "A")
        pieces.append(Piece.sampled(ids_T, torch.tensor([-2.0]), 0) if hand == "S" else written)
    note = {"turns": [], "reward": None, "failure": "its process died" if is_lost else ""}
    return Completion(tuple(pieces), truncated=False, temperature=TEMPERATURE, episode=note)


def config_of(**algorithm) -> GRPOConfig:
    algorithm = AlgorithmConfig(advantages="none", importance_correction="none", echo_coef=ECHO, **algorithm)
    return GRPOConfig(algorithm=algorithm, group_size=3, environment=EnvironmentConfig(name="made.py:Up"))


def step(config: GRPOConfig, observes: bool = True) -> TrainBatch:
    samples = [
        sample_of(Prompt(0, PROMPT), completion(ids, hands, is_lost=number == 2), observes=observes)
        for number, (ids, hands) in enumerate(SEQUENCES)
    ]
    rewards = torch.tensor([2.0, 0, 0]), torch.tensor([True, False, False]), torch.zeros(len(config.reward_weights), 3)
    return add_advantages(config, make_batch(samples), *rewards, 0.0, StepMetrics(3))


def trainer_of(folder: str, **options) -> Trainer:
    options = {"compile": False, "activation_checkpointing": "none", "max_grad_norm": 1e9} | options
    return Trainer(ModelConfig(dtype="float32"), TrainerConfig(**options), folder, 10, ROLES)


def by_transformers(folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and the mean cross-entropy: no code of the project.

    Policy loss: ratio 1, advantage 2, the mean over the 4 sampled tokens of the only sequence that has a reward, at the
    temperature 2. Cross-entropy: the mean over 2 + 4 answered tokens at the temperature 1; none of the lost one.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy, cross_entropy = [], []
    for number, (ids, hands) in enumerate(SEQUENCES[:2]):
        logits_TV = model(torch.tensor([[*PROMPT, *ids]])).logits[0]
        for place, (token, hand) in enumerate(zip(ids, hands, strict=True), len(PROMPT)):
            predicting_V = logits_TV[place - 1]
            if hand == "S" and number == 0:
                policy.append(-2.0 * torch.log_softmax(predicting_V / 2.0, 0)[token])
            if hand == "A":
                cross_entropy.append(-torch.log_softmax(predicting_V, 0)[token])
    assert (len(policy), len(cross_entropy)) == (4, 6)
    mean = sum(cross_entropy) / 6
    (sum(policy) / 4 + 0.3 * mean).backward()
    return {name: p.grad for name, p in model.named_parameters()}, mean.item()


@pytest.mark.parametrize("micro_batch_tokens, share_prompts", [(64, True), (64, False), (13, False)])
def test_the_gradient_is_that_of_both_losses_however_it_is_packed(folder, micro_batch_tokens, share_prompts):
    expected, cross_entropy = by_transformers(folder)
    config, metrics = config_of(), StepMetrics(3)
    trainer = trainer_of(folder, micro_batch_tokens=micro_batch_tokens, share_prompts=share_prompts)
    batch = step(config)
    assert len(trainer.model.pack(batch, trainer.config).rows[0]) == (1 if micro_batch_tokens == 64 else 3)
    trainer.forward_backward(batch, grpo_objective(config, batch, 0.0, True), metrics)
    found = full_gradients(trainer)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max().item()), name
    measured = metrics.means()
    assert measured["echo/loss"] == pytest.approx(cross_entropy, rel=1e-5)
    assert metrics.num_loss_tokens == 4


def test_what_was_observed_is_no_loss_token():
    """4 of the sampled tokens are of the only sequence that has a reward; 2 + 4 were answered."""
    assert UpdateTotals.of(step(config_of()), 9) == UpdateTotals(4, 1, 9, 6)


def test_a_step_of_observations_alone_trains_and_one_of_none_does_not(folder):
    """Rewards are 0, or nobody has one; what was answered is still true."""
    for observes in (True, False):
        config, trainer = config_of(), trainer_of(folder, learning_rate=0.01)
        batch = step(config)
        nothing_N = torch.zeros_like(batch.loss_mask_N)
        batch = dataclasses.replace(
            batch, loss_mask_N=nothing_N, observed_N=batch.observed_N if observes else nothing_N
        )
        before = [p.detach().clone() for p in trainer.model.module.parameters()]
        metrics = StepMetrics(3)
        update(config, trainer, batch, 0.0, metrics)
        measured = metrics.means()
        moved = any(not torch.equal(p, was) for p, was in zip(trainer.model.module.parameters(), before, strict=True))
        assert moved == observes and (measured["loss"] > 0) == observes and measured["skipped_frac"] == 0


def test_old_logprobs_are_those_of_sampled_tokens_alone(folder):
    """Answers have no ratio, so several updates and a reference compute nothing for them."""
    config, trainer = config_of(num_epochs=2), trainer_of(folder)
    found = [trainer.logprobs(step(config, observes)) for observes in (True, False)]
    assert torch.equal(*found) and found[0][step(config).loss_mask_N].all()
