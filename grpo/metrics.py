"""What a step's updates measured, however the step was split, and the most memory that a GPU has held.

A metric of tokens is the mean over all loss tokens of the step, or their maximum if its name ends in `max`, over
micro-batches, ranks and updates alike.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from grpo.types import MicroBatch, Scalars

# The metric that is kept for each sequence too, for the records of rollouts
PER_SEQUENCE = "mismatch/mean"


class StepMetrics:
    """Sums and maxima over loss tokens: `add` per micro-batch, `reduce` per update, `means` at the end of the step."""

    def __init__(self, num_sequences: int) -> None:
        """Begin a step of `num_sequences` sequences."""
        self.num_sequences = num_sequences
        self.num_loss_tokens = 0.0
        # over all ranks and the updates so far; a total is a sum and the number of its tokens
        self._totals: dict[str, tuple[float, float]] = {}
        self._highest: dict[str, float] = {}
        self._recorded: dict[str, list[float]] = {}
        self._sequence_totals_S2 = torch.zeros(num_sequences, 2, dtype=torch.float64)
        self._begin_update()

    def _begin_update(self) -> None:
        """Reset what this rank has added, which stays on the device."""
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss_and_tokens: Tensor | float = 0.0
        self._sequence_S2: Tensor | None = None

    def add(
        self,
        micro: MicroBatch,
        loss: Tensor,
        metrics: dict[str, Tensor],
    ) -> None:
        """Add one micro-batch: its part of the loss, and a value per position [B, T] of each metric.

        Nothing here waits for the device. Raises ValueError unless an update's micro-batches have the same names.
        """
        names = self._sums.keys() | self._maxima.keys()
        if names and names != metrics.keys():
            raise ValueError(f"the loss logged {sorted(names)} and then {sorted(metrics)}; log the same each time")
        mask_BT = micro.loss_mask_BT
        num_tokens = mask_BT.sum().double()
        for name, values_BT in metrics.items():
            values_BT = values_BT.double().where(mask_BT, 0)
            if name.endswith("max"):
                highest = self._maxima.get(name, values_BT.new_zeros(()))
                self._maxima[name] = torch.maximum(highest, values_BT.max())
            else:
                total_and_number = torch.stack([values_BT.sum(), num_tokens])
                self._sums[name] = self._sums.get(name, 0) + total_and_number
            if name == PER_SEQUENCE:
                self._add_per_sequence(micro, values_BT)
        self._loss_and_tokens = self._loss_and_tokens + torch.stack([loss.double(), num_tokens])

    def _add_per_sequence(self, micro: MicroBatch, values_BT: Tensor) -> None:
        """Add values, which are 0 where no token counts, to the sums and numbers of their sequences."""
        if self._sequence_S2 is None:  # one more row, for padding
            self._sequence_S2 = values_BT.new_zeros(self.num_sequences + 1, 2)
        counts_BT = micro.loss_mask_BT.double()
        per_token_BT2 = torch.stack([values_BT, counts_BT], -1)
        rows = micro.sequence_BT.flatten()
        rows = rows.where(rows >= 0, self.num_sequences)
        self._sequence_S2.index_add_(0, rows, per_token_BT2.flatten(0, 1))

    def reduce(self, group: ProcessGroup | None) -> None:
        """End an update: join sums and maxima of the data-parallel ranks. Collective over them; None: there is one."""
        sums = torch.cat([self._loss_and_tokens, *self._sums.values()])
        maxima = sums.new_zeros(0)
        if self._maxima:
            maxima = torch.stack(list(self._maxima.values()))
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
            if self._sequence_S2 is not None:
                dist.all_reduce(self._sequence_S2, group=group)

        everything = torch.cat([sums, maxima])
        loss, num_tokens, *values = everything.tolist()  # one transfer from the device
        for name in self._sums:
            total, number = self._totals.get(name, (0.0, 0.0))
            total += values.pop(0)
            number += values.pop(0)
            self._totals[name] = (total, number)
        for name, value in zip(self._maxima, values, strict=True):
            highest = self._highest.setdefault(name, -math.inf)
            if num_tokens:
                self._highest[name] = max(highest, value)
        if self._sequence_S2 is not None:
            self._sequence_totals_S2 += self._sequence_S2[:-1].cpu()
        self.record(loss=loss)
        self.num_loss_tokens += num_tokens
        self._begin_update()

    def record(self, **values: float) -> None:
        """Add numbers that belong to no token, such as the gradient's norm. The step has their plain mean."""
        for name, value in values.items():
            self._recorded.setdefault(name, []).append(value)

    def means(self) -> Scalars:
        """Return all metrics by name; NaN for those of tokens if no token counted."""
        means = {}
        for name, (total, number) in self._totals.items():
            means[name] = total / number if number else math.nan
        for name, highest in self._highest.items():
            means[name] = highest if highest > -math.inf else math.nan
        for name, values in self._recorded.items():
            means[name] = sum(values) / len(values)
        return means

    def rollout_means(self, rollout_S: Tensor) -> list[float | None]:
        """Return the mean of PER_SEQUENCE over each rollout's loss tokens; None for a rollout without any.

        rollout_S: as in `TrainBatch`, of the step.
        """
        zeros_R2 = torch.zeros(int(rollout_S.max()) + 1, 2, dtype=torch.float64)
        totals_R, numbers_R = zeros_R2.index_add(0, rollout_S, self._sequence_totals_S2).unbind(1)
        means_R = totals_R / numbers_R
        return [None if math.isnan(mean) else mean for mean in means_R.tolist()]


# GPU memory of this process, in bytes
_peak = 0  # before `_given_back` last changed: torch's own peak starts again from there
_given_back = 0  # by an engine that sleeps now


def set_given_back(num_bytes: int) -> None:
    """Set how much of what torch counts is not held from now on: an engine's share while it sleeps, 0 when it wakes."""
    global _peak, _given_back
    _peak = peak_bytes()
    _given_back = num_bytes
    torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the most memory that this process has ever held of its GPU at one time.

    torch goes on counting what a sleeping engine has given back (`generator.sleep`), which this does not.
    """
    return max(_peak, torch.cuda.max_memory_allocated() - _given_back)
