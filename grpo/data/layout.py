"""The rows of a batch: planned once, and micro-batches are written from the plan.

A micro-batch is one row of whole sequences. Rows are balanced over data-parallel ranks: every rank plans the same ones
from the same lengths, and writes its own. Neighbours in a row that have the same prompt have it once, in front of them:
its tokens except the last become a document of their own, whose keys each of their documents attends to as well (Liu et
al. 2025, arXiv:2506.05433, who attend twice instead). Each of their documents begins with the prompt's last token,
which is the first one to predict something different. So every token has the same keys, position and logits as in a
row of whole sequences.

Example: sequences 0 and 1 have the same prompt of 4 tokens and complete it with 2 and 3 tokens; sequence 2 has a
prompt of 2 tokens and completes it with 1. In one row they take 13 positions, not 16:

    document                 sequence  begin  start  length
    the shared prompt               0      0      0       3
    its last token, then 2          0      3      3       3
    its last token, then 3          1      3      6       4
    prompt and completion           2      0     10       3

Left out: sequences are never cut, and nothing here knows about devices or process groups.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo.types import KeptIds, MicroBatch, Scalars, SharedPrompts, TrainBatch

# Positions of a document of padding. Padding can be longer than any sequence, but its positions must be among the
# model's, and even toys have more than these.
PAD_DOCUMENT = 128
# Heights of rows that are tried at most, if sequences share prompts
NUM_HEIGHTS = 32

# Indices of sequences in a row, in order
Indices = list[int]


class Document(NamedTuple):
    """Neighbouring positions of a row that attend to each other, and to a prompt in front of them if they share one."""

    sequence: int
    """Index in the batch of the sequence that it is a part of; -1 for padding."""
    begin: int
    """The first of the sequence's tokens that it has."""
    start: int
    """Its first position in the row."""
    length: int
    prompt: "Document | None" = None

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.length


class PackedRow(NamedTuple):
    """Documents that fill a row from its first position on, without padding."""

    documents: list[Document]
    num_tokens: int
    """Number of positions that they take."""


