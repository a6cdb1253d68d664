"""Sequences of a step -> micro-batches of `[B, T]`, balanced over data-parallel ranks, and values in and out of them.

Everything in a `MicroBatch` is aligned with the position that *predicts*: the values at [b, t] belong to the token that
follows token [b, t] in its sequence. What is left out: sequences are never cut, and nothing here knows about devices or
process groups; every rank computes the same plan from the same lengths and takes its own part.

Layer 0: pure functions.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from grpo.types import TrainBatch

# plan[rank][micro_batch][row] = indices of the sequences in that row, in order
Plan = list[list[list[list[int]]]]

# Padding may be longer than any sequence, but its positions must stay within the model's, of which even toys have more.
PAD_DOCUMENT = 128


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward on one rank: B rows of T positions, each row whole sequences and then padding."""

    tokens_BT: torch.Tensor
    """int64: token ids; `pad_id` on padding."""
    targets_BT: torch.Tensor
    """int64: the next token of the same sequence; 0 where there is none (last token of a sequence, padding)."""
    positions_BT: torch.Tensor
    """int64: restart at 0 with each sequence; padding at the end of a row is documents of PAD_DOCUMENT positions."""
    completion_mask_BT: torch.Tensor
    """bool: the target is a completion token (the first one is predicted by the last prompt token)."""
    sequence_BT: torch.Tensor
    """int64: index of the sequence in the step's batch; -1 on padding."""
    temperatures_BT: torch.Tensor
    """float32: what the sequence was sampled with; 1 on padding."""

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences, without padding."""
        return int((self.sequence_BT >= 0).sum())


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
    temperatures: Sequence[float] | None = None,
) -> TrainBatch:
    """Lay S sequences end to end: prompt ids, completion ids, the completions' sampling log-probs and temperatures."""
    pairs = zip(prompts, completions, strict=True)
    ids = [token for prompt, completion in pairs for token in (*prompt, *completion)]
    values = None if logprobs is None else torch.tensor([x for row in logprobs for x in row], dtype=torch.float32)
    return TrainBatch(
        ids_N=torch.tensor(ids, dtype=torch.int64),
        prompt_lengths_S=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        completion_lengths_S=torch.tensor([len(completion) for completion in completions], dtype=torch.int64),
        generator_logprobs_C=values,
        temperatures_S=None if temperatures is None else torch.tensor(temperatures, dtype=torch.float32),
    )


