"""Rollouts as a step's batch, and its mini-batches."""

import dataclasses
import math

import pytest
import torch

from grpo.data.batches import make_batch, split_groups
from grpo.types import Piece, Prompt, Rollout
from tests.rollouts import completion, conversation, sequence
from tests.rows import one_row


def test_a_batch_is_its_rollouts_laid_end_to_end():
    prompt = Prompt(index=0, ids=[5, 6])
    facts = {"version": 4, "temperature": 0.7, "ended_by": "tokens"}
    sampled = completion([7, 8, 9], [-1.0, -torch.inf, -3.0], prompt, **facts)
    alone = sequence(torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2))
    batch = make_batch([alone, sampled])
    assert batch.ids_N.tolist() == [1, 2, 5, 6, 7, 8, 9] and batch.lengths_S.tolist() == [2, 5]
    # the prompt does not count, nor does a token whose sampling log-prob is not finite
    assert batch.generator_logprobs_N.tolist() == [0, 0, 0, 0, -1, -math.inf, -3]
    assert batch.prompt_lengths_S.tolist() == [0, 2] and batch.kept_C is None
    assert batch.loss_mask_N.nonzero()[:, 0].tolist() == [1, 4, 6] and batch.num_loss_tokens_S.tolist() == [1, 2]
    assert batch.temperatures_S.tolist() == pytest.approx([1.0, 0.7]) and batch.versions_S.tolist() == [0, 4]
    assert batch.truncated_S.tolist() == [False, True]
    # as old as the first piece, if it was continued
    pieces = [Piece.sampled([7], [-1.0], version) for version in (2, 5)]
    assert make_batch([conversation(pieces, prompt)]).versions_S.tolist() == [2]
    # a label, and no token has a sampling log-prob
    label = Rollout.alone(Piece.written([0, 1], [False, True]))
    assert make_batch([label, sampled]).generator_logprobs_N is None


def test_an_episode_with_several_sequences_is_one_rollout():
    """As of an agent that branches: both sequences begin alike, and a token of the first counts once."""
    start = Piece.written([1, 2])
    turn = Piece.sampled([3, 4], [-1.0, -2.0])
    again = dataclasses.replace(turn, loss_mask_T=torch.zeros(2, dtype=torch.bool))
    ends = [Piece.sampled([token], [-0.5]) for token in (5, 6)]
    branched = Rollout(Prompt(0, [1, 2]), 0, sequences=((start, turn, ends[0]), (start, again, ends[1])))
    batch = make_batch([branched, completion([7], prompt=Prompt(1, [8]), index=1)])
    assert batch.rollout_S.tolist() == [0, 0, 1] and batch.lengths_S.tolist() == [5, 5, 2]
    assert batch.loss_mask_N.sum() == 5 and batch.num_rollouts == 2
    assert [part.num_sequences for part in split_groups(batch, 1, 2)] == [2, 1]


def test_mini_batches_are_whole_groups_in_order():
    # sequence s has 2 (s + 1) tokens; 3 groups of 2 in 2 parts: 1 group, then 2
    samples = [sequence(torch.arange(length), torch.arange(length) > 0) for length in (2, 4, 6, 8, 10, 12)]
    batch = dataclasses.replace(make_batch(samples), advantages_N=torch.arange(42.0))
    first, second = split_groups(batch, group_size=2, num_parts=2)
    assert first.lengths_S.tolist() == [2, 4] and second.lengths_S.tolist() == [6, 8, 10, 12]
    assert second.advantages_N.tolist() == list(range(6, 42)) and second.ids_N.equal(batch.ids_N[6:])
    # a sequence keeps its index in the step, in the micro-batch too
    micro = one_row(second)
    assert micro.sequence_BT.tolist() == [[5] * 12 + [4] * 10 + [3] * 8 + [2] * 6] and micro.num_sequences == 6
    assert len(split_groups(batch, group_size=2, num_parts=5)) == 3  # no part is empty
