"""Which sequences of a batch run together: packed into rows that are balanced over data-parallel ranks.

A micro-batch is one row. Every rank computes the same rows from the same lengths and takes its own part. Left out:
sequences are never cut, and nothing here knows about devices or process groups.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from grpo.data.batches import build_micro_batch
from grpo.data.shared_prompts import Indices, Lengths, RepeatedPrompts, repeated_prompts, row_tokens
from grpo.types import MicroBatch, Scalars, TrainBatch

PackedRows = list[Indices]
# Heights of rows that are tried at most, if sequences share prompts
NUM_HEIGHTS = 32


@dataclass(frozen=True, eq=False)
class Packing:
    """The micro-batches of a batch, of all ranks. The same on every rank, so nothing is communicated."""

    batch: TrainBatch
    rows: list[PackedRows]
    """rows[rank][micro_batch]. All ranks have the same number, at least one; a row without sequences is padding."""
    row_length: int
    """Positions T of every row: one length for all, so that compiled code sees few shapes."""
    multiple: int
    """Row lengths and numbers of scored positions are rounded up to a multiple of it."""
    prompts: RepeatedPrompts | None
    """The prompts that neighbours in a row share; None if no prompt is shared."""

    def micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        """Yield a rank's micro-batches, each laid out when it is asked for."""
        for row in self.rows[rank]:
            yield build_micro_batch(
                self.batch,
                [row],
                self.row_length,
                multiple=self.multiple,
                prompts=self.prompts,
            )

    def metrics(self) -> Scalars:
        """Measure how much of all ranks' positions is padding.

        If prompts are shared, measure also the share of all tokens that need no position of their own.
        """
        lengths = self.batch.lengths_S.tolist()
        rows = list(itertools.chain(*self.rows))
        num_needed = sum(row_tokens(row, lengths, self.prompts) for row in rows)
        num_positions = len(rows) * self.row_length
        metrics = {"packing/padding_frac": 1 - num_needed / num_positions}
        if self.prompts:
            metrics["packing/shared_frac"] = 1 - num_needed / sum(lengths)
        return metrics


def pack(
    batch: TrainBatch,
    num_ranks: int,
    max_tokens: int,
    multiple: int = 1,
    share_prompts: bool = True,
) -> Packing:
    """Pack a batch into rows of at most `max_tokens` tokens, whose length is rounded up to `multiple`.

    Raises ValueError as `plan_rows` does.
    """
    lengths = batch.lengths_S.tolist()
    prompts = repeated_prompts(batch) if share_prompts else None
    rows = plan_rows(lengths, num_ranks, max_tokens, multiple, prompts)
    longest = max(row_tokens(row, lengths, prompts) for row in itertools.chain(*rows))
    row_length = multiple * max(1, math.ceil(longest / multiple))
    return Packing(batch, rows, row_length, multiple, prompts)


