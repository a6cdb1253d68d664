"""A batch -> micro-batches of `[B, T]`, balanced over data-parallel ranks, and values out of them.

The one place that shifts what belongs to a token to the position that predicts it. What is left out: sequences are
never cut, and nothing here knows about devices or process groups; every rank computes the same plan from the same
lengths and takes its own part.
"""

import bisect
import heapq
import math
from collections.abc import Sequence

import torch

from grpo.data.shared_prompts import Document, Prompts, pack_groups, row_tokens, runs, shared_keys
from grpo.types import MicroBatch, TrainBatch

# plan[rank][micro_batch][row] = indices of the sequences in that row, in order
MicroBatchPlan = list[list[list[list[int]]]]

# Padding may be longer than any sequence, but its positions must stay within the model's, of which even toys have more.
PAD_DOCUMENT = 128


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    packing: bool,
    multiple: int = 1,
    prompts: Prompts | None = None,
) -> MicroBatchPlan:
    """Decide which sequences run together: plan[rank][micro_batch][row] = sequence indices.

    Every sequence appears once. All ranks get the same number of micro-batches, at least one, because their collectives
    (FSDP gathers each block in every forward) must pair up; a rank may get an empty micro-batch, which has no rows.

    packing=True: a micro-batch is one row of at most `max_tokens`. Their number is the smallest at which one of two
    longest-first rules fits: each sequence into the emptiest row (Graham 1969), which makes rows nearly equally full;
    or best fit, each into the fullest row that has room (Johnson et al. 1974), which fits more often where a row holds
    few sequences. With `prompts`, which sequences share within a row (`build_micro_batch`), it is that or the rows of
    `pack_groups`, whichever needs fewer positions.
    packing=False: every row holds one sequence. Sequences of similar length run together, at the same time on all
    ranks; rows x the longest of them (over all ranks, rounded up to `multiple`) stays within `max_tokens`.

    The plan depends on the arguments alone: ties go to the lower index. `lengths` are tokens, prompt and completion;
    `multiple` is what `row_length` will round to. Raises ValueError if a sequence is empty or longer than `max_tokens`,
    or a count is below 1.
    """
    if num_ranks < 1 or multiple < 1:
        raise ValueError(f"num_ranks={num_ranks} and multiple={multiple} must be at least 1")
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, but a micro-batch holds 1 to {max_tokens}; raise "
                f"trainer.micro_batch_tokens to at least {max(lengths)} or allow only shorter prompts and completions"
            )
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if packing:
        rows = _pack_rows(longest_first, lengths, num_ranks, max_tokens)
        if prompts:
            by_group = pack_groups(lengths, prompts, num_ranks, max_tokens, multiple)
            rows = min(by_group, [sorted(row) for row in rows], key=lambda rows: _positions(rows, lengths, prompts))
        return [[[row] if row else [] for row in of_rank] for of_rank in _zigzag(rows, num_ranks)]

    plan: MicroBatchPlan = [[] for _ in range(num_ranks)]
    while longest_first:
        padded = _round_up(lengths[longest_first[0]], multiple)
        # rounding up may push a single row beyond max_tokens; it must run all the same
        num_rows = num_ranks * max(1, max_tokens // padded)
        together, longest_first = longest_first[:num_rows], longest_first[num_rows:]
        for rank, of_rank in enumerate(_zigzag(together, num_ranks)):
            plan[rank].append([[index] for index in of_rank])
    return plan if lengths else [[[]] for _ in range(num_ranks)]


def _positions(rows: list[list[int]], lengths: Sequence[int], prompts: Prompts) -> int:
    """In rows that are all as long as the longest."""
    return len(rows) * max(row_tokens(row, lengths, prompts) for row in rows)


def row_length(
    plan: MicroBatchPlan,
    lengths: Sequence[int],
    multiple: int,
    micro_batch: int | None = None,
    prompts: Prompts | None = None,
) -> int:
    """Positions T that every row is padded to: the longest row over ALL ranks, rounded up to `multiple`; at least that.

    With packing, leave `micro_batch` out: one length for the whole step, so that compiled code sees few shapes.
    Without packing, pass the micro-batch's index and get the longest of that one, or short sequences would be padded to
    the longest of the step and `max_tokens` would no longer bound rows x T.
    """
    chosen = slice(None) if micro_batch is None else slice(micro_batch, micro_batch + 1)
    longest = max(_tokens_of_rows([of_rank[chosen] for of_rank in plan], lengths, prompts), default=0)
    return max(multiple, _round_up(longest, multiple))


def padding_frac(
    plan: MicroBatchPlan, lengths: Sequence[int], multiple: int, packing: bool, prompts: Prompts | None = None
) -> float:
    """Share of positions that hold no token, over the rows of all micro-batches and ranks; 0 to below 1.

    A rank's micro-batch without rows counts as the one row of padding that `build_micro_batch` makes of it.
    """
    num_positions = 0
    for index in range(len(plan[0])):
        length = row_length(plan, lengths, multiple, None if packing else index, prompts)
        num_positions += length * sum(max(1, len(micro_batches[index])) for micro_batches in plan)
    return 1 - sum(_tokens_of_rows(plan, lengths, prompts)) / num_positions


def shared_frac(plan: MicroBatchPlan, lengths: Sequence[int], prompts: Prompts) -> float:
    """Share of the tokens that have no position of their own, because they are those of a shared prompt."""
    return 1 - sum(_tokens_of_rows(plan, lengths, prompts)) / sum(lengths)


def _tokens_of_rows(plan: MicroBatchPlan, lengths: Sequence[int], prompts: Prompts | None) -> list[int]:
    """Positions that each row of all micro-batches and ranks needs."""
    rows = (row for micro_batches in plan for rows in micro_batches for row in rows)
    return [row_tokens(row, lengths, prompts) for row in rows]


def build_micro_batch(
    batch: TrainBatch,
    rows: list[list[int]],
    row_length: int,
    pad_id: int = 0,
    multiple: int = 1,
    prompts: Prompts | None = None,
) -> MicroBatch:
    """Lay sequences out as planned: `rows` is plan[rank][micro_batch], `row_length` the number of positions T.

    With `prompts` (`prompts_of` the batch), neighbours in a row with the same prompt have it once in front of them.
    An empty `rows` gives one row of padding, so that the rank still runs its forward and backward. Positions of padding
    restart every `PAD_DOCUMENT`, so they never exceed what the model has, however long the row is. The number of
    positions with log-probs is rounded up to `multiple`, of which `row_length` is one.

    Raises ValueError if a row is longer than `row_length`, or the first token of a sequence counts in the loss.
    """
    lengths = batch.lengths_S.tolist()
    starts = batch.starts_S.tolist()
    bare = batch.loss_mask_N[batch.starts_S].nonzero()
    if len(bare):
        raise ValueError(
            f"the first token of sequence {int(bare[0])} counts in the loss, but nothing before it could predict it; "
            "a prompt needs at least 1 token"
        )
    shape = (max(1, len(rows)), row_length)
    own_BT = torch.full(shape, -1, dtype=torch.int64)  # index among the N of each position's own token
    token_BT = own_BT.clone()  # and of the one that it predicts: the shift by one is made here and nowhere else
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    counter_T, documents = torch.arange(row_length), []
    for b, row in enumerate(rows or [[]]):
        needed = row_tokens(row, lengths, prompts)
        if needed > row_length:
            raise ValueError(f"row {b} has {needed} tokens, but row_length={row_length}; pass row_length(plan, ...)")
        at, first_place = 0, b * row_length
        for indices, shared in runs(row, prompts):
            # of its sequence, each from where to where; of the first one, its prompt before that
            pieces = [(indices[0], 0, shared)] if shared else []
            pieces += [(index, shared, lengths[index]) for index in indices]
            prompt = None
            for index, begin, end in pieces:
                stop, tokens_T = at + end - begin, starts[index] + torch.arange(begin, min(end + 1, lengths[index]))
                own_BT[b, at:stop] = tokens_T[: end - begin]
                token_BT[b, at : at + len(tokens_T) - 1] = tokens_T[1:]
                positions_BT[b, at:stop] = torch.arange(begin, end)
                documents.append(Document(first_place + at, first_place + stop, prompt))
                prompt = prompt or (documents[-1] if shared else None)
                at = stop
        positions_BT[b, at:] = counter_T[: row_length - at] % PAD_DOCUMENT
        padding = range(at, row_length, PAD_DOCUMENT)
        ends = (min(start + PAD_DOCUMENT, row_length) for start in padding)
        documents += [Document(first_place + s, first_place + e) for s, e in zip(padding, ends, strict=True)]

    def lay_out(values_N: torch.Tensor | None, index_BT: torch.Tensor, elsewhere: float = 0) -> torch.Tensor | None:
        return None if values_N is None else values_N[index_BT.clamp(min=0)].masked_fill(index_BT < 0, elsewhere)

    row_BT = lay_out(batch.owner_N, own_BT, -1)
    document_starts = torch.tensor([*(document.start for document in documents), own_BT.numel()], dtype=torch.int32)
    loss_mask_BT = lay_out(batch.loss_mask_N, token_BT, False)
    return MicroBatch(
        ids_BT=lay_out(batch.ids_N, own_BT, pad_id),
        positions_BT=positions_BT,
        targets_BT=lay_out(batch.ids_N, token_BT),
        token_BT=token_BT,
        sequence_BT=lay_out(batch.sequence_S, row_BT, -1),
        temperatures_BT=lay_out(batch.temperatures_S, row_BT, 1),
        loss_mask_BT=loss_mask_BT,
        num_loss_tokens_BT=lay_out(batch.num_loss_tokens_S, row_BT).clamp(min=1),
        generator_logprobs_BT=lay_out(batch.generator_logprobs_N, token_BT),
        old_logprobs_BT=lay_out(batch.old_logprobs_N, token_BT),
        ref_logprobs_BT=lay_out(batch.ref_logprobs_N, token_BT),
        advantages_BT=lay_out(batch.advantages_N, token_BT),
        scored_M=_scored(loss_mask_BT.flatten(), multiple),
        document_starts=document_starts,
        longest_document=int(document_starts.diff().max()),
        shared=shared_keys(documents) if prompts else None,
        num_sequences=int(batch.sequence_S.max()) + 1,
    )


def _scored(wanted: torch.Tensor, multiple: int) -> torch.Tensor:
    """Where `wanted` is True, and the first other places up to a multiple of `multiple`, at least one; in order."""
    number = max(multiple, _round_up(int(wanted.sum()), multiple))
    return (~wanted).int().argsort(stable=True)[:number].sort().values


def take_out(values_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the M tokens that a micro-batch predicts: (index_M int64 among the N of the batch, values_M).

    `values_N[index_M] = values_M`, once per micro-batch, fills a flat tensor in the order of `TrainBatch`, except the
    first token of each sequence, which nothing predicts, and prompts that are shared, of which one is filled in. (M is
    larger here than in `scored_M`.)
    """
    predicts_BT = micro.token_BT >= 0
    return micro.token_BT[predicts_BT], values_BT[predicts_BT]


def _pack_rows(longest_first: list[int], lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Fill num_ranks x k rows, k as small as it goes; the rows come back fullest first."""
    # no two sequences of more than half a row fit together, so there are at least as many rows as such sequences
    at_least = max(1, math.ceil(sum(lengths) / max_tokens), sum(2 * length > max_tokens for length in lengths))
    num_micro_batches = math.ceil(at_least / num_ranks)
    # ends at the latest when every sequence has a row of its own
    while True:
        num_rows = num_ranks * num_micro_batches
        rows = _fill_evenly(longest_first, lengths, num_rows, max_tokens)
        rows = rows or _fill_by_best_fit(longest_first, lengths, num_rows, max_tokens)
        if rows:
            break
        num_micro_batches += 1
    return sorted(rows, key=lambda row: -sum(lengths[index] for index in row))


def _fill_evenly(
    longest_first: list[int], lengths: Sequence[int], num_rows: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each sequence into the emptiest row; None as soon as one does not fit there, since it then fits nowhere."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    emptiest = [(0, row) for row in range(num_rows)]
    for index in longest_first:
        load, row = emptiest[0]
        if load + lengths[index] > max_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(emptiest, (load + lengths[index], row))
    return rows


def _fill_by_best_fit(
    longest_first: list[int], lengths: Sequence[int], num_rows: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each sequence into the row that it leaves least room in; None as soon as one fits nowhere."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    fullest_first = [(max_tokens, row) for row in range(num_rows)]  # room left
    for index in longest_first:
        place = bisect.bisect_left(fullest_first, (lengths[index], 0))
        if place == num_rows:
            return None
        room, row = fullest_first.pop(place)
        rows[row].append(index)
        bisect.insort(fullest_first, (room - lengths[index], row))
    return rows


def _zigzag(largest_first: list, num_ranks: int) -> list[list]:
    """Give items to ranks 0, 1, .., 1, 0, 0, 1, .., so that no rank always gets the larger one."""
    parts: list[list] = [[] for _ in range(num_ranks)]
    for i, item in enumerate(largest_first):
        turn, rank = divmod(i, num_ranks)
        parts[rank if turn % 2 == 0 else num_ranks - 1 - rank].append(item)
    return parts


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
