"""Muon (Jordan et al. 2024) for the matrices of the blocks, in torchtitan's container beside AdamW for everything else.

An update is the gradient's momentum with its singular values brought near 1 by Newton-Schulz steps, times 0.2 x
sqrt(larger side), which makes it as large as AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one learning rate
serves both. Left out: experts, which are stacked, and LoRA.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from grpo.config import TrainerConfig

# Weights of attention and feed-forward layers: wq, wk, wv, wo, w1, w2, w3
BLOCK_MATRICES = r"\.w[qkvo123]\.weight$"


class Muon(torch.optim.Muon):
    """torch's Muon, except that a sharded matrix is gathered before its Newton-Schulz steps.

    On shards torch's own step rounds otherwise: with two ranks an update differs by 1 to 2 % from that of one.
    Torchtitan's DistMuon takes no matrix that is not sharded, and no CPU.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update each weight by its gradient. Collective over the ranks that share the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(momentum, group["momentum"]).bfloat16()  # Nesterov's
                if isinstance(update, DTensor):
                    update = update.full_tensor()
                update = _zeropower_via_newtonschulz(
                    update,
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                if isinstance(weight, DTensor):  # each rank takes its part of its own copy
                    update = distribute_tensor(
                        update,
                        weight.device_mesh,
                        weight.placements,
                        src_data_rank=None,
                    )
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape)
                weight.add_(update, alpha=-rate)


class Optimizers(OptimizersContainer):
    """Torchtitan's container of optimizers, which can also hold `Muon`."""

    def make_moments(self, dtype: torch.dtype) -> None:
        """Make all moments, which are 0: AdamW's in `dtype`.

        torchtitan 0.3.0 would make them at the first save or load, by an update of gradient 0. All gradients would
        exist then, perhaps beside an engine. And AdamW counts it: the first real update would be corrected as its
        second, and be a quarter too small.
        """
        for optimizer in self:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    state = optimizer.state[weight]
                    if isinstance(optimizer, Muon):
                        state["momentum_buffer"] = torch.zeros_like(weight)
                    else:  # as a fused AdamW would
                        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                        state["exp_avg"] = torch.zeros_like(weight, dtype=dtype)
                        state["exp_avg_sq"] = torch.zeros_like(weight, dtype=dtype)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return Muon if name == "Muon" else OptimizersContainer._resolve_optimizer_factory(name)


def muon_group(trainer: TrainerConfig) -> ParamGroupConfig:
    """Return the group of the blocks' matrices, to stand before the one that takes all other parameters."""
    options = {
        "lr": trainer.learning_rate,
        "weight_decay": trainer.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    return ParamGroupConfig(pattern=BLOCK_MATRICES, optimizer_name="Muon", optimizer_kwargs=options)
