"""The policy and its optimizer: torchtitan components around one function, `step`.

A step's loss is normalised before its first backward: the loss function divides by a count over the whole step, FSDP
sums gradients over data-parallel ranks, and nothing else scales. So the gradient is the same however the step was
sharded, split into micro-batches or packed.
"""

import grpo.titan_on_cpu  # noqa: F401

# isort: split
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import utils as titan_dist

from grpo.config import ModelConfig, TrainerConfig
from grpo.forward import micro_batches
from grpo.models import ShardedModel, build_model
from grpo.packing import MicroBatch, scatter_completions
from grpo.roles import Roles
from grpo.types import TrainBatch

# (micro-batch, logprobs_BT, entropy_BT) -> (this micro-batch's share of the step's loss, the tokens it counted as bool
# [B, T], metrics as sums over these tokens or, if their name ends in _max, as maxima)
LossFunction = Callable[
    [MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
]


class Trainer:
    """The trained model on the trainer ranks."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, folder: str, num_steps: int, roles: Roles):
        """Load `folder`, shard it, build AdamW and the schedule over `num_steps`. Collective over the trainer ranks."""
        self.config, self.roles = trainer, roles
        self.model: ShardedModel = build_model(
            model,
            trainer,
            folder,
            world_size=len(roles.trainer_ranks),
            device=roles.device,
            tensor_parallel=trainer.tensor_parallel,
            data_replicas=trainer.data_replicas,
        )
        adamw = ParamGroupConfig(
            pattern=".*",
            optimizer_name="AdamW",
            optimizer_kwargs={
                "lr": trainer.learning_rate,
                "betas": (trainer.adam_beta1, trainer.adam_beta2),
                "eps": trainer.adam_eps,
                "weight_decay": trainer.weight_decay,
            },
        )
        implementation = "fused" if roles.device.type == "cuda" else "foreach"
        self.optimizer = OptimizersContainer.Config(param_groups=[adamw], implementation=implementation).build(
            model_parts=[self.model.module]
        )
        constant = trainer.schedule == "constant"
        self.schedule = LRSchedulersContainer.Config(
            warmup_steps=trainer.warmup_steps,
            decay_ratio=0.0 if constant else None,
            decay_type="linear" if constant else trainer.schedule,
            min_lr_factor=trainer.min_lr_ratio,
        ).build(optimizers=self.optimizer, training_steps=num_steps)

    def step(
        self,
        batch: TrainBatch,
        loss_function: LossFunction,
        temperature: float = 1.0,
        logprob_tolerance: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step over the whole batch. Collective over the trainer ranks, all of which pass the same batch.

        Args:
            temperature: the sampling temperature of the completions, so that log-probs are of what was sampled.
            logprob_tolerance: the canary. If the policy's log-probs of the completions, before the update, differ from
                the generator's by more than this on average, the step stops with nothing updated.

        Returns:
            The step's metrics, the same on all trainer ranks.

        Raises:
            RuntimeError: the canary found stale or wrong weights in the generator, or the gradient is not finite.
        """
        sums, maxima = {}, {}
        self.optimizer.zero_grad()
        for micro in micro_batches(batch, self.model, self.config):
            logprobs_BT, entropy_BT = self.model.logprobs(
                micro.tokens_BT, micro.targets_BT, micro.positions_BT, temperature
            )
            loss, counted_BT, metrics = loss_function(micro, logprobs_BT, entropy_BT)
            loss.backward()

            metrics["entropy"] = entropy_BT.detach().where(counted_BT, 0).sum()
            if batch.generator_logprobs_C is not None:
                generator_BT = scatter_completions(batch.generator_logprobs_C, batch, micro)
                difference_BT = (logprobs_BT.detach() - generator_BT).abs().where(counted_BT, 0)
                metrics["logprob_diff/mean"], metrics["logprob_diff/max"] = difference_BT.sum(), difference_BT.max()
            self._add(sums, maxima, metrics | {"loss": loss.detach(), "num_counted": counted_BT.sum()})

        result = self._reduce(sums, maxima)
        num_counted = max(result.pop("num_counted"), 1)
        result = {name: x if name == "loss" or name.endswith("max") else x / num_counted for name, x in result.items()}
        if logprob_tolerance is not None and not result["logprob_diff/mean"] <= logprob_tolerance:
            raise RuntimeError(
                "the generator does not hold the policy's weights: their log-probs of the same completions differ by "
                f"{result['logprob_diff/mean']:.2e} on average (tolerance {logprob_tolerance:.0e}, largest "
                f"{result['logprob_diff/max']:.2e}). Nothing was updated. If precision explains it, raise "
                "--sync-check-tolerance"
            )

        parameters = list(self.model.module.parameters())
        grad_norm = float(titan_dist.clip_grad_norm_(parameters, self.config.max_grad_norm, foreach=True))
        if not grad_norm < float("inf"):
            raise RuntimeError(
                f"gradient norm is {grad_norm}; nothing was updated. Look at the rewards and log-probs of this step"
            )
        result |= {"grad_norm": grad_norm, "learning_rate": self.learning_rate}
        self.optimizer.step()
        self.schedule.step()
        if self.roles.device.type == "cuda":
            torch.cuda.synchronize()  # so that the step's time is its own
        return result

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and schedule, sharded, for torch.distributed.checkpoint. Collective over the role."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`. Collective over the trainer ranks."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    @property
    def learning_rate(self) -> float:
        """What the next optimizer step will use."""
        return self.optimizer.optimizers[0].param_groups[0]["lr"]

    @staticmethod
    def _add(sums: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor], metrics: dict[str, torch.Tensor]) -> None:
        """Add one micro-batch's metrics to the step's, on the device: nothing waits for the GPU here."""
        for name, value in metrics.items():
            value = value.double()
            if name.endswith("max"):
                maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
            else:
                sums[name] = sums[name] + value if name in sums else value

    def _reduce(self, sums: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor]) -> dict[str, float]:
        """Totals over data-parallel ranks, with one transfer from the device. Collective over them."""
        totals = torch.stack(list(sums.values()))
        highest = torch.stack(list(maxima.values())) if maxima else totals.new_zeros(0)
        mesh = self.model.parallel_dims.get_optional_mesh("batch")
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(totals, group=mesh.get_group())
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
        return dict(zip([*sums, *maxima], torch.cat([totals, highest]).tolist(), strict=True))
