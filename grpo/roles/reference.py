"""The reference, or teacher: log-probs only, without gradients or optimizer memory."""

import contextlib

import torch

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapters_off
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch


class Reference:
    """A frozen model over the reference ranks (or the trainer ranks, where there are no others), or the policy."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        tensor_parallel: int,
        roles: Roles,
        policy: ShardedModel | None = None,
        as_trained: bool = False,
    ):
        """Load `folder` in the compute dtype, or take the `policy`, which holds the reference already.

        as_trained: the policy with the weights that it has by then, its own teacher; else its base, which with LoRA
        stays as it was. trainer: how rows are made and computed, which is the policy's way. Collective over the
        reference ranks.
        """
        self.trainer, self.as_trained = trainer, as_trained
        options = {"device": roles.device, "tensor_parallel": tensor_parallel, "frozen": True}
        self.model = policy or build_model(model, trainer, folder, **options)

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of this rank's part of the tokens that count in the loss, float32 [N]; see `add_ref_logprobs`.

        At the sampling temperatures. Collective over the reference ranks.
        """
        with contextlib.nullcontext() if self.as_trained else adapters_off(self.model.module):
            return self.model.token_logprobs(batch, self.trainer)
