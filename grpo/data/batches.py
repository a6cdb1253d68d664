"""Samples -> the batch of a step -> its mini-batches -> micro-batches of `[B, T]`, and values out of these.

The one place that shifts what belongs to a token to the position that predicts it. Fields travel by their suffix:
`x_T` of the samples is `x_N` of a batch and `x_BT` of a micro-batch, whatever x is. Which sequences run together is
decided in grpo/data/packing.py.

Completions of a group have one prompt, and a row computes it once for neighbours that share it: its tokens, all but the
last, are a document of their own, in front of the group's others, which begin with the prompt's last token, the first
that predicts something of their own; they attend to the keys of that document and to their own. So each token has the
keys, the position and the logits that it has where every sequence is laid out whole. Source: Liu et al. 2025,
arXiv:2506.05433, who attend twice instead of repeating keys.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch

from grpo.types import Completion, MicroBatch, Prompt, Sample, SharedPrompts, TrainBatch

# Padding may be longer than any sequence, but its positions must stay within the model's, of which even toys have more.
PAD_DOCUMENT = 128


def make_batch(samples: Sequence[Sample]) -> TrainBatch:
    """Lay the S sequences of a step end to end. A field that is None in any sample is None in the batch."""
    per_token = {}
    for name in (field.name for field in fields(Sample) if "_T" in field.name):
        values = [getattr(sample, name) for sample in samples]
        per_token[name.replace("_T", "_N")] = None if any(value is None for value in values) else torch.cat(values)
    return TrainBatch(
        **per_token,
        lengths_S=torch.tensor([len(sample.ids_T) for sample in samples]),
        sequence_S=torch.arange(len(samples)),
        temperatures_S=torch.tensor([sample.temperature for sample in samples], dtype=torch.float32),
        versions_S=torch.tensor([sample.version for sample in samples]),
        truncated_S=torch.tensor([sample.truncated for sample in samples]),
        prompt_lengths_S=torch.tensor([sample.prompt_tokens for sample in samples]),
    )


def sample_of(
    prompt: Prompt,
    completion: Completion,
    turn_weight: float | None = None,
) -> Sample:
    """A prompt and its completion as one sequence, of which the completion says what counts in the loss.

    turn_weight: of the environment's reward, where turns have credit of their own.
    """
    prompt_ids_T, pieces = completion.behind(prompt)
    before = [] if pieces is not completion.pieces else [prompt_ids_T]  # else it is among the completion's own
    nothing_T = torch.zeros(sum(map(len, before)))
    others = {} if turn_weight is None else _turns_of(completion, turn_weight)
    ids_T = torch.cat([*before, completion.ids_T])
    return Sample(
        ids_T=ids_T,
        loss_mask_T=torch.cat([nothing_T.bool(), completion.loss_mask_T]),
        generator_logprobs_T=torch.cat([nothing_T, completion.logprobs_T]),
        prompt_tokens=len(prompt_ids_T),
        temperature=completion.temperature,
        version=completion.oldest_version,
        truncated=completion.truncated,
        **{name: torch.cat([nothing_T.to(values_T.dtype), values_T]) for name, values_T in others.items()},
    )


def _turns_of(completion: Completion, weight: float) -> dict[str, torch.Tensor]:
    """`Sample.turn_T` and `earned_T` of an episode; where its environment gave no reward, its turns earned none."""
    episode, pieces = completion.episode, completion.pieces
    sampled = torch.tensor([piece.logprobs_T is not None for piece in pieces])
    lengths = torch.tensor([piece.num_tokens for piece in pieces])
    turn_T = (sampled.cumsum(0) * sampled).repeat_interleave(lengths)
    weight = 0.0 if episode["reward"] is None else weight
    earned = [turn.get("earned", 0.0) * weight for turn in episode["turns"]]  # at its end, when the next one begins
    return {"turn_T": turn_T, "earned_T": torch.tensor([0.0, 0.0, *earned])[turn_T]}


def split_groups(batch: TrainBatch, group_size: int, num_parts: int) -> list[TrainBatch]:
    """Cut a step's batch into mini-batches of whole groups, in order, their numbers of groups differing by at most one.

    Fewer than `num_parts` if there are fewer groups. Raises ValueError if the batch is not whole groups.
    """
    num_groups, rest = divmod(batch.num_sequences, group_size)
    if rest:
        raise ValueError(f"{batch.num_sequences} sequences are not whole groups of {group_size}")
    num_parts = min(num_parts, num_groups)
    edges = [group_size * (part * num_groups // num_parts) for part in range(num_parts + 1)]
    starts, parts = [*batch.starts_S.tolist(), batch.num_tokens], []
    for start, end in itertools.pairwise(edges):
        parts.append(_part(batch, slice(start, end), slice(starts[start], starts[end])))
    return parts


def _part(batch: TrainBatch, sequences: slice | torch.Tensor, tokens: slice | torch.Tensor) -> TrainBatch:
    places = {"S": sequences, "N": tokens}  # the first letter of a field's suffix says what it is laid out by
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    laid_out = {name: places[name.rpartition("_")[2][0]] for name in values}
    return TrainBatch(**{name: x if x is None else x[laid_out[name]] for name, x in values.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Prompts that sequences share


class Prompts(NamedTuple):
    """What is known of the prompts of S sequences."""

    first_S: list[int]
    """The first sequence that has the same prompt."""
    tokens_S: list[int]
    """Tokens that sequences with that prompt can share: all of it but its last."""


def prompts_of(batch: TrainBatch) -> Prompts | None:
    """None if no two sequences have a prompt to share. Raises ValueError if a token of a prompt counts in the loss."""
    if batch.prompt_lengths_S is None:
        return None
    ids, counts, first_of = batch.ids_N.numpy(), batch.loss_mask_N.numpy(), {}
    lengths, first_S = batch.prompt_lengths_S.tolist(), []
    for index, (start, length) in enumerate(zip(batch.starts_S.tolist(), lengths, strict=True)):
        if counts[start : start + length].any():
            raise ValueError(f"sequence {index} has a token that counts in the loss within its prompt")
        first_S.append(first_of.setdefault(ids[start : start + length].tobytes(), index))
    tokens_S = [max(length - 1, 0) for length in lengths]
    shared = any(tokens_S[index] for index, first in enumerate(first_S) if first != index)
    return Prompts(first_S, tokens_S) if shared else None


def runs(row: Sequence[int], prompts: Prompts | None) -> Iterator[tuple[list[int], int]]:
    """The row's sequences in order, neighbours with the same prompt together: (indices, tokens that they share)."""
    for first, run in itertools.groupby(row, lambda index: prompts.first_S[index] if prompts else index):
        indices = list(run)
        yield indices, prompts.tokens_S[first] if prompts and len(indices) > 1 else 0


