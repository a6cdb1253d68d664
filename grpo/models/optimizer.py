"""AdamW, its schedule and the clipping of gradients: torchtitan's, which know sharded parameters."""

from collections.abc import Iterable

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.distributed import utils as titan_dist

from grpo.config import TrainerConfig


def build_optimizer(
    module: nn.Module, trainer: TrainerConfig, num_steps: int, device: torch.device
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """AdamW over the parameters that have a gradient, and the learning rate over `num_steps` steps."""
    adamw = default_adamw(
        lr=trainer.learning_rate,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
    )
    adamw.implementation = "fused" if device.type == "cuda" else "foreach"
    optimizer = adamw.build(model_parts=[module])
    constant = trainer.schedule == "constant"
    schedule = LRSchedulersContainer.Config(
        warmup_steps=trainer.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else trainer.schedule,
        min_lr_factor=trainer.min_lr_ratio,
    )
    return optimizer, schedule.build(optimizers=optimizer, training_steps=num_steps)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a global norm of at most `max_norm`; returns the norm before.

    Collective over the ranks that share the parameters.
    """
    return float(titan_dist.clip_grad_norm_(list(parameters), max_norm, foreach=True))
