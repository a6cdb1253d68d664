"""The policy and its optimizer: torchtitan components behind `forward_backward`, `optimizer_step` and `logprobs`.

An update's loss is normalised before its first backward: the objective divides by a count over the whole update, FSDP
sums gradients over data-parallel ranks, and nothing else scales. So the gradient is the same however the update was
sharded, split into micro-batches or packed.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.config import ModelConfig, TrainerConfig
from grpo.metrics import StepMetrics
from grpo.models.build import ShardedModel, build_model, build_optimizer
from grpo.roles.process_groups import Roles
from grpo.types import MicroBatch, TrainBatch

# What must be finite before a gradient is used, each after what can make it not finite
MUST_BE_FINITE = ("reference", "old", "advantages", "policy", "loss", "gradient")

# (micro-batch, logprobs_BT, entropy_BT) -> (its part of the update's loss, metrics: detached values [B, T])
Objective = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class Trainer:
    """The policy and its optimizer on the trainer ranks."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        num_steps: int,
        roles: Roles,
        seed: int = 0,
    ):
        """Load `folder`, shard it, build optimizer and schedule over `num_steps`. Collective over the trainer ranks.

        With LoRA, the adapters start from `seed`.
        """
        self.config = trainer
        self.roles = roles
        self.dtype = getattr(torch, model.dtype)
        self.num_loss_tokens = 0  # loss tokens that the gradient at hand comes from
        # above 0 for what was not finite on this rank
        self._broken = torch.zeros(len(MUST_BE_FINITE), device=roles.device)
        self.model = build_model(
            model,
            trainer,
            folder,
            device=roles.device,
            tensor_parallel=trainer.tensor_parallel,
            seed=seed,
        )
        self.optimizer, self.schedule = build_optimizer(self.model, trainer, num_steps)
        self._stateful = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }
        self.follower: ShardedModel | None = None  # a reference that moves with the policy
        if roles.is_driver:
            parameters = list(self.model.module.parameters())
            num_parameters = sum(parameter.numel() for parameter in parameters)
            num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            print(f"policy: {num_parameters:,} parameters, {num_trained:,} trained")

    def lead(self, reference: ShardedModel, interval: int, mixture: float) -> None:
        """Move the reference towards the policy every `interval` steps, and save and load its weights too."""
        self.follower = reference
        self.follow_interval = interval
        self.follow_mixture = mixture
        self._stateful["reference"] = reference

    def end_step(self) -> None:
        """Take the next step's learning rate, and move the reference if that is due."""
        with warnings.catch_warnings():
            # torch's advice to step the optimizer first: so it is, unless the first update was skipped or had no token
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.schedule.step()
        num_steps = self.schedule.schedulers[0].last_epoch
        if self.follower and num_steps % self.follow_interval == 0:
            self.follower.move_towards(self.model, self.follow_mixture)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return the policy's log-probs of the tokens that count in the loss, float32 [N], on the CPU.

        At other tokens they may be 0. Collective over the trainer ranks.
        """
        logprobs_N = self.model.token_logprobs(batch).to(self.roles.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(logprobs_N)  # every rank holds its part and 0 elsewhere
        return logprobs_N.cpu()

    def forward_backward(
        self,
        batch: TrainBatch,
        objective: Objective,
        metrics: StepMetrics,
    ) -> None:
        """Add the objective's gradient over the whole batch to the model, and what it measured to `metrics`.

        Collective over the trainer ranks, which pass the same batch. Gradients add up until `optimizer_step`.
        """
        inputs = {
            "reference": batch.ref_logprobs_N,
            "old": batch.old_logprobs_N,
            "advantages": batch.advantages_N,
        }
        for name, values_N in inputs.items():
            if values_N is not None:
                self._note(name, ~values_N.isfinite() & batch.loss_mask_N)
        layout, micro_batches = self.model.lay_out(batch)
        for micro, is_last in micro_batches:
            self.model.accumulate(is_last)
            logprobs_BT, entropy_BT = self.model.logprobs(micro)
            loss, measured = objective(micro, logprobs_BT, entropy_BT)
            measured["entropy"] = entropy_BT.detach()
            self._note("policy", ~logprobs_BT.detach().isfinite() & micro.loss_mask_BT)
            self._note("loss", ~loss.detach().isfinite())
            loss.backward()
            metrics.add(micro, loss.detach(), measured)
        self.model.drop_copy()
        metrics.record(**layout.metrics())
        self.num_loss_tokens += int(batch.loss_mask_N.sum())
        metrics.reduce(self.model.data_ranks)  # waits for the device, unlike all before it

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradient and update the weights. Collective over the trainer ranks.

        If no token counts, nothing changes: neither weights nor the optimizer's moments. If anything of MUST_BE_FINITE
        was not finite on any rank, all ranks skip the update. With Muon a gradient of 0 changes nothing either: its
        updates have one size, so what is left of the momentum would carry the weights on for hundreds of steps.

        Returns `grad_norm` (before clipping), `learning_rate` and `skipped_frac` (0 or 1). A skipped update adds
        `skipped/NAME` 1 for the first that was not finite, since the later ones may follow from it.
        """
        grad_norm = self.model.clip_gradients(self.config.max_grad_norm)
        self._note("gradient", torch.tensor(not math.isfinite(grad_norm)))
        if dist.get_world_size() > 1:
            dist.all_reduce(self._broken, dist.ReduceOp.MAX)
        broken = [MUST_BE_FINITE[index] for index in self._broken.nonzero()]
        learning_rate = self.optimizer.optimizers[0].param_groups[0]["lr"]
        carries_on = self.config.optimizer != "muon" or grad_norm > 0
        if self.num_loss_tokens and carries_on and not broken:
            self.optimizer.step()
        self.zero_gradient()
        if self.roles.device.type == "cuda":
            torch.cuda.synchronize()  # so that the step's time is its own
        metrics = {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "skipped_frac": float(bool(broken)),
        }
        if broken:
            metrics[f"skipped/{broken[0]}"] = 1.0
        return metrics

    def zero_gradient(self) -> None:
        """Forget the gradient so far and free its memory."""
        self.optimizer.zero_grad()
        self.num_loss_tokens = 0
        self._broken.zero_()

    def _note(self, name: str, broken: Tensor) -> None:
        """Remember under `name` that something was not finite, if any entry is True. Does not wait for a GPU."""
        if broken.device.type == "cpu" and not broken.any():
            return
        index = MUST_BE_FINITE.index(name)
        self._broken[index] += broken.any().to(self._broken)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer and schedule, sharded, for torch.distributed.checkpoint. Collective over the role."""
        return {name: stateful.state_dict() for name, stateful in self._stateful.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, but keep this trainer's own rates, decays and betas. Collective over the trainer ranks."""
        own_options = [dict(group, params=None) for group in self._parameter_groups]
        for name, stateful in self._stateful.items():
            stateful.load_state_dict(state[name])
        for group, options in zip(self._parameter_groups, own_options, strict=True):
            group |= options | {"params": group["params"]}
        for schedule in self.schedule.schedulers:
            rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            for group, (peak, share_of) in zip(schedule.optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * share_of(schedule.last_epoch)

    @property
    def _parameter_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizer for group in optimizer.param_groups]
