"""Samples -> the batch of a step -> its mini-batches. layout.py makes micro-batches of these.

Fields travel by their suffix: `x_T` of the samples is `x_N` of a batch and `x_BT` of a micro-batch, whatever x is.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from grpo.types import Completion, Prompt, Sample, TrainBatch


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
        rollout_S=torch.arange(len(samples)),
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
    num_groups, rest = divmod(batch.num_rollouts, group_size)
    if rest:
        raise ValueError(f"{batch.num_rollouts} rollouts are not whole groups of {group_size}")
    num_parts = min(num_parts, num_groups)
    edges_R = torch.arange(num_parts + 1) * num_groups // num_parts * group_size
    # the last letter of a field's name says what it is laid out by
    edges = {
        "R": edges_R,
        "S": torch.searchsorted(batch.rollout_S, edges_R),
        "N": torch.searchsorted(batch.rollout_N, edges_R),
    }
    if batch.kept_C is not None:
        edges["C"] = torch.searchsorted(batch.token_C, edges["N"])
    parts = []
    for number in range(num_parts):
        part = {}
        for field in fields(batch):
            values = getattr(batch, field.name)
            if values is not None:
                start, end = edges[field.name[-1]][number : number + 2]
                part[field.name] = values[..., start:end]
        parts.append(TrainBatch(**part))
    return parts
