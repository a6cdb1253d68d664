"""The reference or teacher: log-probs only, without gradients or optimizer memory."""

import torch

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapters_off
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch


class Reference:
    """A frozen model, or one that follows the policy; on ranks of its own, else on the trainers'."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        tensor_parallel: int,
        roles: Roles,
        policy: ShardedModel | None = None,
        moves: bool = False,
    ):
        """Load `folder`, or take the `policy` in place of a model of its own. Collective over the reference's ranks.

        policy: the reference is this model with its adapters off, because LoRA leaves the weights below them as they
        were. moves: the trainer moves the weights (`Trainer.lead`), so they are held in float32 and not in the compute
        dtype. trainer: its fields say how rows are packed and computed, which is as for the policy.
        """
        self.model = policy or build_model(
            model,
            trainer,
            folder,
            device=roles.device,
            tensor_parallel=tensor_parallel,
            frozen=True,
            moves=moves,
        )

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Return log-probs of this rank's part of the tokens that count in the loss, float32 [N]; 0 elsewhere.

        They are at the sampling temperatures. Collective over the reference's ranks.
        """
        with adapters_off(self.model.module):
            return self.model.token_logprobs(batch)
