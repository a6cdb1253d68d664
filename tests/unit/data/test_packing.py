"""Plans that can be checked by hand, properties over random lengths, and values in and out of micro-batches."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from grpo.data.batches import PAD_DOCUMENT, build_micro_batch, make_batch, sample_of, split_groups, take_out
from grpo.data.packing import pack, plan_rows
from grpo.types import Completion, Piece, Prompt, Sample, TrainBatch

torch.set_num_threads(1)


def numbered(prompt_lengths, completion_lengths) -> TrainBatch:
    """Ids 1, 2, 3, ... and log-probs -1.0, -2.0, ... so that every value names its place; completions count."""
    samples, first = [], 1
    for prompt, completion in zip(prompt_lengths, completion_lengths, strict=True):
        ids_T = torch.arange(first, first + prompt + completion)
        samples.append(Sample(ids_T, torch.arange(len(ids_T)) >= prompt, -ids_T.float()))
        first += len(ids_T)
    return make_batch(samples)


def test_rows_by_hand():
    # 20 tokens into 2 ranks x 10: longest first, each into the emptiest: 7+3 and 6+4
    assert plan_rows([4, 7, 3, 6], 2, 10) == [[[1, 2]], [[3, 0]]]
    # 18 tokens would fit 2 x 10 by count, but three sequences of 6 need three rows; 2 ranks then run 2 each
    assert plan_rows([6, 6, 6], 2, 10) == [[[0], []], [[1], [2]]]
    # best fit: into the emptiest of two rows of 6: 3 | 3, then 3 + 2 | 3 + 2, and no room for the last 2
    assert plan_rows([3, 3, 2, 2, 2], 1, 6) == [[[0, 1], [2, 3, 4]]]
    # 7 | 6, then 3 into the row that it fills: 7 + 3 | 6 + 2 + 2
    assert plan_rows([2, 7, 3, 6, 2], 1, 10) == [[[1, 2], [3, 0, 4]]]
    # fewer sequences than ranks, and none at all
    assert plan_rows([5], 3, 10) == [[[0]], [[]], [[]]]
    assert plan_rows([], 2, 10) == [[[]], [[]]]


def test_row_length_and_padding_by_hand():
    # rows of 10 and 10, rounded up to 12: 20 of 24 positions hold a token
    packing = pack(numbered([2, 3, 2, 4], [2, 4, 1, 2]), 2, 10, multiple=4)
    assert packing.row_length == 12 and packing.metrics() == {"packing/padding_frac": pytest.approx(4 / 24)}
    # three rows of 6 and, for the rank that has none left, a row of padding: 18 of 24
    packing = pack(numbered([3] * 3, [3] * 3), 2, 10)
    assert packing.row_length == 6 and packing.metrics() == {"packing/padding_frac": pytest.approx(6 / 24)}
    assert [micro.ids_BT.tolist() for micro in packing.micro_batches(0)] == [[[1, 2, 3, 4, 5, 6]], [[0] * 6]]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, but a micro-batch holds 1 to 10.*at least 12"):
        plan_rows([3, 11, 12], 2, 10)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        plan_rows([0], 2, 10)


def random_cases():
    generator = random.Random(0)
    for _ in range(100):
        max_tokens = generator.choice([50, 64, 1000])
        longest = generator.choice([max_tokens, max_tokens // 2, max(1, max_tokens // 10)])
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(0, 80))]
        yield lengths, generator.choice([1, 2, 3, 8]), max_tokens


def overflows_into_emptiest(lengths: list[int], num_rows: int, max_tokens: int) -> bool:
    """Whether a row outgrows `max_tokens` if each sequence, the longest first, goes into the emptiest of the rows."""
    loads = [0] * num_rows
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return max(loads) > max_tokens


def test_properties_of_rows():
    for lengths, num_ranks, max_tokens in random_cases():
        plan = plan_rows(lengths, num_ranks, max_tokens)
        assert plan == plan_rows(list(lengths), num_ranks, max_tokens)
        assert len(plan) == num_ranks and len({len(rows) for rows in plan}) == 1 and len(plan[0]) >= 1
        rows = [row for of_rank in plan for row in of_rank]
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in row) for row in rows]
        assert max(loads) <= max_tokens
        # where even rows fit, a row exceeds any other by at most the sequence that it got last, and so does a rank
        longest = max(lengths, default=0)
        if not overflows_into_emptiest(lengths, len(loads), max_tokens):
            assert max(loads) - min(loads) <= longest
        if len(plan[0]) > 1:  # with one row less per rank, even rows would not do
            assert overflows_into_emptiest(lengths, len(loads) - num_ranks, max_tokens)
        # if greedy does not fit, every row was more than half full, so one more micro-batch than that always suffices
        fewest = math.ceil(sum(lengths) / (num_ranks * max_tokens))
        assert fewest <= len(plan[0]) <= 2 * sum(lengths) // (num_ranks * max_tokens) + 1


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


def test_micro_batch_by_hand():
    # prompt + completion: sequence 0 is 1 2 + 3, sequence 1 is 4 + 5 6, sequence 2 is 7 8 + 9 10
    batch = numbered([2, 1, 2], [1, 2, 2])
    batch = dataclasses.replace(batch, advantages_N=10.0 * batch.ids_N, old_logprobs_N=None)
    micro = build_micro_batch(batch, [[2, 0], [1]], row_length=9)
    assert micro.ids_BT.tolist() == [[7, 8, 9, 10, 1, 2, 3, 0, 0], [4, 5, 6, 0, 0, 0, 0, 0, 0]]
    assert micro.targets_BT.tolist() == [[8, 9, 10, 0, 2, 3, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.token_BT.tolist() == [[7, 8, 9, -1, 1, 2, -1, -1, -1], [4, 5, -1, -1, -1, -1, -1, -1, -1]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4, 5]]
    mask = [[0, 1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.loss_mask_BT.dtype == torch.bool and micro.loss_mask_BT.int().tolist() == mask
    assert micro.sequence_BT.tolist() == [[2, 2, 2, 2, 0, 0, 0, -1, -1], [1, 1, 1, -1, -1, -1, -1, -1, -1]]
    # every field of a token is at the position before it, 0 where nothing is predicted
    assert micro.advantages_BT.tolist() == [[80, 90, 100, 0, 20, 30, 0, 0, 0], [50, 60, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.old_logprobs_BT is None and micro.ref_logprobs_BT is None
    assert micro.scored_M.tolist() == [1, 2, 5, 9, 10]  # the mask's places, row after row
    assert micro.document_starts.tolist() == [0, 4, 7, 9, 12, 18] and micro.longest_document == 6  # of padding
    rounded = build_micro_batch(batch, [[2, 0], [1]], row_length=9, multiple=3)
    assert rounded.scored_M.tolist() == [0, 1, 2, 5, 9, 10]


def test_the_mask_may_be_true_in_several_stretches():
    """A chat with two answers, or two sampled turns with a tool's output in between: 1 2 [3 4] 5 6 [7] 8."""
    mask_T = torch.tensor([False, False, True, True, False, False, True, False])
    one = Sample(torch.tensor([20, 21]), torch.tensor([False, True]), torch.tensor([-20.0, -21.0]))
    batch = make_batch([Sample(torch.arange(1, 9), mask_T, -torch.arange(1.0, 9.0)), one])
    micro = build_micro_batch(batch, [[1, 0]], row_length=12)
    assert micro.loss_mask_BT[0].nonzero()[:, 0].tolist() == [0, 3, 4, 7]
    assert micro.targets_BT[micro.loss_mask_BT].tolist() == [21, 3, 4, 7]
    assert micro.num_loss_tokens_BT[micro.loss_mask_BT].tolist() == [1, 3, 3, 3]