class Sequences(NamedTuple):
    """What a plan depends on: S sequences, by their lengths and their prompts."""

    lengths: list[int]
    """Tokens of each, prompt and completion."""
    first: Indices
    """The first sequence that has the same prompt; each one itself if prompts are not to be shared."""
    num_shared: list[int]
    """Tokens that sequences with that prompt can share: all except the last."""

    @property
    def share(self) -> bool:
        """True if two of them have a token to share."""
        return any(self.num_shared[index] for index, first in enumerate(self.first) if first != index)

    def row(self, indices: Indices) -> PackedRow:
        """Lay sequences out side by side. Which positions a row has is decided here and nowhere else."""
        documents = []
        end = 0
        for first, group in itertools.groupby(indices, key=self.first.__getitem__):
            neighbours = list(group)
            prompt = None
            num_shared = 0
            if len(neighbours) > 1 and self.num_shared[first] > 0:
                num_shared = self.num_shared[first]
                prompt = Document(neighbours[0], begin=0, start=end, length=num_shared)
                documents.append(prompt)
                end = prompt.end
            for index in neighbours:
                length = self.lengths[index] - num_shared
                documents.append(Document(index, num_shared, end, length, prompt))
                end += length
        return PackedRow(documents, end)


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a batch, of all ranks. The same on every rank, so nothing is communicated."""

    batch: TrainBatch
    rows: list[list[PackedRow]]
    """rows[rank][micro_batch]. All ranks have the same number, at least one; a row without sequences is padding."""
    row_length: int
    """Positions T of every row: one length for all, so that compiled code sees few shapes. Rounding may bring it above
    `max_tokens`."""
    multiple: int
    """The number of positions that get log-probs is rounded up to a multiple of it."""
    shares_prompts: bool
    """Whether sequences share prompts. If they do, every micro-batch says which keys its documents attend to."""
    num_stretches: int
    """Number of ranks that take a row together. Each scores a stretch of row_length / num_stretches positions."""

    def micro_batches(self, rank: int, stretch: int = 0) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches, each written when it is asked for.

        Each is a whole row. Only places of one stretch get log-probs, and are counted from its beginning.
        """
        for row in self.rows[rank]:
            yield self._write(row, stretch)

    def _write(self, row: PackedRow, stretch: int) -> MicroBatch:
        """Write one row as a micro-batch.

        What belongs to a token goes to the position that predicts it, what belongs to a sequence to all its positions.
        """
        batch = self.batch
        # Indices among the N of each position's own token and of the token that it predicts; -1 for none
        own_T = torch.full((self.row_length,), -1)
        token_T = own_T.clone()
        positions_T = torch.zeros_like(own_T)
        documents = row.documents + _padding(row.num_tokens, self.row_length)
        for document in documents:
            places = slice(document.start, document.end)
            of_sequence_T = torch.arange(document.begin, document.begin + document.length)
            positions_T[places] = of_sequence_T
            if document.sequence >= 0:
                tokens_T = batch.starts_S[document.sequence] + of_sequence_T
                is_last_T = of_sequence_T == batch.lengths_S[document.sequence] - 1
                own_T[places] = tokens_T
                token_T[places] = (tokens_T + 1).masked_fill(is_last_T, -1)  # the shift by one: here and nowhere else

        own_BT = own_T[None]
        token_BT = token_T[None]
        per_token = {name.replace("_N", "_BT"): _at(token_BT, values_N) for name, values_N in batch.per_token.items()}
        targets_BT = per_token.pop("ids_BT")
        owner_BT = _at(own_BT, batch.owner_N, -1)

        scoring_T = torch.arange(self.row_length).tensor_split(self.num_stretches)[stretch]
        counts_T = per_token["loss_mask_BT"][0, scoring_T]
        scored_M = _scored_places(counts_T, self.multiple)
        kept = _kept_ids(batch, token_T[scoring_T][scored_M])

        starts = [document.start for document in documents]
        document_starts = torch.tensor([*starts, self.row_length], dtype=torch.int32)
        shared = None
        if self.shares_prompts:
            shared = _shared_keys(documents)
        return MicroBatch(
            **per_token,
            ids_BT=_at(own_BT, batch.ids_N),
            targets_BT=targets_BT,
            positions_BT=positions_T[None],
            token_BT=token_BT,
            sequence_BT=_at(owner_BT, batch.sequence_S, -1),
            temperatures_BT=_at(owner_BT, batch.temperatures_S, 1),
            num_loss_tokens_BT=_at(owner_BT, batch.num_loss_tokens_S).clamp(min=1),
            num_rollout_tokens_BT=_at(owner_BT, batch.num_rollout_tokens_S).clamp(min=1),
            scored_M=scored_M,
            kept=kept,
            document_starts=document_starts,
            longest_document=int(document_starts.diff().max()),
            shared=shared,
            num_sequences=int(batch.sequence_S.max()) + 1,
        )

    def metrics(self) -> Scalars:
        """Measure how much of all ranks' positions is padding.

        If prompts are shared, measure also the share of all tokens that need no position of their own.
        """
        rows = list(itertools.chain(*self.rows))
        num_needed = sum(row.num_tokens for row in rows)
        num_positions = len(rows) * self.row_length
        metrics = {"packing/padding_frac": 1 - num_needed / num_positions}
        if self.shares_prompts:
            metrics["packing/shared_frac"] = 1 - num_needed / self.batch.num_tokens
        return metrics


