"""Samples -> the batch of a step -> its mini-batches -> micro-batches of `[B, T]`, and values out of these.

The one place that shifts what belongs to a token to the position that predicts it. Fields travel by their suffix:
`x_T` of the samples is `x_N` of a batch and `x_BT` of a micro-batch, whatever x is. packing.py decides which sequences
run together, shared_prompts.py how a row has a prompt once for several of them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from grpo.data.shared_prompts import (
    Document,
    RepeatedPrompts,
    documents_of_row,
    row_tokens,
    shared_keys,
)
from grpo.types import Completion, KeptIds, MicroBatch, Prompt, Sample, TrainBatch

# Positions of a document of padding. Padding can be longer than any sequence, but its positions must be among the
# model's, and even toys have more than these.
PAD_DOCUMENT = 128


def make_batch(samples: Sequence[Sample]) -> TrainBatch:
    """Lay the S sequences of a step end to end. A field that is None in any sample is None in the batch."""
    per_token = {}
    for field in fields(Sample):
        if field.name[-2:] not in ("_T", "_C"):
            continue
        values = [getattr(sample, field.name) for sample in samples]
        is_known = all(value is not None for value in values)
        name = field.name.replace("_T", "_N")
        per_token[name] = torch.cat(values) if is_known else None
    # -1 ends each token's kept ids: here there is nothing else
    if per_token["kept_C"] is not None and per_token["kept_C"].max() < 0:
        per_token["kept_C"] = None
    lengths = [len(sample.ids_T) for sample in samples]
    temperatures = [sample.temperature for sample in samples]
    return TrainBatch(
        **per_token,
        lengths_S=torch.tensor(lengths),
        sequence_S=torch.arange(len(samples)),
        temperatures_S=torch.tensor(temperatures, dtype=torch.float32),
        versions_S=torch.tensor([sample.version for sample in samples]),
        truncated_S=torch.tensor([sample.truncated for sample in samples]),
        prompt_lengths_S=torch.tensor([sample.prompt_tokens for sample in samples]),
    )


def sample_of(
    prompt: Prompt,
    completion: Completion,
    turn_weight: float | None = None,
) -> Sample:
    """Make one sequence of a prompt and its completion, which says which tokens count in the loss.

    turn_weight: weight of the environment's reward, if turns have credit of their own; else None.
    """
    prompt_ids_T, pieces = completion.behind(prompt)
    before = []
    if pieces is completion.pieces:  # else the prompt is among the completion's own pieces
        before = [prompt_ids_T]
    zeros_T = torch.zeros(sum(map(len, before)))
    none_kept_C = torch.full_like(zeros_T, -1).int()
    turn_T = None
    earned_T = None
    if turn_weight is not None:
        turn_T = torch.cat([zeros_T.long(), _turns_of(completion)])
        earned_by_turn = _earned_by_turn(completion, turn_weight)
        earned_T = earned_by_turn[turn_T]
    return Sample(
        ids_T=torch.cat([*before, completion.ids_T]),
        loss_mask_T=torch.cat([zeros_T.bool(), completion.loss_mask_T]),
        generator_logprobs_T=torch.cat([zeros_T, completion.logprobs_T]),
        turn_T=turn_T,
        earned_T=earned_T,
        kept_C=torch.cat([none_kept_C, completion.kept_C]),
        prompt_tokens=len(prompt_ids_T),
        temperature=completion.temperature,
        version=completion.oldest_version,
        truncated=completion.truncated,
    )


def _turns_of(completion: Completion) -> Tensor:
    """Number the turns of an episode: for each token the turn that sampled it, from 1, or 0."""
    pieces = completion.pieces
    is_sampled = torch.tensor([piece.logprobs_T is not None for piece in pieces])
    lengths = torch.tensor([piece.num_tokens for piece in pieces])
    turns = is_sampled.cumsum(0) * is_sampled
    return turns.repeat_interleave(lengths)


def _earned_by_turn(completion: Completion, weight: float) -> Tensor:
    """Return the weighted reward at the beginning of each turn, 0 for turn 0; all 0 if there was no reward."""
    episode = completion.episode
    if episode["reward"] is None:
        weight = 0.0
    earned = [turn.get("earned", 0.0) * weight for turn in episode["turns"]]  # at its end, when the next one begins
    return torch.tensor([0.0, 0.0, *earned])


def split_groups(batch: TrainBatch, group_size: int, num_parts: int) -> list[TrainBatch]:
    """Cut a step's batch into mini-batches of whole groups, in order, their numbers of groups differing by at most one.

    Fewer than `num_parts` if there are fewer groups. Raises ValueError if the batch is not whole groups.
    """
    num_groups, rest = divmod(batch.num_sequences, group_size)
    if rest:
        raise ValueError(f"{batch.num_sequences} sequences are not whole groups of {group_size}")
    num_parts = min(num_parts, num_groups)
    edges = [part * num_groups // num_parts * group_size for part in range(num_parts + 1)]
    starts = [*batch.starts_S.tolist(), batch.num_tokens]
    parts = []
    for start, end in itertools.pairwise(edges):
        # the last letter of a field's name says what it is laid out by
        slices = {
            "S": slice(start, end),
            "N": slice(starts[start], starts[end]),
        }
        if batch.kept_C is not None:
            edges_N = torch.tensor([starts[start], starts[end]])
            slices["C"] = slice(*torch.searchsorted(batch.token_C, edges_N))
        part = {}
        for field in fields(batch):
            values = getattr(batch, field.name)
            if values is not None:
                places = slices[field.name[-1]]
                part[field.name] = values[places]
        parts.append(TrainBatch(**part))
    return parts


def build_micro_batch(
    batch: TrainBatch,
    rows: Sequence[Sequence[int]],
    row_length: int,
    multiple: int = 1,
    prompts: RepeatedPrompts | None = None,
) -> MicroBatch:
    """Lay sequences out: `rows` has the indices of each row's, in order, and `row_length` is the positions T of each.

    With `prompts` (`repeated_prompts` of the batch), neighbours in a row have the prompt that they share once in front
    of them. A row without sequences is padding, so that a rank without any still runs its forward and backward. The
    number of positions with log-probs is rounded up to `multiple`; `row_length` is a multiple of it.

    Raises ValueError if a row is longer than `row_length`, or the first token of a sequence counts in the loss.
    """
    without_context = batch.loss_mask_N[batch.starts_S].nonzero()
    if len(without_context):
        raise ValueError(
            f"the first token of sequence {int(without_context[0])} counts in the loss, but nothing before it could "
            "predict it; a prompt needs at least 1 token"
        )
    lengths = batch.lengths_S.tolist()
    starts = batch.starts_S.tolist()
    # Indices among the N of each position's own token and of the token that it predicts; -1 for none
    own_BT = torch.full((len(rows), row_length), -1, dtype=torch.int64)
    token_BT = own_BT.clone()
    positions_BT = torch.zeros_like(own_BT)
    documents = []
    for b, row in enumerate(rows):
        row_start = b * row_length
        row_end = row_start + row_length
        num_needed = row_tokens(row, lengths, prompts)
        if num_needed > row_length:
            raise ValueError(f"row {b} has {num_needed} tokens, but row_length={row_length}; lay it out in longer rows")
        for document in documents_of_row(row, lengths, prompts, row_start):
            begin = document.begin
            length = document.end - document.start
            at = document.start - row_start
            past = at + length
            end_of_targets = min(begin + length + 1, lengths[document.sequence])
            tokens_T = torch.arange(begin, end_of_targets) + starts[document.sequence]
            own_BT[b, at:past] = tokens_T[:length]
            token_BT[b, at : at + len(tokens_T) - 1] = tokens_T[1:]  # the shift by one: here and nowhere else
            positions_BT[b, at:past] = torch.arange(begin, begin + length)
            documents.append(document)
        positions_BT[b, num_needed:] = torch.arange(row_length - num_needed) % PAD_DOCUMENT
        for start in range(row_start + num_needed, row_end, PAD_DOCUMENT):
            end = min(start + PAD_DOCUMENT, row_end)
            documents.append(Document(-1, 0, start, end))

    # what belongs to a token goes to the position that predicts it, what belongs to a sequence to all its positions
    per_token = {name.replace("_N", "_BT"): _at(token_BT, values_N) for name, values_N in batch.per_token.items()}
    targets_BT = per_token.pop("ids_BT")
    scored_M = _scored_places(per_token["loss_mask_BT"].flatten(), multiple)
    owner_BT = _at(own_BT, batch.owner_N, -1)
    document_edges = [document.start for document in documents]
    document_edges.append(own_BT.numel())
    document_starts = torch.tensor(document_edges, dtype=torch.int32)
    return MicroBatch(
        **per_token,
        ids_BT=_at(own_BT, batch.ids_N),
        targets_BT=targets_BT,
        positions_BT=positions_BT,
        token_BT=token_BT,
        sequence_BT=_at(owner_BT, batch.sequence_S, -1),
        temperatures_BT=_at(owner_BT, batch.temperatures_S, 1),
        num_loss_tokens_BT=_at(owner_BT, batch.num_loss_tokens_S).clamp(min=1),
        scored_M=scored_M,
        kept=_kept_ids(batch, token_BT.flatten()[scored_M]),
        document_starts=document_starts,
        longest_document=int(document_starts.diff().max()),
        shared=shared_keys(documents) if prompts else None,
        num_sequences=int(batch.sequence_S.max()) + 1,
    )


def take_out(values_BT: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the M tokens that a micro-batch predicts: (index_M int64 among the N of the batch, values_M).

    `values_N[index_M] = values_M`, once per micro-batch, fills a flat tensor in the order of `TrainBatch`, except the
    first token of each sequence, which nothing predicts, and prompts that are shared, where one of them is filled in.
    """
    predicts_BT = micro.token_BT >= 0
    return micro.token_BT[predicts_BT], values_BT[predicts_BT]


