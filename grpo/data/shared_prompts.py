"""Prompts that several sequences have in common: laid out once per row, and attended to by all of them.

The completions of a group have one prompt. Its tokens, all but the last, are a document of their own, in front of the
group's others, which begin with the prompt's last token, the first that predicts something of their own; they attend to
the keys of that document and to their own. So each token has the keys, the position and the logits that it has where
every sequence is laid out whole, and the prompt is computed once. Source: Liu et al. 2025, arXiv:2506.05433, who attend
twice instead of repeating keys.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from grpo.types import SharedPrompts, TrainBatch


class Prompts(NamedTuple):
    """What is known of the prompts of S sequences."""

    first_S: list[int]
    """The first sequence that has the same prompt."""
    tokens_S: list[int]
    """Tokens that sequences with that prompt can share: all of it but its last."""


class Document(NamedTuple):
    """A stretch of a row whose positions attend to each other, and to a prompt in front of them."""

    start: int
    """Its first place, b * T + t."""
    end: int
    prompt: "Document | None" = None


def prompts_of(batch: TrainBatch) -> Prompts | None:
    """None if no two sequences have a prompt to share. Raises ValueError if a token of a prompt counts in the loss."""
    if batch.prompt_lengths_S is None:
        return None
    place_N = torch.arange(batch.num_tokens) - (batch.lengths_S.cumsum(0) - batch.lengths_S)[batch.owner_N]
    counted = batch.owner_N[batch.loss_mask_N & (place_N < batch.prompt_lengths_S[batch.owner_N])]
    if len(counted):
        raise ValueError(f"sequence {int(counted[0])} has a token that counts in the loss within its prompt")
    ids, starts = batch.ids_N.numpy(), (batch.lengths_S.cumsum(0) - batch.lengths_S).tolist()
    lengths, first_of = batch.prompt_lengths_S.tolist(), {}
    keys = [ids[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]
    first_S = [first_of.setdefault(key, index) for index, key in enumerate(keys)]
    tokens_S = [max(length - 1, 0) for length in lengths]
    shared = any(tokens_S[index] for index, first in enumerate(first_S) if first != index)
    return Prompts(first_S, tokens_S) if shared else None


def runs(row: Sequence[int], prompts: Prompts | None) -> Iterator[tuple[list[int], int]]:
    """The row's sequences in order, neighbours with the same prompt together: (indices, tokens that they share)."""
    if prompts is None:
        yield from (([index], 0) for index in row)
        return
    for first, run in itertools.groupby(row, lambda index: prompts.first_S[index]):
        indices = list(run)
        yield indices, prompts.tokens_S[first] if len(indices) > 1 else 0


def row_tokens(row: Sequence[int], lengths: Sequence[int], prompts: Prompts | None) -> int:
    """Positions that a row needs."""
    saved = sum((len(indices) - 1) * shared for indices, shared in runs(row, prompts))
    return sum(lengths[index] for index in row) - saved


def pack_groups(
    lengths: Sequence[int], prompts: Prompts, num_ranks: int, max_tokens: int, multiple: int
) -> list[list[int]]:
    """Rows of at most `max_tokens`, num_ranks x k of them with k as small as it goes; fullest first, some maybe empty.

    Sequences with the same prompt follow each other, so that a prompt is laid out again only where a row ends in the
    middle of them. Rows are filled one after the other, up to the smallest of some equal heights at which all fit.
    """
    order = sorted(range(len(lengths)), key=lambda index: (prompts.first_S[index], -lengths[index], index))
    at_least = row_tokens(order, lengths, prompts)
    step = max(multiple, max_tokens // 32)
    num_micro_batches = max(1, math.ceil(at_least / (max_tokens * num_ranks)))
    while True:  # ends at the latest when every sequence has a row of its own
        num_rows = num_ranks * num_micro_batches
        lowest = math.ceil(at_least / num_rows / multiple) * multiple
        for height in (*range(lowest, max_tokens, step), max_tokens):
            if rows := _fill_in_order(order, lengths, prompts, num_rows, min(height, max_tokens)):
                return sorted(rows, key=lambda row: -row_tokens(row, lengths, prompts))
        num_micro_batches += 1


def _fill_in_order(
    order: list[int], lengths: Sequence[int], prompts: Prompts, num_rows: int, height: int
) -> list[list[int]] | None:
    """Each sequence into the row of the one before it if it fits there, else into the next; None if rows run out."""
    rows: list[list[int]] = [[]]
    room, last = height, -1
    for index in order:
        saved = prompts.tokens_S[index] if prompts.first_S[index] == last else 0
        if lengths[index] - saved > room:
            if len(rows) == num_rows or lengths[index] > height:
                return None
            rows.append([])
            room, saved = height, 0
        rows[-1].append(index)
        room, last = room - lengths[index] + saved, prompts.first_S[index]
    return rows + [[] for _ in range(num_rows - len(rows))]


def shared_keys(documents: Sequence[Document]) -> SharedPrompts:
    """Whose keys each document attends to. `documents` are all of a micro-batch, in order."""
    keys, own, uses = [], [], {}
    starts = [0]
    for document in documents:
        at = starts[-1]
        if prompt := document.prompt:
            keys.append(torch.arange(prompt.start, prompt.end))
            uses[prompt].append(torch.arange(at, at := at + prompt.end - prompt.start))
        length = document.end - document.start
        keys.append(torch.arange(document.start, document.end))
        own.append(torch.arange(at, at + length))
        uses[document] = [own[-1]]
        starts.append(at + length)
    several = [(document, places) for document, places in uses.items() if len(places) > 1]
    # never of size 0 or 1, for which torch.compile would make code of its own
    num_uses = max([2, *(len(places) for _, places in several)])
    reused = [torch.arange(document.start, document.end) for document, _ in several] or [torch.arange(2)]
    places = [torch.stack(places, 1) for _, places in several] or [torch.cat(own)[:2, None]]
    padded = [torch.nn.functional.pad(x, (0, num_uses - x.shape[1]), value=-1) for x in places]
    starts_D = torch.tensor(starts, dtype=torch.int32)
    return SharedPrompts(
        keys_K=torch.cat(keys),
        key_starts=starts_D,
        longest=int(starts_D.diff().max()),
        own_T=torch.cat(own),
        reused_R=torch.cat(reused),
        uses_RU=torch.cat(padded),
    )