def test_empty_micro_batch_is_one_row_of_padding():
    micro = build_micro_batch(numbered([2], [1]), [[]], row_length=4)
    assert micro.ids_BT.tolist() == [[0, 0, 0, 0]] and micro.positions_BT.tolist() == [[0, 1, 2, 3]]
    assert (micro.sequence_BT == -1).all() and not micro.loss_mask_BT.any()
    assert micro.scored_M.tolist() == [0]  # so that the LM head has a forward and a backward too
    index_M, values_M = take_out(torch.ones(1, 4), micro)
    assert len(index_M) == 0 and len(values_M) == 0


def test_positions_of_padding_restart_before_they_exceed_the_models():
    # 3 tokens and 297 of padding: documents of 128, 128 and 41
    assert PAD_DOCUMENT == 128
    micro = build_micro_batch(numbered([1], [2]), [[0]], row_length=300)
    assert micro.positions_BT.tolist() == [[*range(3), *range(128), *range(128), *range(41)]]


def test_build_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="row 0 has 7 tokens, but row_length=6"):
        build_micro_batch(numbered([2, 2], [1, 2]), [[0, 1]], row_length=6)
    with pytest.raises(ValueError, match="the first token of sequence 1 counts in the loss.*a prompt needs at least 1"):
        build_micro_batch(numbered([1, 0], [1, 1]), [[0], [1]], row_length=6)