def row_tokens(row: Sequence[int], lengths: Sequence[int], prompts: Prompts | None) -> int:
    """Positions that a row needs."""
    saved = sum((len(indices) - 1) * shared for indices, shared in runs(row, prompts))
    return sum(lengths[index] for index in row) - saved


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches


class Document(NamedTuple):
    """A stretch of a row whose positions attend to each other, and to a prompt in front of them."""

    start: int
    """Its first place, b * T + t."""
    end: int
    prompt: "Document | None" = None


def build_micro_batch(
    batch: TrainBatch,
    rows: Sequence[Sequence[int]],
    row_length: int,
    multiple: int = 1,
    prompts: Prompts | None = None,
) -> MicroBatch:
    """Lay sequences out: `rows` has the indices of each row's, in order, and `row_length` is the positions T of each.

    With `prompts` (`prompts_of` the batch), neighbours in a row with the same prompt have it once in front of them.
    A row without sequences is padding, so that a rank without any still runs its forward and backward. The number of
    positions with log-probs is rounded up to `multiple`, of which `row_length` is one.

    Raises ValueError if a row is longer than `row_length`, or the first token of a sequence counts in the loss.
    """
    bare = batch.loss_mask_N[batch.starts_S].nonzero()
    if len(bare):
        raise ValueError(
            f"the first token of sequence {int(bare[0])} counts in the loss, but nothing before it could predict it; "
            "a prompt needs at least 1 token"
        )
    own_BT, token_BT, positions_BT, documents = _lay_out_rows(batch, rows, row_length, prompts)

    # what belongs to a token goes to the position that predicts it, what belongs to a sequence to all its positions
    per_token = {name.replace("_N", "_BT"): _at(token_BT, values_N, 0) for name, values_N in batch.per_token.items()}
    owner_BT = _at(own_BT, batch.owner_N, -1)
    document_starts = torch.tensor([*(document.start for document in documents), own_BT.numel()], dtype=torch.int32)
    return MicroBatch(
        **per_token | {"ids_BT": _at(own_BT, batch.ids_N)},
        targets_BT=per_token["ids_BT"],
        positions_BT=positions_BT,
        token_BT=token_BT,
        sequence_BT=_at(owner_BT, batch.sequence_S, -1),
        temperatures_BT=_at(owner_BT, batch.temperatures_S, 1),
        num_loss_tokens_BT=_at(owner_BT, batch.num_loss_tokens_S).clamp(min=1),
        scored_M=_scored(_at(token_BT, batch.loss_mask_N).flatten(), multiple),
        document_starts=document_starts,
        longest_document=int(document_starts.diff().max()),
        shared=shared_keys(documents) if prompts else None,
        num_sequences=int(batch.sequence_S.max()) + 1,
    )


