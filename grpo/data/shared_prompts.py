"""Prompts that several sequences of a row have in common: computed once, in front of these sequences.

The completions of a group have one prompt. If they are neighbours in a row, the tokens of the prompt except its last
become a document of their own. Each of the sequences is then a document that begins with the prompt's last token, which
is the first one to predict something different, and attends to the keys of the prompt's document and to its own. So
every token has the same keys, position and logits as in a row of whole sequences. Source: Liu et al. 2025,
arXiv:2506.05433, who attend twice instead of repeating keys.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from grpo.types import SharedPrompts, TrainBatch

# Indices of the sequences in a row, in order
Indices = list[int]
# Tokens of each sequence
Lengths = list[int]


class RepeatedPrompts(NamedTuple):
    """Which of S sequences have the same prompt."""

    first_S: list[int]
    """The first sequence that has the same prompt."""
    tokens_S: list[int]
    """Tokens that sequences with that prompt can share: all except the last."""


class Document(NamedTuple):
    """A stretch of a row whose positions attend to each other, and to a prompt in front of them."""

    sequence: int
    begin: int
    """The sequence that it is a part of (-1 for padding), and the first of the sequence's tokens that it has."""
    start: int
    end: int
    """Its first place, b * T + t, and the place after its last."""
    prompt: "Document | None" = None


def repeated_prompts(batch: TrainBatch) -> RepeatedPrompts | None:
    """Find sequences with the same prompt; None if no two of them have a token to share.

    Raises ValueError if a token of a prompt counts in the loss.
    """
    if batch.prompt_lengths_S is None:
        return None
    ids = batch.ids_N.numpy()
    counts = batch.loss_mask_N.numpy()
    lengths = batch.prompt_lengths_S.tolist()
    first_of = {}
    first_S = []
    for index, start in enumerate(batch.starts_S.tolist()):
        prompt = slice(start, start + lengths[index])
        if counts[prompt].any():
            raise ValueError(f"sequence {index} has a token that counts in the loss within its prompt")
        first = first_of.setdefault(ids[prompt].tobytes(), index)
        first_S.append(first)
    tokens_S = [max(length - 1, 0) for length in lengths]
    shared_lengths = [tokens_S[index] for index, first in enumerate(first_S) if first != index]
    if not any(shared_lengths):
        return None
    return RepeatedPrompts(first_S, tokens_S)


def row_tokens(
    row: Indices,
    lengths: Lengths,
    prompts: RepeatedPrompts | None,
) -> int:
    """Count the positions that a row needs."""
    num_tokens = sum(lengths[index] for index in row)
    for indices, num_shared in _neighbours(row, prompts):
        num_tokens -= (len(indices) - 1) * num_shared
    return num_tokens


def documents_of_row(
    row: Indices,
    lengths: Lengths,
    prompts: RepeatedPrompts | None,
    place: int,
) -> Iterator[Document]:
    """Cut a row that begins at `place` into documents, one after the other."""
    for indices, num_shared in _neighbours(row, prompts):
        prompt = None
        if num_shared:
            prompt = Document(indices[0], 0, place, place + num_shared)
            yield prompt
            place = prompt.end
        for index in indices:
            end = place + lengths[index] - num_shared
            yield Document(index, num_shared, place, end, prompt)
            place = end


def _neighbours(row: Indices, prompts: RepeatedPrompts | None) -> Iterator[tuple[Indices, int]]:
    """Yield neighbours in a row that have the same prompt, and the number of tokens that they share."""
    if prompts is None:
        for index in row:
            yield [index], 0
        return
    for first, neighbours in itertools.groupby(row, key=prompts.first_S.__getitem__):
        indices = list(neighbours)
        num_shared = 0
        if len(indices) > 1:
            num_shared = prompts.tokens_S[first]
        yield indices, num_shared


def shared_keys(documents: Sequence[Document]) -> SharedPrompts:
    """Find out which keys each document attends to. `documents` are all of a micro-batch, in order."""
    keys = []
    num_keys = 0
    starts = [0]
    for document in documents:
        for stretch in filter(None, (document.prompt, document)):
            keys.append(torch.arange(stretch.start, stretch.end))
            num_keys += stretch.end - stretch.start
        starts.append(num_keys)
    keys_K = torch.cat(keys)
    # the keys that each place is, place after place; the first one is for its own document
    by_place_K = keys_K.argsort(stable=True)
    num_uses_T = keys_K.bincount()
    first_T = num_uses_T.cumsum(0) - num_uses_T

    reused_R = (num_uses_T > 1).nonzero().flatten()
    if not len(reused_R):  # never of size 0 or 1, for which torch.compile would make code of its own
        reused_R = torch.arange(2)
    uses_U = torch.arange(max(2, int(num_uses_T.max())))
    is_use_RU = uses_U < num_uses_T[reused_R, None]
    place_RU = first_T[reused_R, None] + uses_U
    uses_RU = by_place_K[place_RU.where(is_use_RU, 0)]
    key_starts = torch.tensor(starts, dtype=torch.int32)
    return SharedPrompts(
        keys_K=keys_K,
        key_starts=key_starts,
        longest=int(key_starts.diff().max()),
        own_T=by_place_K[first_T],
        reused_R=reused_R,
        uses_RU=uses_RU.where(is_use_RU, -1),
    )