@pytest.mark.parametrize("num_ranks, max_tokens", [(1, 1000), (3, 25)])
def test_values_go_in_and_out_in_batch_order(num_ranks, max_tokens):
    generator = random.Random(max_tokens)
    batch = numbered([generator.randint(1, 10) for _ in range(20)], [generator.randint(1, 15) for _ in range(20)])
    batch = dataclasses.replace(batch, temperatures_S=torch.linspace(0.5, 1.5, 20))
    packing = pack(batch, num_ranks, max_tokens, multiple=8)
    back_N, ids_N = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens, dtype=torch.int64)
    for micro in itertools.chain.from_iterable(packing.micro_batches(rank) for rank in range(num_ranks)):
        index_M, values_M = take_out(micro.generator_logprobs_BT, micro)
        assert (back_N[index_M] == 0).all()
        back_N[index_M] = values_M
        ids_N[index_M] = take_out(micro.targets_BT, micro)[1]
        # each position knows its sequence's temperature, padding has 1
        known_BT = batch.temperatures_S[micro.sequence_BT.clamp(min=0)].where(micro.sequence_BT >= 0, 1)
        assert micro.temperatures_BT.equal(known_BT)
    firsts_S = batch.lengths_S.cumsum(0) - batch.lengths_S  # what nothing predicts
    assert back_N.equal(batch.generator_logprobs_N.index_fill(0, firsts_S, 0))
    assert ids_N.equal(batch.ids_N.index_fill(0, firsts_S, 0))


def test_mini_batches_are_whole_groups_in_order():
    # sequence s has prompt s+1 tokens and completion s+1 tokens; 3 groups of 2 in 2 parts: 1 group, then 2
    batch = numbered([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    batch = dataclasses.replace(
        batch, advantages_N=torch.arange(42.0), temperatures_S=torch.arange(6.0) + 1, truncated_S=torch.arange(6) > 3
    )
    first, second = split_groups(batch, group_size=2, num_parts=2)
    assert first.lengths_S.tolist() == [2, 4] and second.lengths_S.tolist() == [6, 8, 10, 12]
    assert first.temperatures_S.tolist() == [1, 2] and second.truncated_S.tolist() == [False, False, True, True]
    assert second.advantages_N.tolist() == list(range(6, 42)) and second.ids_N.equal(batch.ids_N[6:])
    # a sequence keeps its index in the step, in the micro-batch too
    micro = build_micro_batch(second, [[1]], row_length=10)
    assert micro.sequence_BT.tolist() == [[3] * 8 + [-1] * 2] and micro.num_sequences == 6
    assert len(split_groups(batch, group_size=2, num_parts=5)) == 3  # no part is empty
    with pytest.raises(ValueError, match="6 sequences are not whole groups of 4"):
        split_groups(batch, group_size=4, num_parts=1)