def take_out(values_BT: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the M tokens that a micro-batch predicts: (index_M int64 among the N of the batch, values_M).

    `values_N[index_M] = values_M`, once per micro-batch, fills a flat tensor in the order of `TrainBatch`, except the
    first token of each sequence, which nothing predicts, and prompts that are shared, of which one is filled in.
    """
    predicts_BT = micro.token_BT >= 0
    return micro.token_BT[predicts_BT], values_BT[predicts_BT]


def _at(index_BT: torch.Tensor, values: torch.Tensor | None, elsewhere: float = 0) -> torch.Tensor | None:
    """The values at these indices, and `elsewhere` where an index is negative."""
    if values is None:
        return None
    is_nothing = (index_BT < 0).view(*index_BT.shape, *(1 for _ in values.shape[1:]))
    return values[index_BT.clamp(min=0)].masked_fill(is_nothing, elsewhere)


def _lay_out_rows(
    batch: TrainBatch, rows: Sequence[Sequence[int]], row_length: int, prompts: Prompts | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Document]]:
    """What is at each position: (its own token and the one that it predicts, among the N, -1 for none; its position
    within the sequence; the documents in order). Positions of padding restart every `PAD_DOCUMENT`."""
    lengths, starts = batch.lengths_S.tolist(), batch.starts_S.tolist()
    own_BT = torch.full((len(rows), row_length), -1, dtype=torch.int64)
    token_BT, positions_BT = own_BT.clone(), torch.zeros_like(own_BT)
    counter_T, documents = torch.arange(row_length), []
    for b, row in enumerate(rows):
        needed = row_tokens(row, lengths, prompts)
        if needed > row_length:
            raise ValueError(f"row {b} has {needed} tokens, but row_length={row_length}; lay it out in longer rows")
        at, first_place = 0, b * row_length
        for indices, shared in runs(row, prompts):
            # of its sequence, each from where to where; of the first one, its prompt before that
            stretches = [(indices[0], 0, shared)] if shared else []
            stretches += [(index, shared, lengths[index]) for index in indices]
            prompt = None
            for index, begin, end in stretches:
                stop, tokens_T = at + end - begin, starts[index] + torch.arange(begin, min(end + 1, lengths[index]))
                own_BT[b, at:stop] = tokens_T[: end - begin]
                token_BT[b, at : at + len(tokens_T) - 1] = tokens_T[1:]  # the shift by one: here and nowhere else
                positions_BT[b, at:stop] = torch.arange(begin, end)
                documents.append(Document(first_place + at, first_place + stop, prompt))
                prompt = prompt or (documents[-1] if shared else None)
                at = stop
        positions_BT[b, at:] = counter_T[: row_length - at] % PAD_DOCUMENT
        for start in range(at, row_length, PAD_DOCUMENT):
            documents.append(Document(first_place + start, first_place + min(start + PAD_DOCUMENT, row_length)))
    return own_BT, token_BT, positions_BT, documents


def _scored(wanted: torch.Tensor, multiple: int) -> torch.Tensor:
    """Where `wanted` is True, and the first other places up to a multiple of `multiple`, at least one; in order."""
    number = max(multiple, -(-int(wanted.sum()) // multiple) * multiple)
    return (~wanted).int().argsort(stable=True)[:number].sort().values


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
