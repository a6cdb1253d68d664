"""The reference or teacher: log-probs only, without gradients or optimizer memory."""

import contextlib
from collections.abc import Sequence

import torch

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import select
from grpo.models.build import ShardedModel, build_model
from grpo.models.lora import adapters_off
from grpo.roles.process_groups import Roles
from grpo.types import TrainBatch


class Reference:
    """Frozen models, or the policy itself, over the reference ranks (else the trainer ranks)."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        folders: Sequence[str],
        tensor_parallel: int,
        roles: Roles,
        policy: ShardedModel | None = None,
        as_trained: bool = False,
    ):
        """Load `folders` in the compute dtype, or take the `policy`, which holds the reference already.

        folders: one, or one for each teacher in the order of `TrainBatch.teacher_S`. policy: its base is the reference,
        which LoRA leaves as it was; with `as_trained` the policy teaches itself, with the weights that it has by then.
        trainer: rows are made and computed as the policy's are. Collective over the reference ranks.
        """
        self.trainer = trainer
        self.as_trained = as_trained
        if policy:
            self.models = [policy]
        else:
            options = {"device": roles.device, "tensor_parallel": tensor_parallel, "frozen": True}
            self.models = [build_model(model, trainer, folder, **options) for folder in folders]

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Return log-probs of this rank's part of the tokens that count in the loss, float32 [N]; 0 elsewhere.

        They are at the sampling temperatures. If there are several teachers, each computes only its own sequences.
        Collective over the reference ranks.
        """
        if batch.teacher_S is None:
            return self._logprobs(self.models[0], batch)
        logprobs_N = torch.zeros(batch.num_tokens)
        for number, model in enumerate(self.models):
            own_S = batch.teacher_S == number
            if own_S.any():  # on all ranks or on none, since each has the whole batch
                logprobs_N[own_S[batch.owner_N]] = self._logprobs(model, select(batch, own_S))
        return logprobs_N

    def _logprobs(self, model: ShardedModel, batch: TrainBatch) -> torch.Tensor:
        with contextlib.nullcontext() if self.as_trained else adapters_off(model.module):
            return model.token_logprobs(batch, self.trainer)
