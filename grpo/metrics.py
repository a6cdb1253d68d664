"""What a step's updates measured, however the step was split, and the most memory that a GPU has held.

A metric is the mean over all loss tokens of the step, or their maximum where its name ends in `max`: over
micro-batches, ranks and updates alike.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from grpo.types import MicroBatch

# Kept for each sequence too, for the tables of completions.
PER_SEQUENCE = "mismatch/mean"


class StepMetrics:
    """Sums and maxima over loss tokens: `add` per micro-batch, `reduce` per update, `means` at the end of the step."""

    def __init__(self, num_sequences: int) -> None:
        """`num_sequences`: of the step."""
        self.num_sequences = num_sequences
        self._sums: dict[str, torch.Tensor] = {}  # of the update at hand, on the device; so are the next four
        self._maxima: dict[str, torch.Tensor] = {}
        self._loss: torch.Tensor | float = 0.0
        self._num_tokens: torch.Tensor | float = 0.0
        self._sequence_S2: torch.Tensor | None = None
        self._totals: dict[str, tuple[float, float]] = {}  # sum and number of tokens, over all ranks; so are the rest
        self._highest: dict[str, float] = {}
        self._recorded: dict[str, list[float]] = {}
        self.num_loss_tokens = 0.0
        self._sequence_totals_S2 = torch.zeros(num_sequences, 2, dtype=torch.float64)

    def add(self, micro: MicroBatch, loss: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """Take in one micro-batch: its part of the loss, and a value per position [B, T] of each metric.

        Nothing here waits for the device. Raises ValueError unless an update's micro-batches have the same names.
        """
        names = self._sums.keys() | self._maxima.keys()
        if names and names != metrics.keys():
            raise ValueError(f"the loss logged {sorted(names)} and then {sorted(metrics)}; log the same each time")
        mask_BT = micro.loss_mask_BT
        for name, values_BT in metrics.items():
            values_BT = values_BT.double().where(mask_BT, 0)
            if name.endswith("max"):
                self._maxima[name] = torch.maximum(self._maxima.get(name, values_BT.new_zeros(())), values_BT.max())
            else:
                sum_and_number = torch.stack([values_BT.sum(), mask_BT.sum().double()])
                self._sums[name] = self._sums.get(name, 0) + sum_and_number
            if name == PER_SEQUENCE:
                if self._sequence_S2 is None:  # the last one is for padding
                    self._sequence_S2 = loss.new_zeros(self.num_sequences + 1, 2, dtype=torch.float64)
                per_token_N2 = torch.stack([values_BT, mask_BT.double()], -1).flatten(0, 1)
                sequence_N = micro.sequence_BT.flatten()
                self._sequence_S2.index_add_(0, sequence_N.where(sequence_N >= 0, self.num_sequences), per_token_N2)
        self._loss = self._loss + loss.double()
        self._num_tokens = self._num_tokens + mask_BT.sum().double()

    def reduce(self, group: ProcessGroup | None) -> None:
        """End an update: sums and maxima over the data-parallel ranks (None: there is one). Collective over them."""
        sums = torch.cat([torch.stack([self._loss, self._num_tokens]), *self._sums.values()])
        maxima = torch.stack([*self._maxima.values()]) if self._maxima else sums.new_zeros(0)
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
            if self._sequence_S2 is not None:
                dist.all_reduce(self._sequence_S2, group=group)
        loss, num_tokens, *rest = torch.cat([sums, maxima]).tolist()  # one transfer from the device
        for name, total, number in zip(self._sums, rest[::2], rest[1::2], strict=False):
            so_far, number_so_far = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = so_far + total, number_so_far + number
        for name, highest in zip(self._maxima, rest[2 * len(self._sums) :], strict=True):
            self._highest[name] = max(self._highest.get(name, -math.inf), highest if num_tokens else -math.inf)
        if self._sequence_S2 is not None:
            self._sequence_totals_S2 += self._sequence_S2[:-1].cpu()
        self.record(loss=loss)
        self.num_loss_tokens += num_tokens
        self._sums, self._maxima, self._loss, self._num_tokens, self._sequence_S2 = {}, {}, 0.0, 0.0, None

    def record(self, **values: float) -> None:
        """Numbers that are no token's, such as the gradient's norm; a step has the plain mean of those recorded."""
        for name, value in values.items():
            self._recorded.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """Everything by name; NaN for the metrics of tokens if no token counted."""
        means = {name: total / num if num else math.nan for name, (total, num) in self._totals.items()}
        maxima = {name: math.nan if value == -math.inf else value for name, value in self._highest.items()}
        return means | maxima | {name: sum(values) / len(values) for name, values in self._recorded.items()}

    def sequence_means(self) -> list[float | None]:
        """The mean of PER_SEQUENCE over each sequence's loss tokens; None where none counted or nothing is known."""
        means = (self._sequence_totals_S2[:, 0] / self._sequence_totals_S2[:, 1]).tolist()
        return [None if math.isnan(mean) else mean for mean in means]


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
