"""The policy and its optimizer: torchtitan components around one function, `step`.

A step's loss is normalised before its first backward: the loss function divides by a count over the whole step, FSDP
sums gradients over data-parallel ranks, and nothing else scales. So the gradient is the same however the step was
sharded, split into micro-batches or packed.
"""

import grpo.models.titan_on_cpu  # noqa: F401

# isort: split
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import utils as titan_dist

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.packing import MicroBatch
from grpo.models.build import ShardedModel, build_model
from grpo.models.forward import completion_logprobs, micro_batches
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch

# (micro-batch, logprobs_BT, entropy_BT) -> (this micro-batch's share of the step's loss, the tokens it counted as bool
# [B, T], metrics [B, T]: values per counted token, of which the step gets the mean, or the maximum if the name ends so)
LossFunction = Callable[
    [MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
]

# The metric that the canary and the tables of completions look at: |policy's - generator's log-prob|
LOGPROB_DIFF = "mismatch/mean"


@dataclass(frozen=True)
class Update:
    """What one optimizer update did; the same on all trainer ranks."""

    metrics: dict[str, float]
    """Means over the counted tokens, or maxima where the name ends in `max`; NaN if no token counts."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_counted: float
    """Tokens that count in the loss."""
    logprob_diff_S: torch.Tensor
    """float64 [S]: each sequence's mean of `mismatch/mean`; NaN where no token counts or nothing is known."""

    @property
    def all_metrics(self) -> dict[str, float]:
        """Everything by name, for the log."""
        own = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate}
        return self.metrics | own


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

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """The policy's log-probs of all completion tokens, float32 [C], CPU. Collective over the trainer ranks."""
        logprobs_C = completion_logprobs(batch, self.model, self.config).to(self.roles.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(logprobs_C)  # every rank holds its share and 0 elsewhere
        return logprobs_C.cpu()

    def step(self, batch: TrainBatch, loss_function: LossFunction, logprob_tolerance: float | None = None) -> Update:
        """One optimizer update over the whole batch. Collective over the trainer ranks, which pass the same batch.

        A batch in which no token counts changes nothing: neither weights nor the optimizer's moments.

        Args:
            logprob_tolerance: the canary. If the policy's log-probs of the completions, before the update, differ from
                the generator's by more than this on average, the step stops with nothing updated.

        Raises:
            RuntimeError: the canary found stale or wrong weights in the generator, or the gradient is not finite.
            ValueError: the loss function named its metrics differently in two micro-batches.
        """
        sums, maxima, names, loss_sum, num_counted = {}, {}, None, 0, 0
        sequence_S2 = torch.zeros(batch.num_sequences + 1, 2, dtype=torch.float64, device=self.roles.device)
        self.optimizer.zero_grad()
        for micro in micro_batches(batch, self.model, self.config):
            logprobs_BT, entropy_BT = self.model.logprobs(micro)
            loss, counted_BT, metrics = loss_function(micro, logprobs_BT, entropy_BT)
            loss.backward()

            # on the device throughout: nothing waits for the GPU here
            metrics = metrics | {"entropy": entropy_BT.detach()}
            if names and names != metrics.keys():
                raise ValueError(f"the loss logged {sorted(names)} and then {sorted(metrics)}; log the same each time")
            names = metrics.keys()
            for name, values_BT in metrics.items():
                values_BT = values_BT.double().where(counted_BT, 0)
                if name.endswith("max"):
                    maxima[name] = torch.maximum(maxima.get(name, values_BT.new_zeros(())), values_BT.max())
                else:
                    sums[name] = sums.get(name, 0) + values_BT.sum()
            loss_sum = loss_sum + loss.detach().double()
            num_counted = num_counted + counted_BT.sum().double()
            if LOGPROB_DIFF in metrics:
                diff_BT = metrics[LOGPROB_DIFF].double().where(counted_BT, 0)
                per_token_N2 = torch.stack([diff_BT, counted_BT.double()], -1).flatten(0, 1)
                sequence_N = micro.sequence_BT.flatten()
                padding_last_N = sequence_N.where(sequence_N >= 0, batch.num_sequences)
                sequence_S2.index_add_(0, padding_last_N, per_token_N2)

        (loss, num_counted, *means), highest = self._reduce(
            [loss_sum, num_counted, *sums.values()], maxima, sequence_S2
        )
        metrics = dict.fromkeys([*sums, *maxima], math.nan)  # if nothing counts
        if num_counted:
            metrics = dict(zip(metrics, [*(x / num_counted for x in means), *highest], strict=True))
        checks = logprob_tolerance is not None and num_counted > 0
        if checks and not metrics[LOGPROB_DIFF] <= logprob_tolerance:
            raise RuntimeError(
                "the generator does not hold the policy's weights: their log-probs of the same completions differ by "
                f"{metrics[LOGPROB_DIFF]:.2e} on average (tolerance {logprob_tolerance:.0e}, largest "
                f"{metrics['mismatch/max']:.2e}). Nothing was updated. If precision explains it, raise "
                "--sync-check-tolerance"
            )

        parameters = list(self.model.module.parameters())
        grad_norm = float(titan_dist.clip_grad_norm_(parameters, self.config.max_grad_norm, foreach=True))
        if not grad_norm < float("inf"):
            raise RuntimeError(
                f"gradient norm is {grad_norm}; nothing was updated. Look at the rewards and log-probs of this step"
            )
        learning_rate = self.learning_rate
        if num_counted:
            self.optimizer.step()
        if self.roles.device.type == "cuda":
            torch.cuda.synchronize()  # so that the step's time is its own
        diff_S2 = sequence_S2[:-1].cpu()
        return Update(metrics, loss, grad_norm, learning_rate, num_counted, diff_S2[:, 0] / diff_S2[:, 1])

    def end_step(self) -> None:
        """Move the learning rate's schedule on; once per step, however many updates it had."""
        self.schedule.step()

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

    def _reduce(
        self, sums: list[torch.Tensor], maxima: dict[str, torch.Tensor], sequence_S2: torch.Tensor
    ) -> tuple[list[float], list[float]]:
        """Sums and maxima over data-parallel ranks, with one transfer from the device. Collective over them."""
        totals = torch.stack(sums)
        highest = torch.stack(list(maxima.values())) if maxima else totals.new_zeros(0)
        mesh = self.model.parallel_dims.get_optional_mesh("batch")
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(totals, group=mesh.get_group())
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
            dist.all_reduce(sequence_S2, group=mesh.get_group())
        values = torch.cat([totals, highest]).tolist()
        return values[: len(sums)], values[len(sums) :]


def merge_updates(updates: list[Update]) -> dict[str, float]:
    """The metrics of a step's updates as those of the step.

    Means over the counted tokens of all updates that have the metric, maxima, and plain means of what an update has
    one of (loss, gradient norm, learning rate).
    """
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update.metrics):
        there = [update for update in updates if name in update.metrics and update.num_counted]
        if not there:
            merged[name] = math.nan
        elif name.endswith("max"):
            merged[name] = max(update.metrics[name] for update in there)
        else:
            total = sum(update.num_counted for update in there)
            merged[name] = sum(update.metrics[name] * update.num_counted for update in there) / total
    for name in ("loss", "grad_norm", "learning_rate"):
        merged[name] = sum(getattr(update, name) for update in updates) / len(updates)
    return merged