def _at(index_BT: Tensor, values: Tensor | None, elsewhere: float = 0) -> Tensor | None:
    """Return the values at these indices, and `elsewhere` where an index is negative."""
    if values is None:
        return None
    values_BT = values[index_BT.clamp(min=0)]
    return values_BT.masked_fill(index_BT < 0, elsewhere)


def _kept_ids(batch: TrainBatch, token_M: Tensor) -> KeptIds | None:
    """Return the ids that these of the N tokens were chosen from; -1 is no token."""
    if batch.kept_C is None:
        return None
    place_N = torch.full((batch.num_tokens + 1,), -1)  # the last one stands for no token
    place_N[token_M] = torch.arange(len(token_M))
    place_C = place_N[batch.token_C]
    is_here_C = (place_C >= 0) & (batch.kept_C >= 0)
    return KeptIds(batch.kept_C[is_here_C], place_C[is_here_C])


def _scored_places(counts: Tensor, multiple: int) -> Tensor:
    """List the places that count and the first others, up to a multiple of `multiple` that is not 0, in order."""
    num_multiples = math.ceil(int(counts.sum()) / multiple)
    num_places = multiple * max(1, num_multiples)
    counting_first = (~counts).int().argsort(stable=True)
    return counting_first[:num_places].sort().values
