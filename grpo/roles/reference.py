"""The reference or teacher: log-probs only, without gradients or optimizer memory."""

import contextlib

import torch

from grpo.config import ModelConfig, TrainerConfig
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapters_off
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch


class Reference:
    """A frozen model, or the policy itself, over the reference ranks (else the trainer ranks)."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folder: str,
        tensor_parallel: int,
        roles: Roles,
        policy: ShardedModel | None = None,
        as_trained: bool = False,
        moves: bool = False,
    ):
        """Load `folder` in the compute dtype, or take the `policy`, which holds the reference already.

        policy: its base is the reference, which LoRA leaves as it was; with `as_trained` the policy teaches itself,
        with the weights that it has by then. moves: the trainer moves the weights, see `Trainer.lead`. trainer: rows
        are made and computed as the policy's are. Collective over the reference ranks.
        """
        self.trainer = trainer
        self.as_trained = as_trained
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

        They are at the sampling temperatures. Collective over the reference ranks.
        """
        with contextlib.nullcontext() if self.as_trained else adapters_off(self.model.module):
            return self.model.token_logprobs(batch, self.trainer)
