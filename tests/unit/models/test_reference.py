"""The reference: a teacher's log-probs and the gradient they give, and one that moves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo.config import AlgorithmConfig, GRPOConfig, ModelConfig, RewardConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.roles.comm import add_ref_logprobs
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.types import Piece, Prompt
from tests.rollouts import conversation, rewarded
from tests.tiny_models import make_tiny
from train_grpo import add_advantages, grpo_objective

# ---- Log-probs and their gradient, of three sequences by hand

TEMPERATURES = (1.0, 0.7, 1.0)
PROMPTS = ([5, 6, 7], [5, 6, 7], [9, 8])
COMPLETIONS = ([8, 9, 10, 1], [10, 8], [7, 7, 6])
# of the last one, an environment wrote the second token
WRITTEN = 1
COEF = 0.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A policy, and another model."""
    return tuple(make_tiny(tmp_path_factory.mktemp("tiny"), kind) for kind in ("qwen3-tied", "llama3"))


def scored(model) -> list[torch.Tensor]:
    """Log-probs of each completion's tokens behind its prompt, by transformers, one sequence after the other."""
    found = []
    for prompt, completion, temperature in zip(PROMPTS, COMPLETIONS, TEMPERATURES, strict=True):
        ids = torch.tensor([prompt + completion])
        log_p_TV = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        found.append(log_p_TV[range(len(completion)), completion])
    return found


def three_sequences():
    """The batch of the three sequences."""
    rollouts = []
    for number, (ids, tokens, temperature) in enumerate(zip(PROMPTS, COMPLETIONS, TEMPERATURES, strict=True)):
        ids_T, logprobs_T = torch.tensor(tokens), torch.linspace(-2.5, -1.5, len(tokens))
        pieces = [Piece.sampled(ids_T, logprobs_T, 0)]
        if number == 2:
            first, written, last = zip(ids_T.split(1), logprobs_T.split(1), strict=True)
            pieces = [Piece.sampled(*first, 0), Piece.written(written[0]), Piece.sampled(*last, 0)]
        rollouts.append(conversation(pieces, Prompt(0, ids), temperature=temperature))
    return make_batch(rollouts)


@pytest.mark.usefixtures("one_rank")
def test_log_probs_and_gradient_of_three_sequences(folders):
    """Against transformers and autograd; packed into one row, and into rows of at most 16 tokens."""
    roles = SimpleNamespace(
        device=torch.device("cpu"), is_driver=False, has_reference=True, learns=True, learners=dist.group.WORLD
    )
    algorithm = AlgorithmConfig(loss="reinforce", distill_coef=COEF, importance_correction="none")
    model = ModelConfig(dtype="float32")
    policy = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    with torch.no_grad():
        expected = scored(teacher)
    # minus the mean over the 8 sampled tokens of COEF * (log teacher - log generator) * log policy
    total = 0.0
    for number, (logprobs_T, teacher_T) in enumerate(zip(scored(policy), expected, strict=True)):
        generator_T = torch.linspace(-2.5, -1.5, len(logprobs_T))
        terms_T = COEF * (teacher_T - generator_T) * logprobs_T
        total = total + sum(terms_T[t] for t in range(len(terms_T)) if (number, t) != (2, WRITTEN))
    wanted_loss = -total / 8
    wanted_loss.backward()
    wanted = {name: parameter.grad for name, parameter in policy.named_parameters()}

    for most_tokens in (64, 16):
        options = TrainerConfig(compile=False, activation_checkpointing="none", micro_batch_tokens=most_tokens)
        trainer = Trainer(model, options, folders[0], 1, roles)
        reference = Reference(model, options, folders[1], 1, roles)
        batch = add_ref_logprobs(three_sequences(), reference, roles)
        sampled_N = torch.ones(4 + 2 + 3, dtype=torch.bool)
        sampled_N[4 + 2 + WRITTEN] = False
        torch.testing.assert_close(
            batch.ref_logprobs_N[batch.loss_mask_N], torch.cat(expected)[sampled_N], rtol=0, atol=1e-5
        )
        config = GRPOConfig(algorithm=algorithm.resolved, group_size=1, reward=RewardConfig(functions={}))
        metrics = StepMetrics(3)
        batch = rewarded(batch, torch.full((3,), torch.nan), torch.zeros(0, 3))
        batch = add_advantages(config, batch, 0.0, metrics)
        trainer.forward_backward(batch, grpo_objective(config, batch, 0.0, True), metrics)
        assert metrics.means()["loss"] == pytest.approx(wanted_loss.item(), abs=1e-5)
        found = {name: p.grad for name, p in trainer.model.module.named_parameters()}
        found = trainer.model.names.to_hf(found)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.usefixtures("one_rank")
def test_a_reference_that_moves_is_the_average_of_the_policys_weights(folders):
    """Every second step by a quarter, in float32 whatever a forward computes in; then, by all of it, the policy."""
    roles = SimpleNamespace(device=torch.device("cpu"), is_driver=False)
    options = TrainerConfig(compile=False, activation_checkpointing="none", micro_batch_tokens=64, learning_rate=1.0)
    model = ModelConfig(dtype="bfloat16")
    trainer = Trainer(model, options, folders[0], 10, roles)
    reference = Reference(model, options, folders[0], 1, roles, moves=True)
    trainer.lead(reference.model, interval=2, mixture=0.25)
    batch = three_sequences()
    before_N = reference.logprobs(batch)
    weights = {name: local(value).clone() for name, value in reference.model.module.named_parameters()}
    for step in range(1, 5):
        for name, value in trainer.model.module.named_parameters():
            local(value).data.add_(1e-3 * torch.randn(local(value).shape))
            if step % 2 == 0:
                weights[name] = 0.75 * weights[name] + 0.25 * local(value)
        trainer.end_step()
    for name, value in reference.model.module.named_parameters():
        assert value.dtype == torch.float32
        torch.testing.assert_close(local(value), weights[name], rtol=1e-6, atol=1e-7)
    assert not torch.equal(reference.logprobs(batch), before_N)
    trainer.lead(reference.model, interval=1, mixture=1.0)
    trainer.end_step()
    assert torch.equal(reference.logprobs(batch), trainer.logprobs(batch))


def local(weight: torch.Tensor) -> torch.Tensor:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