def plan(
    batch: TrainBatch,
    num_ranks: int,
    max_tokens: int,
    multiple: int = 1,
    share_prompts: bool = True,
    num_stretches: int = 1,
) -> Layout:
    """Decide which sequences share a row of at most `max_tokens` tokens. Every sequence appears once.

    All ranks get the same number of rows, at least one, because their collectives (FSDP gathers each block in every
    forward) must pair up; some rows may be empty. Of rows by length and, if prompts are shared, rows by group, those
    that need fewer positions are taken. A row is as long as the fullest, and each of its stretches a multiple of
    `multiple`. The rows depend on the arguments alone: ties go to the lower index.

    Raises ValueError if a sequence is empty or longer than `max_tokens`, or if a token counts in the loss that belongs
    to a prompt or is the first of its sequence.
    """
    sequences = _sequences(batch, max_tokens, share_prompts)
    longest_first = sorted(range(batch.num_sequences), key=lambda index: (-sequences.lengths[index], index))
    rows = _rows_by_length(longest_first, sequences, num_ranks, max_tokens)
    if sequences.share:
        by_group = _rows_by_group(longest_first, sequences, num_ranks, max_tokens, multiple)
        rows = min(by_group, rows, key=lambda rows: len(rows) * _fullest(rows))
    unit = multiple * num_stretches
    row_length = unit * max(1, math.ceil(_fullest(rows) / unit))
    return Layout(batch, _zigzag(rows, num_ranks), row_length, multiple, sequences.share, num_stretches)


