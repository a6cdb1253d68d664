"""Compiling on made-up rows leaves nothing behind, and its rows have the shapes of a step's."""

import os
import pathlib

import pytest
import torch

from grpo.config import AlgorithmConfig, DataConfig, GeneratorConfig, GRPOConfig, ModelConfig, TrainerConfig
from grpo.roles.compile_ahead import compile_ahead
from tests.tiny_models import make_tiny


def config_of(micro_batch_tokens: int, chunk_tokens: int = 4096, **algorithm) -> GRPOConfig:
    return GRPOConfig(
        model=ModelConfig(dtype="float32"),
        data=DataConfig(max_prompt_tokens=10),
        generator=GeneratorConfig(max_completion_tokens=20),
        trainer=TrainerConfig(
            micro_batch_tokens=micro_batch_tokens,
            logprob_chunk_tokens=chunk_tokens,
            compile=False,
            activation_checkpointing="none",
        ),
        algorithm=AlgorithmConfig(**algorithm),
    )


@pytest.fixture
def roles():
    """Of this process alone. What torchrun's environment would say is undone."""
    from grpo.roles.process_groups import close_roles, setup_trainers

    before = dict(os.environ)
    roles = setup_trainers()
    yield roles
    close_roles(roles)
    os.environ.clear()
    os.environ.update(before)


def test_nothing_is_left_behind(roles, tmp_path: pathlib.Path):
    from grpo.roles.reference import Reference
    from grpo.roles.trainer import Trainer

    # 64 tokens: rows of 16 (a chunk) and 32
    config = config_of(64, chunk_tokens=16, kl_coef=0.1, entropy_coef=0.1, num_mini_batches=2)
    folder = make_tiny(tmp_path, "qwen3-tied")
    trainer = Trainer(config.model, config.trainer, folder, 10, roles)
    reference = Reference(config.model, config.trainer, folder, 1, roles)
    before = {name: value.clone() for name, value in trainer.model.module.state_dict().items()}
    random_state = torch.get_rng_state()
    rows_seen = []
    logprobs = trainer.model.logprobs
    trainer.model.logprobs = lambda micro: rows_seen.append(tuple(micro.ids_BT.shape)) or logprobs(micro)
    compile_ahead(config, trainer, reference, roles)
    # a forward alone for the old log-probs, and one with its backward, at each length
    assert rows_seen == [(1, 16), (1, 16), (1, 32), (1, 32)]
    after = trainer.model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in trainer.model.module.parameters())
    assert trainer.num_loss_tokens == 0 and not trainer._broken.any()
    assert not any(optimizer.state for optimizer in trainer.optimizer.optimizers)
    assert torch.equal(torch.get_rng_state(), random_state)
