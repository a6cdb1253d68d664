"""Rollouts -> samples -> the batch of a step -> its mini-batches: sequences laid end to end, and cut apart again."""

from collections.abc import Sequence
from dataclasses import fields

import torch

from grpo.types import Completion, Prompt, Sample, TrainBatch


def make_batch(samples: Sequence[Sample]) -> TrainBatch:
    """Lay the S sequences of a step end to end; sampling log-probs only if every sample has them."""
    sampled = bool(samples) and all(sample.generator_logprobs_T is not None for sample in samples)
    return TrainBatch(
        ids_N=torch.cat([sample.ids_T for sample in samples]),
        loss_mask_N=torch.cat([sample.loss_mask_T for sample in samples]),
        lengths_S=torch.tensor([len(sample.ids_T) for sample in samples]),
        sequence_S=torch.arange(len(samples)),
        temperatures_S=torch.tensor([sample.temperature for sample in samples], dtype=torch.float32),
        versions_S=torch.tensor([sample.version for sample in samples]),
        truncated_S=torch.tensor([sample.truncated for sample in samples]),
        prompt_lengths_S=torch.tensor([sample.prompt_tokens for sample in samples]),
        generator_logprobs_N=torch.cat([sample.generator_logprobs_T for sample in samples]) if sampled else None,
    )


def sample_of(prompt: Prompt, completion: Completion) -> Sample:
    """A prompt and its completion as one sequence, of which the completion says what counts in the loss."""
    prompt_ids_T = torch.tensor(prompt.ids, dtype=torch.int64)
    return Sample(
        ids_T=torch.cat([prompt_ids_T, completion.ids_T]),
        loss_mask_T=torch.cat([torch.zeros_like(prompt_ids_T, dtype=torch.bool), completion.loss_mask_T]),
        generator_logprobs_T=torch.cat([torch.zeros(len(prompt_ids_T)), completion.logprobs_T]),
        prompt_tokens=len(prompt.ids),
        temperature=completion.temperature,
        version=completion.oldest_version,
        truncated=completion.truncated,
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
    # a field's last letter says what it is laid out by: sequences or tokens
    tokens = slice(int(batch.lengths_S[:start].sum()), int(batch.lengths_S[:end].sum()))
    bounds = {"S": slice(start, end), "N": tokens}
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return TrainBatch(**{name: x if x is None else x[bounds[name[-1]]] for name, x in values.items()})
