"""The recipe of the end-to-end tests: a 0.1 M parameter policy, a few short completions, every check on.

Tests add `--model.path` (the folder of the `model` fixture) and `--run-dir`. The reward tells random completions apart,
so that losses and gradients are not 0.
"""

import pathlib

from grpo.config import (
    AlgorithmConfig,
    DataConfig,
    GeneratorConfig,
    GRPOConfig,
    MetricsConfig,
    ModelConfig,
    RewardConfig,
    RolesConfig,
    TrainerConfig,
)

REWARDS = pathlib.Path(__file__).parent / "tiny_rewards.py"
ROWS = pathlib.Path(__file__).parent / "tiny_rows.py"

config = GRPOConfig(
    model=ModelConfig(path="given on the command line", dtype="float32"),
    roles=RolesConfig(num_trainers=2, num_references=1, num_generators=1),
    deadline_minutes=10,  # a busy machine may compile for minutes
    data=DataConfig(path=f"{ROWS}:addition", system_prompt="", max_prompt_tokens=16),
    reward=RewardConfig(functions={f"{REWARDS}:digit_share": 1.0}, timeout_seconds=600),
    generator=GeneratorConfig(max_completion_tokens=12),
    trainer=TrainerConfig(
        micro_batch_tokens=128,  # several micro-batches per step
        activation_checkpointing="none",
        compile=False,
        learning_rate=3e-3,  # large: two steps shall make a difference that a test can see
        logprob_chunk_tokens=64,
    ),
    algorithm=AlgorithmConfig(kl_coef=0.01),
    metrics=MetricsConfig(tensorboard=False, samples_interval=1),
    num_steps=2,
    prompts_per_step=4,
    group_size=4,
    sync_check_interval=1,  # every step
)
