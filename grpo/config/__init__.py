"""What a user sets. A recipe imports from here: `from grpo import config as c`, then `config = c.GRPOConfig(...)`.

Layer 0: the standard library only (and tyro, when there is a command line), so that bad input is refused before torch
is even loaded.
"""

# ruff: noqa: F401

from grpo.config.fields import (
    OWN_LOSS_DEFAULTS,
    PAPER_DEFAULTS,
    Advantages,
    Aggregation,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GeneratorConfig,
    GRPOConfig,
    MetricsConfig,
    ModelConfig,
    Options,
    RewardConfig,
    RolesConfig,
    SamplingConfig,
    Scalar,
    SFTConfig,
    Table,
    TrainerConfig,
    check_loss_name,
    complete,
)
from grpo.config.recipes import change
