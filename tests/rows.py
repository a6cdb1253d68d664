"""Micro-batches of a whole batch, for tests of what comes behind the layout."""

import dataclasses

import torch

from grpo.data.layout import plan
from grpo.types import MicroBatch, TrainBatch


def rows_of(batch: TrainBatch, num_rows: int) -> list[MicroBatch]:
    """So many rows of one length, balanced."""
    layout = plan(batch, num_rows, batch.num_tokens)
    return [micro for rank in range(num_rows) for micro in layout.micro_batches(rank)]


def one_row(batch: TrainBatch, multiple: int = 1, share_prompts: bool = True) -> MicroBatch:
    """One row of everything: the longest sequence first, or in their order if some share a prompt."""
    (micro,) = plan(batch, 1, batch.num_tokens, multiple, share_prompts).micro_batches(0)
    return micro


def stacked(micros: list[MicroBatch]) -> MicroBatch:
    """Rows of one length as a micro-batch of B rows, as losses may see it; models get one row after the other."""
    fields = {}
    for name, value in vars(micros[0]).items():
        if name.endswith("_BT") and value is not None:
            fields[name] = torch.cat([getattr(micro, name) for micro in micros])
    return dataclasses.replace(micros[0], **fields)
