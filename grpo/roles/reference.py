"""The frozen reference, or teacher: log-probs only, without gradients or optimizer memory."""

import torch

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapters_off
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch


class Reference:
    """A frozen model over the reference ranks (or the trainer ranks, where there are no others)."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        tensor_parallel: int,
        roles: Roles,
        adapted: ShardedModel | None = None,
    ):
        """Load `folder` in the compute dtype, or take the base of an `adapted` model (LoRA), which holds it already.

        trainer: how rows are made and computed, which is the policy's way. Collective over the reference ranks.
        """
        self.trainer = trainer
        self.model = adapted or build_model(
            model, trainer, folder, device=roles.device, tensor_parallel=tensor_parallel, frozen=True
        )

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of this rank's part of the tokens that count in the loss, float32 [N]; see `add_ref_logprobs`.

        At the sampling temperatures. Collective over the reference ranks.
        """
        with adapters_off(self.model.module):
            return self.model.token_logprobs(batch, self.trainer)