def split_groups(batch: TrainBatch, group_size: int, num_parts: int) -> list[TrainBatch]:
    """Cut a step's batch into mini-batches of whole groups, in order, their numbers of groups differing by at most one.

    Fewer than `num_parts` if there are fewer groups. Raises ValueError if the batch is not whole groups.
    """
    num_groups, rest = divmod(batch.num_sequences, group_size)
    if rest:
        raise ValueError(f"{batch.num_sequences} sequences are not whole groups of {group_size}")
    num_parts = min(num_parts, num_groups)
    edges = [group_size * (part * num_groups // num_parts) for part in range(num_parts + 1)]
    return [_slice_batch(batch, start, end) for start, end in zip(edges[:-1], edges[1:], strict=True)]


def _slice_batch(batch: TrainBatch, start: int, end: int) -> TrainBatch:
    """Sequences `start` to `end` as a batch of their own."""
    # a field's last letter says what it is laid out by: sequences, tokens, completion tokens
    tokens, completions = batch.lengths_S, batch.completion_lengths_S
    bounds = {
        "S": slice(start, end),
        "N": slice(int(tokens[:start].sum()), int(tokens[:end].sum())),
        "C": slice(int(completions[:start].sum()), int(completions[:end].sum())),
    }
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return TrainBatch(**{name: x if x is None else x[bounds[name[-1]]] for name, x in values.items()})


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, packing: bool, multiple: int = 1
) -> Plan:
    """Decide which sequences run together: plan[rank][micro_batch][row] = sequence indices.

    Every sequence appears once. All ranks get the same number of micro-batches, at least one, because their collectives
    (FSDP gathers each block in every forward) must pair up; a rank may get an empty micro-batch, which has no rows.

    packing=True: a micro-batch is one row of at most `max_tokens`. Their number is the smallest at which longest-first
    greedy (Graham 1969: each sequence into the emptiest row) fits; this also makes rows nearly equally full.
    packing=False: every row holds one sequence. Sequences of similar length run together, at the same time on all
    ranks; rows x the longest of them (over all ranks, rounded up to `multiple`) stays within `max_tokens`.

    The plan depends on nothing but the arguments: ties go to the lower index.

    Args:
        lengths: tokens of each sequence, prompt and completion.
        multiple: what `row_length` will round to; matters only without packing, where every row pays for it.

    Raises:
        ValueError: a sequence is empty or longer than `max_tokens`, or a count is below 1.
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
        return [[[row] if row else [] for row in hand] for hand in _deal(rows, num_ranks)]

    plan: Plan = [[] for _ in range(num_ranks)]
    start = 0
    while start < len(longest_first):
        padded = _round_up(lengths[longest_first[start]], multiple)
        # rounding up may push a single row beyond max_tokens; it must run all the same
        num_rows = max(1, max_tokens // padded)
        together = longest_first[start : start + num_ranks * num_rows]
        for rank, hand in enumerate(_deal(together, num_ranks)):
            plan[rank].append([[index] for index in hand])
        start += len(together)
    return plan if start else [[[]] for _ in range(num_ranks)]


def row_length(plan: Plan, lengths: Sequence[int], multiple: int, micro_batch: int | None = None) -> int:
    """Positions T that every row is padded to: the longest row over ALL ranks, rounded up to `multiple`; at least that.

    With packing, leave `micro_batch` out: one length for the whole step, so that compiled code sees few shapes.
    Without packing, pass the micro-batch's index and get the longest of that one, or short sequences would be padded to
    the longest of the step and `max_tokens` would no longer bound rows x T.
    """
    chosen = slice(None) if micro_batch is None else slice(micro_batch, micro_batch + 1)
    rows = [row for micro_batches in plan for rows in micro_batches[chosen] for row in rows]
    longest = max((sum(lengths[index] for index in row) for row in rows), default=0)
    return max(multiple, _round_up(longest, multiple))


def build_micro_batch(batch: TrainBatch, rows: list[list[int]], row_length: int, pad_id: int = 0) -> MicroBatch:
    """Lay sequences out as planned: `rows` is plan[rank][micro_batch], `row_length` the number of positions T.

    An empty `rows` gives one row of padding, so that the rank still runs its forward and backward. Positions of padding
    restart every `PAD_DOCUMENT`, so they never exceed what the model has, however long the row is.

    Raises:
        ValueError: a row is longer than `row_length`, or a prompt has no token that could predict its completion.
    """
    prompt_lengths, completion_lengths = batch.prompt_lengths_S.tolist(), batch.completion_lengths_S.tolist()
    starts = _starts(batch.lengths_S).tolist()
    shape = (max(1, len(rows)), row_length)
    tokens_BT = torch.full(shape, pad_id, dtype=torch.int64)
    targets_BT = torch.zeros(shape, dtype=torch.int64)
    positions_BT = torch.zeros(shape, dtype=torch.int64)
    completion_mask_BT = torch.zeros(shape, dtype=torch.bool)
    sequence_BT = torch.full(shape, -1, dtype=torch.int64)
    temperatures_BT = torch.ones(shape)
    counter_T = torch.arange(row_length)

    for b, row in enumerate(rows or [[]]):
        at = 0
        for index in row:
            prompt, completion = prompt_lengths[index], completion_lengths[index]
            end = at + prompt + completion
            if prompt < 1:
                raise ValueError(
                    f"sequence {index} has a prompt of 0 tokens; it needs 1 to predict its first completion token"
                )
            if end > row_length:
                needed = sum(prompt_lengths[i] + completion_lengths[i] for i in row)
                raise ValueError(
                    f"row {b} has {needed} tokens, but row_length={row_length}; pass row_length(plan, ...)"
                )
            ids = batch.ids_N[starts[index] : starts[index] + end - at]
            tokens_BT[b, at:end] = ids
            targets_BT[b, at : end - 1] = ids[1:]
            positions_BT[b, at:end] = counter_T[: end - at]
            completion_mask_BT[b, at + prompt - 1 : end - 1] = True
            sequence_BT[b, at:end] = index
            if batch.temperatures_S is not None:
                temperatures_BT[b, at:end] = batch.temperatures_S[index]
            at = end
        positions_BT[b, at:] = counter_T[: row_length - at] % PAD_DOCUMENT
    return MicroBatch(tokens_BT, targets_BT, positions_BT, completion_mask_BT, sequence_BT, temperatures_BT)


def scatter_completions(values_C: torch.Tensor, batch: TrainBatch, micro: MicroBatch) -> torch.Tensor:
    """Put flat per-completion-token values at the positions that predict these tokens: float32 [B, T], 0 elsewhere.

    `values_C` is in the order of `TrainBatch` (sequence after sequence), for the whole step; the result lies on the
    device of `micro`. Undone by `gather_completions`.
    """
    device = micro.completion_mask_BT.device
    values_BT = torch.zeros(micro.completion_mask_BT.shape, dtype=torch.float32, device=device)
    values_BT[micro.completion_mask_BT] = values_C.to(device, torch.float32)[_flat_index(batch, micro)]
    return values_BT


def gather_completions(
    values_BT: torch.Tensor, batch: TrainBatch, micro: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the values of this micro-batch's M completion tokens out of [B, T]: (flat_index_M int64, values_M).

    `values_C[flat_index_M] = values_M`, once per micro-batch, fills a flat tensor in the order of `TrainBatch`.
    """
    return _flat_index(batch, micro), values_BT[micro.completion_mask_BT]


def per_sequence(values_S: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Spread one number per sequence of the batch over that sequence's positions: [B, T], 0 on padding."""
    values_S = values_S.to(micro.sequence_BT.device)
    # padding has index -1, which picks the 0 put at the end
    return torch.cat([values_S, values_S.new_zeros(1)])[micro.sequence_BT]


def _flat_index(batch: TrainBatch, micro: MicroBatch) -> torch.Tensor:
    """int64 [M]: where each masked-in position's target stands among all completion tokens of the step."""
    sequence_M = micro.sequence_BT[micro.completion_mask_BT]
    position_M = micro.positions_BT[micro.completion_mask_BT]
    # completion token i of a sequence is predicted at position prompt_length - 1 + i
    first_S = _starts(batch.completion_lengths_S) - (batch.prompt_lengths_S - 1)
    return first_S.to(sequence_M.device)[sequence_M] + position_M


def _starts(lengths_S: torch.Tensor) -> torch.Tensor:
    """Where each sequence begins when all are laid end to end."""
    return lengths_S.cumsum(0) - lengths_S


def _pack_rows(longest_first: list[int], lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Fill num_ranks x k rows, k as small as it goes; the rows come back fullest first."""
    total = sum(lengths)
    # no two sequences of more than half a row fit together, so there are at least as many rows as such sequences
    at_least = max(1, math.ceil(total / max_tokens), sum(2 * length > max_tokens for length in lengths))
    num_micro_batches = math.ceil(at_least / num_ranks)
    # ends at the latest when every sequence has a row of its own
    while (rows := _fill_rows(longest_first, lengths, num_ranks * num_micro_batches, max_tokens)) is None:
        num_micro_batches += 1
    return sorted(rows, key=lambda row: -sum(lengths[index] for index in row))


def _fill_rows(
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


def _deal(largest_first: list, num_ranks: int) -> list[list]:
    """Deal items out to ranks in turns, there and back, so that nobody always gets the larger one."""
    hands: list[list] = [[] for _ in range(num_ranks)]
    for i, item in enumerate(largest_first):
        turn, seat = divmod(i, num_ranks)
        hands[seat if turn % 2 == 0 else num_ranks - 1 - seat].append(item)
    return hands


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