def plan_rows(
    lengths: Lengths,
    num_ranks: int,
    max_tokens: int,
    multiple: int = 1,
    prompts: RepeatedPrompts | None = None,
) -> list[PackedRows]:
    """Decide which sequences share a row: rows[rank][micro_batch]. Every sequence appears once.

    All ranks get the same number of rows, at least one, because their collectives (FSDP gathers each block in every
    forward) must pair up; some rows may be empty. Their number is the smallest at which one of two longest-first rules
    fits: each sequence into the emptiest row (Graham 1969), which makes rows nearly equally full; or best fit, each
    into the fullest row that has room (Johnson et al. 1974), which fits more often if a row holds few sequences. With
    `prompts` the rows of `_pack_groups` are compared with these, and those that need fewer positions are taken.

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
        by_length = [sorted(row) for row in rows]

        def num_positions(rows: PackedRows) -> int:
            """Count the positions of rows that are as long as the longest."""
            return len(rows) * max(row_tokens(row, lengths, prompts) for row in rows)

        rows = min(by_group, by_length, key=num_positions)
    return _zigzag(rows, num_ranks)


def _pack_rows(
    longest_first: Indices,
    lengths: Lengths,
    num_ranks: int,
    max_tokens: int,
) -> PackedRows:
    """Fill num_ranks x k rows, k as small as it goes; the rows come back fullest first."""
    num_full_rows = math.ceil(sum(lengths) / max_tokens)
    # no two sequences of more than half a row fit together
    num_long = sum(2 * length > max_tokens for length in lengths)
    num_rows = num_ranks * math.ceil(max(1, num_full_rows, num_long) / num_ranks)
    # ends at the latest when every sequence has a row of its own
    while True:
        for best_fit in (False, True):
            rows = _fill(longest_first, lengths, num_rows, max_tokens, best_fit=best_fit)
            if rows:
                return sorted(rows, key=lambda row: -row_tokens(row, lengths, None))
        num_rows += num_ranks


def _fill(
    longest_first: Indices,
    lengths: Lengths,
    num_rows: int,
    max_tokens: int,
    *,
    best_fit: bool,
) -> PackedRows | None:
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
        place = bisect.bisect_left(fullest_first, (min_room, 0))
        if place == num_rows:
            return None
        room, row = fullest_first.pop(place)
        rows[row].append(index)
        bisect.insort(fullest_first, (room - lengths[index], row))
    return rows


def _pack_groups(
    longest_first: Indices,
    lengths: Lengths,
    prompts: RepeatedPrompts,
    num_ranks: int,
    max_tokens: int,
    multiple: int,
) -> PackedRows:
    """Fill num_ranks x k rows, k as small as it goes, and keep sequences with the same prompt together; fullest first.

    A prompt is laid out again only where a row ends in the middle of its sequences. Rows are filled one after the
    other, up to the lowest of some heights at which all sequences fit; the last rows may stay empty.
    """
    groups = {}
    for index in longest_first:
        groups.setdefault(prompts.first_S[index], []).append(index)
    one_row = list(itertools.chain(*groups.values()))
    in_one_row = row_tokens(one_row, lengths, prompts)
    num_rows = num_ranks * max(1, math.ceil(in_one_row / (max_tokens * num_ranks)))
    # ends at the latest when every sequence has a row of its own
    while _fill_in_turn(groups, lengths, prompts, num_rows, max_tokens) is None:
        num_rows += num_ranks
    lowest = math.ceil(in_one_row / num_rows / multiple) * multiple
    step = max(multiple, max_tokens // NUM_HEIGHTS)
    for height in (*range(lowest, max_tokens, step), max_tokens):
        rows = _fill_in_turn(groups, lengths, prompts, num_rows, height)
        if rows:
            return sorted(rows, key=lambda row: -row_tokens(row, lengths, prompts))


def _fill_in_turn(
    groups: dict[int, Indices],
    lengths: Lengths,
    prompts: RepeatedPrompts,
    num_rows: int,
    height: int,
) -> PackedRows | None:
    """Put one group after the other into one row after the other; None if there are too few rows.

    The longest sequence that fits comes next. If none fits, a new row begins.
    """
    rows = [[]]
    room = height
    for first, group in groups.items():
        remaining = list(group)
        num_shared = 0  # the first sequence of a group in a row has its prompt in full
        while remaining:
            fitting = (index for index in remaining if lengths[index] - num_shared <= room)
            index = next(fitting, None)
            if index is not None:
                remaining.remove(index)
                rows[-1].append(index)
                room -= lengths[index] - num_shared
                num_shared = prompts.tokens_S[first]
            elif len(rows) == num_rows or not rows[-1]:
                return None
            else:
                rows.append([])
                room = height
                num_shared = 0
    return rows + [[] for _ in range(num_rows - len(rows))]


def _zigzag(largest_first: PackedRows, num_ranks: int) -> list[PackedRows]:
    """Deal rows to ranks 0, 1, .., 1, 0, 0, 1, .., so that no rank always gets the larger one."""
    parts = [[] for _ in range(num_ranks)]
    for i, row in enumerate(largest_first):
        turn, rank = divmod(i, num_ranks)
        if turn % 2 == 1:
            rank = num_ranks - 1 - rank
        parts[rank].append(row)
    return parts
