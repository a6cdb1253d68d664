"""Context parallelism by heads: C ranks take each row together, a stretch of T / C places each.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Only attention reads places of other ranks. There an all-to-all trades
places for heads, so that every kind of attention runs as on one rank, on all places and 1 / C of the heads; a second
one trades back. Losses and metrics get whole rows, see `whole_rows`. Left out: ring attention, whose kernels would have
to merge documents and the keys of shared prompts.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single


class RowRanks:
    """Base class of modules that must know which ranks share a row."""

    row_ranks: dist.ProcessGroup | None = None
    """The C ranks that take each row together; None if a rank takes its rows alone."""


def share_rows(model: nn.Module, ranks: dist.ProcessGroup) -> None:
    """Have these ranks take each row of a model together. Frozen models take theirs alone."""
    for module in model.modules():
        if isinstance(module, RowRanks):
            module.row_ranks = ranks


class AttentionByHeads(RowRanks):
    """Base class of kinds of attention: their `attend` gets all places of a row, and a part of the heads."""

    # torchtitan declares shardings for these argument names: L this rank's places, N heads, H the size of a head
    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:
        """Attend from this rank's places to all that they see. Returns [B, L, N, H].

        Key-value heads are repeated until they divide over the ranks; query heads do (`hf_folder.check_trainer`).
        """
        ranks = self.row_ranks
        if ranks is None:
            return self.attend(q_BLNH, k_BLNH, v_BLNH, **options)
        num_ranks = ranks.size()
        num_kv_heads = k_BLNH.shape[2]
        repeats = math.lcm(num_kv_heads, num_ranks) // num_kv_heads
        if repeats > 1:
            k_BLNH = k_BLNH.repeat_interleave(repeats, dim=2)
            v_BLNH = v_BLNH.repeat_interleave(repeats, dim=2)
        out = self.attend(
            _places_to_heads(q_BLNH, ranks),
            _places_to_heads(k_BLNH, ranks),
            _places_to_heads(v_BLNH, ranks),
            **options,
        )
        return _heads_to_places(out, ranks)


def _places_to_heads(values: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Trade [B, T / C, N, H], this rank's places of all heads, for [B, T, N / C, H]."""
    by_receiver = values.unflatten(2, (ranks.size(), -1)).movedim(2, 0)
    by_stretch = _all_to_all(by_receiver, ranks)
    return by_stretch.movedim(0, 1).flatten(1, 2)


def _heads_to_places(values: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Undo `_places_to_heads`."""
    by_receiver = values.unflatten(1, (ranks.size(), -1)).movedim(1, 0)
    by_heads = _all_to_all(by_receiver, ranks)
    return by_heads.movedim(0, 2).flatten(2, 3)


def _all_to_all(by_receiver: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Send the parts along the first dimension to the ranks in order. Returns what came from each; has a backward."""
    return all_to_all_single(by_receiver.contiguous(), None, None, ranks)


def own_stretch(values_BT: Tensor, ranks: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's stretch [B, T / C] of a row, all of it without other ranks. A layout's T divides by C."""
    if ranks is None:
        return values_BT
    return values_BT.chunk(ranks.size(), 1)[ranks.rank()].contiguous()


def whole_rows(own: Tensor, ranks: dist.ProcessGroup | None) -> Tensor:
    """Return [B, T] on each rank, from the stretch of each."""
    if ranks is None:
        return own
    return _Gathered.apply(own, ranks)


class _Gathered(torch.autograd.Function):
    """Whole rows from stretches. Each rank has the gradient of the whole row, of which its own stretch goes back.

    FSDP adds up what the ranks of a row give each parameter.
    """

    @staticmethod
    def forward(ctx, own, ranks):
        ctx.ranks = ranks
        stretches = [torch.empty_like(own) for _ in range(ranks.size())]
        dist.all_gather(stretches, own.contiguous(), group=ranks)
        return torch.cat(stretches, 1)

    @staticmethod
    def backward(ctx, grad_BT):
        return own_stretch(grad_BT, ctx.ranks), None
