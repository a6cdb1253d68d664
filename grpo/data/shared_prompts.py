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

NUM_HEIGHTS = 32  # tried, at most


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
    ids, counts = batch.ids_N.numpy(), batch.loss_mask_N.numpy()
    lengths, first_of = batch.prompt_lengths_S.tolist(), {}
    spans = [slice(start, start + n) for start, n in zip(batch.starts_S.tolist(), lengths, strict=True)]
    if bad := [index for index, span in enumerate(spans) if counts[span].any()]:
        raise ValueError(f"sequence {bad[0]} has a token that counts in the loss within its prompt")
    keys = [ids[span].tobytes() for span in spans]
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
    middle of them. Rows are filled one after the other, up to the lowest of some heights at which all fit.
    """
    groups: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        groups.setdefault(prompts.first_S[index], []).append(index)
    at_least = row_tokens([index for group in groups.values() for index in group], lengths, prompts)
    num_rows = num_ranks * max(1, math.ceil(at_least / (max_tokens * num_ranks)))
    # ends at the latest when every sequence has a row of its own
    while _fill_in_turn(groups, lengths, prompts, num_rows, max_tokens) is None:
        num_rows += num_ranks
    lowest = math.ceil(at_least / num_rows / multiple) * multiple
    heights = range(lowest, max_tokens, max(multiple, max_tokens // NUM_HEIGHTS))
    found = (_fill_in_turn(groups, lengths, prompts, num_rows, height) for height in (*heights, max_tokens))
    return sorted(next(filter(None, found)), key=lambda row: -row_tokens(row, lengths, prompts))


def _fill_in_turn(
    groups: dict[int, list[int]], lengths: Sequence[int], prompts: Prompts, num_rows: int, height: int
) -> list[list[int]] | None:
    """One group after the other into one row after the other: the longest sequence that fits, and a new row if none
    does. None if rows run out."""
    rows: list[list[int]] = [[]]
    room = height
    for first, group in groups.items():
        left, shared = list(group), 0  # by a row's first sequence of the group nothing is saved
        while left:
            index = next((index for index in left if lengths[index] - shared <= room), None)
            if index is None:
                if len(rows) == num_rows or not rows[-1]:
                    return None
                rows.append([])
                room, shared = height, 0
                continue
            left.remove(index)
            rows[-1].append(index)
            room, shared = room - lengths[index] + shared, prompts.tokens_S[first]
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
