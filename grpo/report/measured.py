"""What the trainers' updates measured, for the log."""

import math

import torch

from grpo.algorithm.importance import with_effective_sample_size
from grpo.roles.engine import peak_bytes
from grpo.roles.metrics import StepMetrics
from grpo.types import TrainBatch


def measured_metrics(measured: StepMetrics, times: dict[str, float], num_tokens: int) -> dict[str, float]:
    """What the updates measured, the step's times, tokens per second and memory."""
    metrics = with_effective_sample_size(measured.means()) | times
    metrics["tokens_per_second"] = num_tokens / metrics["time/step"]
    if torch.cuda.is_available():
        metrics["memory/peak_gib"] = peak_bytes() / 2**30
    return metrics


def sequence_advantages(batch: TrainBatch) -> list[float | None]:
    """The mean advantage of each sequence's loss tokens; None for a sequence that is excluded."""
    values_N = batch.advantages_N.double().where(batch.loss_mask_N, 0)
    sums_S = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.owner_N, values_N)
    means = (sums_S / batch.num_loss_tokens_S).tolist()
    return [None if math.isnan(mean) else mean for mean in means]
