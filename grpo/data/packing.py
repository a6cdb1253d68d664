"""Which sequences of a batch run together: packed into rows that are balanced over data-parallel ranks.

A micro-batch is one row. What is left out: sequences are never cut, and nothing here knows about devices or process
groups; every rank computes the same rows from the same lengths and takes its own part.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo.data.batches import Prompts, build_micro_batch, prompts_of, row_tokens
from grpo.types import MicroBatch, TrainBatch

Row = list[int]
"""Indices of the sequences in a row, in order."""

NUM_HEIGHTS = 32  # of rows whose sequences share prompts: tried, at most


@dataclass(frozen=True, eq=False)
class Packing:
    """The micro-batches of a batch, of all ranks. The same on every rank, so nothing is communicated."""

    batch: TrainBatch
    rows: list[list[Row]]
    """rows[rank][micro_batch]; all ranks have as many, at least one, and a row without sequences is padding."""
    row_length: int
    """Positions T that every row is padded to: one length for all, so that compiled code sees few shapes."""
    multiple: int
    """What row lengths and numbers of scored positions are rounded up to."""
    prompts: Prompts | None
    """What neighbours in a row share; None if no prompt is shared."""

    def micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        """A rank's micro-batches, each laid out when it is asked for."""
        for row in self.rows[rank]:
            yield build_micro_batch(self.batch, [row], self.row_length, multiple=self.multiple, prompts=self.prompts)

    def metrics(self) -> dict[str, float]:
        """The share of all ranks' positions that hold no token and, where prompts are shared, of tokens that need no
        position of their own."""
        lengths, rows = self.batch.lengths_S.tolist(), [row for of_rank in self.rows for row in of_rank]
        needed = sum(row_tokens(row, lengths, self.prompts) for row in rows)
        found = {"packing/padding_frac": 1 - needed / (len(rows) * self.row_length)}
        if self.prompts:
            found["packing/shared_frac"] = 1 - needed / sum(lengths)
        return found


def pack(batch: TrainBatch, num_ranks: int, max_tokens: int, multiple: int = 1, share_prompts: bool = True) -> Packing:
    """Pack a batch into rows of at most `max_tokens` tokens, whose length is rounded up to `multiple`.

    Raises ValueError as `plan_rows` does.
    """
    lengths, prompts = batch.lengths_S.tolist(), prompts_of(batch) if share_prompts else None
    rows = plan_rows(lengths, num_ranks, max_tokens, multiple, prompts)
    longest = max(row_tokens(row, lengths, prompts) for of_rank in rows for row in of_rank)
    return Packing(batch, rows, multiple * max(1, math.ceil(longest / multiple)), multiple, prompts)


def plan_rows(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, multiple: int = 1, prompts: Prompts | None = None
) -> list[list[Row]]:
    """Decide which sequences share a row: rows[rank][micro_batch]. Every sequence appears once.

    All ranks get the same number of rows, at least one, because their collectives (FSDP gathers each block in every
    forward) must pair up; some may be empty. Their number is the smallest at which one of two longest-first rules fits:
    each sequence into the emptiest row (Graham 1969), which makes rows nearly equally full; or best fit, each into the
    fullest row that has room (Johnson et al. 1974), which fits more often where a row holds few sequences. With
    `prompts`, which neighbours in a row share, it is that or the rows of `_pack_groups`, whichever needs fewer
    positions.

    The rows depend on the arguments alone: ties go to the lower index. `lengths` are tokens, prompt and completion.
    Raises ValueError if a sequence is empty or longer than `max_tokens`.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, but a micro-batch holds 1 to {max_tokens}; raise "
                f"trainer.micro_batch_tokens to at least {max(lengths)} or allow only shorter prompts and completions"
            )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = _pack_rows(longest_first, lengths, num_ranks, max_tokens)
    if prompts:
        by_group = _pack_groups(longest_first, lengths, prompts, num_ranks, max_tokens, multiple)
        packings = by_group, [sorted(row) for row in rows]
        rows = min(packings, key=lambda rows: len(rows) * max(row_tokens(row, lengths, prompts) for row in rows))
    return _zigzag(rows, num_ranks)


def _pack_rows(longest_first: Row, lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[Row]:
    """Fill num_ranks x k rows, k as small as it goes; the rows come back fullest first."""
    # no two sequences of more than half a row fit together, so there are at least as many rows as such sequences
    at_least = max(1, math.ceil(sum(lengths) / max_tokens), sum(2 * length > max_tokens for length in lengths))
    # ends at the latest when every sequence has a row of its own
    for num_micro_batches in itertools.count(math.ceil(at_least / num_ranks)):
        for best_fit in (False, True):
            if rows := _fill(longest_first, lengths, num_ranks * num_micro_batches, max_tokens, best_fit):
                return sorted(rows, key=lambda row: -sum(lengths[index] for index in row))


def _fill(
    longest_first: Row, lengths: Sequence[int], num_rows: int, max_tokens: int, best_fit: bool
) -> list[Row] | None:
    """Put each sequence into the emptiest row, or into the one that it leaves least room in; None if one fits nowhere.

    Of rows with as much room, it is the first.
    """
    rows: list[Row] = [[] for _ in range(num_rows)]
    fullest_first = [(max_tokens, row) for row in range(num_rows)]  # room left
    for index in longest_first:
        wanted = lengths[index] if best_fit else max(lengths[index], fullest_first[-1][0])
        place = bisect.bisect_left(fullest_first, (wanted, 0))
        if place == num_rows:
            return None
        room, row = fullest_first.pop(place)
        rows[row].append(index)
        bisect.insort(fullest_first, (room - lengths[index], row))
    return rows


def _pack_groups(
    longest_first: Row, lengths: Sequence[int], prompts: Prompts, num_ranks: int, max_tokens: int, multiple: int
) -> list[Row]:
    """Rows of at most `max_tokens`, num_ranks x k of them with k as small as it goes; fullest first, some maybe empty.

    Sequences with the same prompt follow each other, so that a prompt is laid out again only where a row ends in the
    middle of them. Rows are filled one after the other, up to the lowest of some heights at which all fit.
    """
    groups: dict[int, Row] = {}
    for index in longest_first:
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
    groups: dict[int, Row], lengths: Sequence[int], prompts: Prompts, num_rows: int, height: int
) -> list[Row] | None:
    """One group after the other into one row after the other: the longest sequence that fits, and a new row if none
    does. None if rows run out."""
    rows: list[Row] = [[]]
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


def _zigzag(largest_first: list[Row], num_ranks: int) -> list[list[Row]]:
    """Give rows to ranks 0, 1, .., 1, 0, 0, 1, .., so that no rank always gets the larger one."""
    parts: list[list[Row]] = [[] for _ in range(num_ranks)]
    for i, row in enumerate(largest_first):
        turn, rank = divmod(i, num_ranks)
        parts[rank if turn % 2 == 0 else num_ranks - 1 - rank].append(row)
    return parts