def take_out(values_BT: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the L tokens that a micro-batch predicts: (index_L int64 among the N of the batch, values_L).

    `values_N[index_L] = values_L`, once per micro-batch, fills a flat tensor in the order of `TrainBatch`, except the
    first token of each sequence, which nothing predicts, and prompts that are shared, where one of them is filled in.
    """
    predicts_BT = micro.token_BT >= 0
    return micro.token_BT[predicts_BT], values_BT[predicts_BT]


# ---- Planning --------------------------------------------------------------------------------------------------------


def _sequences(batch: TrainBatch, max_tokens: int, share_prompts: bool) -> Sequences:
    """Measure the sequences, find prompts that are the same, and refuse what no row can hold."""
    lengths = batch.lengths_S.tolist()
    prompt_lengths = [0] * len(lengths)
    if batch.prompt_lengths_S is not None:
        prompt_lengths = batch.prompt_lengths_S.tolist()
    ids = batch.ids_N.numpy()
    counts = batch.loss_mask_N.numpy()
    first_of = {}
    first = []
    for index, start in enumerate(batch.starts_S.tolist()):
        if not 1 <= lengths[index] <= max_tokens:
            raise ValueError(
                f"sequence {index} has {lengths[index]} tokens, but a micro-batch holds 1 to {max_tokens}; raise "
                f"trainer.micro_batch_tokens to at least {max(lengths)} or allow only shorter prompts and completions"
            )
        num_given = max(1, prompt_lengths[index])
        if counts[start : start + num_given].any():
            raise ValueError(
                f"sequence {index} begins with {num_given} tokens that are given, but one of them counts in the loss; "
                "a prompt needs at least 1 token and is excluded from the loss"
            )
        prompt = ids[start : start + prompt_lengths[index]].tobytes()
        first.append(first_of.setdefault(prompt, index))
    if not share_prompts:
        first = list(range(len(lengths)))
    num_shared = [max(0, length - 1) for length in prompt_lengths]
    return Sequences(lengths, first, num_shared)


def _fullest(rows: Sequence[PackedRow]) -> int:
    return max(row.num_tokens for row in rows)


def _rows_by_length(
    longest_first: Indices,
    sequences: Sequences,
    num_ranks: int,
    max_tokens: int,
) -> list[PackedRow]:
    """Fill num_ranks x k rows, k as small as it goes with one of two rules; fullest first.

    Each sequence into the emptiest row (Graham 1969), which makes rows nearly equally full; or best fit, each into the
    fullest row that has room (Johnson et al. 1974), which fits more often if a row holds few sequences.
    """
    lengths = sequences.lengths
    num_full_rows = math.ceil(sum(lengths) / max_tokens)
    # no two sequences of more than half a row fit together
    num_long = sum(2 * length > max_tokens for length in lengths)
    num_rows = num_ranks * math.ceil(max(1, num_full_rows, num_long) / num_ranks)
    # ends at the latest when every sequence has a row of its own
    while True:
        for best_fit in (False, True):
            rows = _fill(longest_first, lengths, num_rows, max_tokens, best_fit=best_fit)
            if rows:
                rows.sort(key=lambda row: -sum(lengths[index] for index in row))
                if sequences.share:
                    rows = [sorted(row) for row in rows]  # so that groups are neighbours
                return [sequences.row(row) for row in rows]
        num_rows += num_ranks


def _fill(
    longest_first: Indices,
    lengths: list[int],
    num_rows: int,
    max_tokens: int,
    *,
    best_fit: bool,
) -> list[Indices] | None:
    """Put each sequence into the emptiest row, or with `best_fit` into the fullest one that has room.

    Of rows with equal room take the first. Return None if a sequence fits nowhere.
    """
    rows = [[] for _ in range(num_rows)]
    fullest_first = [(max_tokens, row) for row in range(num_rows)]  # room left
    for index in longest_first:
        min_room = lengths[index]
        if not best_fit:
            emptiest_room, _ = fullest_first[-1]
            min_room = max(min_room, emptiest_room)
        first_fit = bisect.bisect_left(fullest_first, (min_room, 0))
        if first_fit == num_rows:
            return None
        room, row = fullest_first.pop(first_fit)
        rows[row].append(index)
        bisect.insort(fullest_first, (room - lengths[index], row))
    return rows


def _rows_by_group(
    longest_first: Indices,
    sequences: Sequences,
    num_ranks: int,
    max_tokens: int,
    multiple: int,
) -> list[PackedRow]:
    """Fill num_ranks x k rows, k as small as it goes, and keep sequences with the same prompt together; fullest first.

    A prompt is laid out again only where a row ends in the middle of its sequences. Rows are filled one after the
    other, up to the lowest of some heights at which all sequences fit; the last rows may stay empty.
    """
    groups = {}
    for index in longest_first:
        groups.setdefault(sequences.first[index], []).append(index)
    in_one_row = sequences.row(list(itertools.chain(*groups.values()))).num_tokens
    num_rows = num_ranks * max(1, math.ceil(in_one_row / (max_tokens * num_ranks)))
    # ends at the latest when every sequence has a row of its own
    while _fill_in_turn(groups, sequences, num_rows, max_tokens) is None:
        num_rows += num_ranks
    lowest = math.ceil(in_one_row / num_rows / multiple) * multiple
    step = max(multiple, max_tokens // NUM_HEIGHTS)
    for height in (*range(lowest, max_tokens, step), max_tokens):
        rows = _fill_in_turn(groups, sequences, num_rows, height)
        if rows:
            return sorted(map(sequences.row, rows), key=lambda row: -row.num_tokens)


def _fill_in_turn(
    groups: dict[int, Indices],
    sequences: Sequences,
    num_rows: int,
    height: int,
) -> list[Indices] | None:
    """Put one group after the other into one row after the other; None if there are too few rows.

    The longest sequence that fits comes next. If none fits, a new row begins.
    """
    rows = [[]]
    room = height
    for first, group in groups.items():
        remaining = list(group)
        num_shared = 0  # the first sequence of a group in a row has its prompt in full
        while remaining:
            fitting = (index for index in remaining if sequences.lengths[index] - num_shared <= room)
            index = next(fitting, None)
            if index is not None:
                remaining.remove(index)
                rows[-1].append(index)
                room -= sequences.lengths[index] - num_shared
                num_shared = sequences.num_shared[first]
            elif len(rows) == num_rows or not rows[-1]:
                return None
            else:
                rows.append([])
                room = height
                num_shared = 0
    return rows + [[] for _ in range(num_rows - len(rows))]


def _zigzag(fullest_first: list[PackedRow], num_ranks: int) -> list[list[PackedRow]]:
    """Deal rows to ranks 0, 1, .., 1, 0, 0, 1, .., so that no rank always gets the fuller one."""
    rows_of_ranks = [[] for _ in range(num_ranks)]
    for i, row in enumerate(fullest_first):
        turn, rank = divmod(i, num_ranks)
        if turn % 2 == 1:
            rank = num_ranks - 1 - rank
        rows_of_ranks[rank].append(row)
    return rows_of_ranks


# ---- Writing ---------------------------------------------------------------------------------------------------------


def _padding(start: int, row_length: int) -> list[Document]:
    """Return documents that fill the rest of a row."""
    documents = []
    while start < row_length:
        length = min(PAD_DOCUMENT, row_length - start)
        documents.append(Document(-1, 0, start, length))
        start += length
    return documents


def _at(index_BT: Tensor, values: Tensor | None, elsewhere: float = 0) -> Tensor | None:
    """Return the values at these indices, and `elsewhere` where an index is negative."""
    if values is None:
        return None
    values_BT = values[index_BT.clamp(min=0)]
    return values_BT.masked_fill(index_BT < 0, elsewhere)


def _scored_places(counts: Tensor, multiple: int) -> Tensor:
    """List the places that count and the first others, up to a multiple of `multiple` that is not 0, in order."""
    num_multiples = math.ceil(int(counts.sum()) / multiple)
    num_places = multiple * max(1, num_multiples)
    counting_first = (~counts).int().argsort(stable=True)
    return counting_first[:num_places].sort().values


def _kept_ids(batch: TrainBatch, token_M: Tensor) -> KeptIds | None:
    """Return the ids that these of the N tokens were chosen from; -1 is no token."""
    if batch.kept_C is None:
        return None
    place_N = torch.full((batch.num_tokens + 1,), -1)  # the last one stands for no token
    place_N[token_M] = torch.arange(len(token_M))
    place_C = place_N[batch.token_C]
    is_here_C = (place_C >= 0) & (batch.kept_C >= 0)
    return KeptIds(batch.kept_C[is_here_C], place_C[is_here_C])


def _shared_keys(documents: Sequence[Document]) -> SharedPrompts:
    """Find out which keys each document of a row attends to. `documents` are all of it, in order."""
    keys = []
    num_keys = 0
    starts = [0]
    for document in documents:
        for attended in filter(None, (document.prompt, document)):
            keys.append(torch.arange(attended.start, attended.end))
            num_keys += attended.length
        starts.append(num_keys)
    keys_K = torch.cat(keys)
    # the keys that each place is, place after place; the first one is for its own document
    by_place_K = keys_K.argsort(stable=True)
    num_uses_T = keys_K.bincount()
    first_T = num_uses_T.cumsum(0) - num_uses_T

    reused_Q = (num_uses_T > 1).nonzero().flatten()
    if len(reused_Q) < 2:  # never of size 0 or 1, for which torch.compile would make code of its own
        most_used_T = num_uses_T.argsort(descending=True, stable=True)
        reused_Q = most_used_T[:2].sort().values
    uses_U = torch.arange(max(2, int(num_uses_T.max())))
    is_use_QU = uses_U < num_uses_T[reused_Q, None]
    place_QU = first_T[reused_Q, None] + uses_U
    uses_QU = by_place_K[place_QU.where(is_use_QU, 0)]
    key_starts = torch.tensor(starts, dtype=torch.int32)
    return SharedPrompts(
        keys_K=keys_K,
        key_starts=key_starts,
        longest=int(key_starts.diff().max()),
        own_T=by_place_K[first_T],
        reused_Q=reused_Q,
        uses_QU=uses_QU.where(is_use_QU, -1),
    )
