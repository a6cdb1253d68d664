"""Samples as a step's batch, and its mini-batches."""

import dataclasses
import math

import pytest
import torch

from grpo.data.batches import make_batch, sample_of, split_groups
from grpo.types import Completion, Piece, Prompt, Sample
from tests.rows import one_row


def test_a_batch_is_its_samples_laid_end_to_end():
    prompt = Prompt(index=0, ids=[5, 6])
    completion = Completion.of(
        torch.tensor([7, 8, 9]), torch.tensor([-1.0, -torch.inf, -3.0]), truncated=True, version=4, temperature=0.7
    )
    sample = sample_of(prompt, completion)
    assert sample.ids_T.tolist() == [5, 6, 7, 8, 9]
    # the prompt does not count, nor does a token whose sampling log-prob is not finite
    assert sample.loss_mask_T.tolist() == [False, False, True, False, True]
    assert sample.generator_logprobs_T.tolist() == [0, 0, -1, -math.inf, -3]

    batch = make_batch([Sample(torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2)), sample])
    assert batch.ids_N.tolist() == [1, 2, 5, 6, 7, 8, 9] and batch.lengths_S.tolist() == [2, 5]
    assert batch.loss_mask_N.nonzero()[:, 0].tolist() == [1, 4, 6] and batch.num_loss_tokens_S.tolist() == [1, 2]
    assert batch.temperatures_S.tolist() == pytest.approx([1.0, 0.7]) and batch.versions_S.tolist() == [0, 4]
    assert batch.truncated_S.tolist() == [False, True] and batch.owner_N.tolist() == [0, 0, 1, 1, 1, 1, 1]
    # as old as the first piece, if it was continued
    pieces = [Piece.sampled(torch.tensor([7]), torch.tensor([-1.0]), version) for version in (2, 5)]
    assert make_batch([sample_of(prompt, Completion(tuple(pieces), False))]).versions_S.tolist() == [2]
    # one sample that was not sampled, and none has a sampling log-prob
    assert make_batch([Sample(torch.tensor([1]), torch.tensor([False])), sample]).generator_logprobs_N is None


def test_mini_batches_are_whole_groups_in_order():
    # sequence s has 2 (s + 1) tokens; 3 groups of 2 in 2 parts: 1 group, then 2
    samples = [Sample(torch.arange(length), torch.arange(length) > 0) for length in (2, 4, 6, 8, 10, 12)]
    batch = dataclasses.replace(make_batch(samples), advantages_N=torch.arange(42.0), truncated_S=torch.arange(6) > 3)
    first, second = split_groups(batch, group_size=2, num_parts=2)
    assert first.lengths_S.tolist() == [2, 4] and second.lengths_S.tolist() == [6, 8, 10, 12]
    assert second.truncated_S.tolist() == [False, False, True, True]
    assert second.advantages_N.tolist() == list(range(6, 42)) and second.ids_N.equal(batch.ids_N[6:])
    # a sequence keeps its index in the step, in the micro-batch too
    micro = one_row(second)
    assert micro.sequence_BT.tolist() == [[5] * 12 + [4] * 10 + [3] * 8 + [2] * 6] and micro.num_sequences == 6
    assert len(split_groups(batch, group_size=2, num_parts=5)) == 3  # no part is empty
    with pytest.raises(ValueError, match="6 sequences are not whole groups of 4"):
        split_groups(batch, group_size=4, num_parts=1)
