"""Plans that can be checked by hand, properties over random lengths, and values in and out of micro-batches."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from grpo.data.packing import (
    PAD_DOCUMENT,
    build_micro_batch,
    gather_completions,
    per_sequence,
    plan_micro_batches,
    row_length,
    scatter_completions,
    split_groups,
)
from grpo.types import TrainBatch

torch.set_num_threads(1)


def make_batch(prompt_lengths, completion_lengths):
    """Ids 1, 2, 3, ... and log-probs -0.0, -1.0, ... so that every value names its place."""
    num_tokens, num_completion_tokens = sum(prompt_lengths) + sum(completion_lengths), sum(completion_lengths)
    return TrainBatch(
        ids_N=torch.arange(1, num_tokens + 1),
        prompt_lengths_S=torch.tensor(prompt_lengths, dtype=torch.int64),
        completion_lengths_S=torch.tensor(completion_lengths, dtype=torch.int64),
        generator_logprobs_C=-torch.arange(num_completion_tokens, dtype=torch.float32),
    )


def test_packed_plan_by_hand():
    # 20 tokens into 2 ranks x 10: longest first, each into the emptiest: 7+3 and 6+4
    assert plan_micro_batches([4, 7, 3, 6], 2, 10, packing=True) == [[[[1, 2]]], [[[3, 0]]]]


def test_packed_plan_takes_another_micro_batch_when_the_smallest_number_does_not_fit():
    # 18 tokens would fit 2 x 10 by count, but three sequences of 6 need three rows; 2 ranks then run 2 each
    plan = plan_micro_batches([6, 6, 6], 2, 10, packing=True)
    assert plan == [[[[0]], []], [[[1]], [[2]]]]


def test_unpacked_plan_by_hand():
    # at most 12 padded tokens: the two 8s run alone, one per rank; then rows of 5, two per rank; then what is left
    plan = plan_micro_batches([1, 8, 5, 8, 5, 5, 1], 2, 12, packing=False)
    assert plan == [[[[1]], [[2], [0]], [[6]]], [[[3]], [[4], [5]], []]]
    # rows of 5 rounded up to 8 leave room for one row only
    assert plan_micro_batches([5, 5], 1, 12, packing=False, multiple=8) == [[[[0]], [[1]]]]


def test_fewer_sequences_than_ranks_and_none_at_all():
    assert plan_micro_batches([5], 3, 10, packing=True) == [[[[0]]], [[]], [[]]]
    assert plan_micro_batches([5], 3, 10, packing=False) == [[[[0]]], [[]], [[]]]
    assert plan_micro_batches([], 2, 10, packing=True) == [[[]], [[]]]
    assert plan_micro_batches([], 2, 10, packing=False) == [[[]], [[]]]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, but a micro-batch holds 1 to 10.*at least 12"):
        plan_micro_batches([3, 11, 12], 2, 10, packing=True)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        plan_micro_batches([0], 2, 10, packing=False)
    with pytest.raises(ValueError, match="num_ranks=0"):
        plan_micro_batches([1], 0, 10, packing=True)


def random_cases():
    generator = random.Random(0)
    for case in range(150):
        max_tokens = generator.choice([50, 64, 1000])
        longest = generator.choice([max_tokens, max_tokens // 2, max(1, max_tokens // 10)])
        lengths = [generator.randint(1, longest) for _ in range(generator.randint(0, 80))]
        yield lengths, generator.choice([1, 2, 3, 8]), max_tokens, case % 2 == 0, generator.choice([1, 8])


@pytest.mark.parametrize("lengths, num_ranks, max_tokens, packing, multiple", list(random_cases()))
def test_plan_properties(lengths, num_ranks, max_tokens, packing, multiple):
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, packing, multiple)
    assert len(plan) == num_ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1 and len(plan[0]) >= 1
    rows = [row for micro_batches in plan for rows in micro_batches for row in rows]
    assert all(rows) and sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    for j in range(len(plan[0])):
        together = [plan[rank][j] for rank in range(num_ranks)]
        for rows in together:
            longest = max((sum(lengths[i] for i in row) for row in rows), default=0)
            assert len(rows) * longest <= max_tokens
            assert len(rows) <= 1 if packing else all(len(row) == 1 for row in rows)
        if not packing:
            # what the trainer allocates, unless one row alone is rounded up beyond max_tokens
            num_rows = max(len(rows) for rows in together)
            assert num_rows * row_length(plan, lengths, multiple, j) <= max_tokens or num_rows == 1
    assert plan == plan_micro_batches(list(lengths), num_ranks, max_tokens, packing, multiple)

    # Balance. Packed: when a row got its last sequence it was the emptiest, so it exceeds any other by at most that
    # sequence. Ranks get neighbours in fullness in every turn, so their sums differ by at most the same once more.
    longest = max(lengths, default=0)
    if packing:
        loads = [sum(lengths[i] for row in rows for i in row) for micro_batches in plan for rows in micro_batches]
        assert max(loads) - min(loads) <= longest
        per_rank = [sum(lengths[i] for rows in micro_batches for row in rows for i in row) for micro_batches in plan]
        assert max(per_rank) - min(per_rank) <= longest
        # if greedy does not fit, every row was more than half full, so one more micro-batch than that always suffices
        fewest = math.ceil(sum(lengths) / (num_ranks * max_tokens))
        assert fewest <= len(plan[0]) <= 2 * sum(lengths) // (num_ranks * max_tokens) + 1
    else:
        for j in range(len(plan[0])):
            counts = [len(plan[rank][j]) for rank in range(num_ranks)]
            assert max(counts) - min(counts) <= 1


def test_similar_sequences_are_balanced_closely():
    # a step like a real one: 256 sequences of 130 to 1150 tokens, 4 ranks, rows of 16384
    generator = random.Random(1)
    lengths = [generator.randint(130, 1150) for _ in range(256)]
    plan = plan_micro_batches(lengths, 4, 16384, packing=True)
    loads = [sum(lengths[i] for row in rows for i in row) for micro_batches in plan for rows in micro_batches]
    assert len(plan[0]) == math.ceil(sum(lengths) / (4 * 16384))
    assert max(loads) <= 1.01 * min(loads)


def test_row_length_is_shared_and_rounded():
    lengths = [4, 7, 3, 6]
    plan = [[[[0], [2]]], [[[1, 3]]]]
    assert row_length(plan, lengths, 1) == 13 and row_length(plan, lengths, 8) == 16
    assert row_length([[[]], [[]]], [], 8) == 8
    plan = [[[[1]], [[0], [2]]], [[[3]], []]]
    assert [row_length(plan, lengths, 1, j) for j in (0, 1)] == [7, 4]


def test_micro_batch_by_hand():
    # prompt + completion: sequence 0 is 1 2 + 3, sequence 1 is 4 + 5 6, sequence 2 is 7 8 + 9 10
    batch = make_batch([2, 1, 2], [1, 2, 2])
    micro = build_micro_batch(batch, [[2, 0], [1]], row_length=9, pad_id=99)
    assert micro.tokens_BT.tolist() == [[7, 8, 9, 10, 1, 2, 3, 99, 99], [4, 5, 6, 99, 99, 99, 99, 99, 99]]
    assert micro.targets_BT.tolist() == [[8, 9, 10, 0, 2, 3, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4, 5]]
    mask = [[0, 1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert micro.completion_mask_BT.dtype == torch.bool and micro.completion_mask_BT.int().tolist() == mask
    assert micro.sequence_BT.tolist() == [[2, 2, 2, 2, 0, 0, 0, -1, -1], [1, 1, 1, -1, -1, -1, -1, -1, -1]]
    assert micro.temperatures_BT.eq(1).all()  # where nothing else is said
    assert micro.num_tokens == 10
    assert all(
        t.dtype == torch.int64 for t in (micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.sequence_BT)
    )

    # sequences' log-probs are 0; -1 -2; -3 -4, each at the position before its token
    values_BT = scatter_completions(batch.generator_logprobs_C, batch, micro)
    assert values_BT.tolist() == [[0, -3, -4, 0, 0, 0, 0, 0, 0], [-1, -2, 0, 0, 0, 0, 0, 0, 0]]
    assert per_sequence(torch.tensor([10.0, 20.0, 30.0]), micro).tolist() == [
        [30, 30, 30, 30, 10, 10, 10, 0, 0],
        [20, 20, 20, 0, 0, 0, 0, 0, 0],
    ]


def test_pad_id_may_equal_a_real_token():
    batch = make_batch([1], [2])
    micro = build_micro_batch(batch, [[0]], row_length=5, pad_id=3)
    assert micro.tokens_BT.tolist() == [[1, 2, 3, 3, 3]]
    assert micro.completion_mask_BT.tolist() == [[True, True, False, False, False]] and micro.num_tokens == 3


def test_empty_micro_batch_is_one_row_of_padding():
    batch = make_batch([2], [1])
    micro = build_micro_batch(batch, [], row_length=4, pad_id=9)
    assert micro.tokens_BT.tolist() == [[9, 9, 9, 9]] and micro.positions_BT.tolist() == [[0, 1, 2, 3]]
    assert micro.num_tokens == 0 and not micro.completion_mask_BT.any()
    assert scatter_completions(batch.generator_logprobs_C, batch, micro).tolist() == [[0.0] * 4]
    index_M, values_M = gather_completions(torch.ones(1, 4), batch, micro)
    assert len(index_M) == 0 and len(values_M) == 0
    assert per_sequence(torch.tensor([math.nan]), micro).tolist() == [[0.0] * 4]


def test_positions_of_padding_restart_before_they_exceed_the_models():
    # 3 tokens and 297 of padding: documents of 128, 128 and 41; an empty row of 300: 128, 128 and 44
    assert PAD_DOCUMENT == 128
    batch = make_batch([1], [2])
    for rows, lengths in [([[0]], [3, 128, 128, 41]), ([], [128, 128, 44])]:
        micro = build_micro_batch(batch, rows, row_length=300)
        assert micro.positions_BT.tolist() == [[t for length in lengths for t in range(length)]]


def test_build_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="row 0 has 7 tokens, but row_length=6"):
        build_micro_batch(make_batch([2, 2], [1, 2]), [[0, 1]], row_length=6)
    with pytest.raises(ValueError, match="sequence 0 has a prompt of 0 tokens"):
        build_micro_batch(make_batch([0], [1]), [[0]], row_length=6)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_ranks, max_tokens", [(1, 1000), (2, 40), (3, 25)])
def test_values_go_in_and_out_in_batch_order(packing, num_ranks, max_tokens):
    generator = random.Random(max_tokens)
    completion_lengths = [generator.randint(1, 15) for _ in range(20)]
    batch = make_batch([generator.randint(1, 10) for _ in range(20)], completion_lengths)
    batch = dataclasses.replace(batch, temperatures_S=torch.linspace(0.5, 1.5, 20))
    lengths = batch.lengths_S.tolist()
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, packing)
    values_C = torch.arange(1, sum(completion_lengths) + 1, dtype=torch.float32)
    completion_ids_C = torch.cat(
        [ids[p:] for ids, p in zip(batch.ids_N.split(lengths), batch.prompt_lengths_S.tolist(), strict=True)]
    )
    back_C, ids_C = torch.zeros_like(values_C), torch.zeros_like(completion_ids_C)
    for rows in itertools.chain.from_iterable(plan):
        micro = build_micro_batch(batch, rows, row_length(plan, lengths, 8))
        values_BT = scatter_completions(values_C, batch, micro)
        assert (values_BT > 0).equal(micro.completion_mask_BT)
        index_M, values_M = gather_completions(values_BT, batch, micro)
        assert (back_C[index_M] == 0).all()
        back_C[index_M] = values_M
        ids_C[index_M] = gather_completions(micro.targets_BT, batch, micro)[1]
        # each position knows its sequence's temperature, padding has 1
        assert micro.temperatures_BT.equal(per_sequence(batch.temperatures_S, micro).where(micro.sequence_BT >= 0, 1))
    assert back_C.equal(values_C) and ids_C.equal(completion_ids_C)


def test_mini_batches_are_whole_groups_in_order():
    # sequence s has prompt s+1 tokens and completion s+1 tokens; 3 groups of 2 in 2 parts: 1 group, then 2
    batch = make_batch([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    batch = dataclasses.replace(
        batch, advantages_S=torch.arange(6.0), ref_logprobs_C=torch.arange(21.0), temperatures_S=torch.arange(6.0) + 1
    )
    first, second = split_groups(batch, group_size=2, num_parts=2)
    assert first.advantages_S.tolist() == [0, 1] and second.advantages_S.tolist() == [2, 3, 4, 5]
    assert first.temperatures_S.tolist() == [1, 2]
    assert first.ref_logprobs_C.tolist() == [0, 1, 2] and second.ref_logprobs_C.tolist() == list(range(3, 21))
    assert first.prompt_lengths_S.tolist() == [1, 2] and second.completion_lengths_S.tolist() == [3, 4, 5, 6]
    assert torch.cat([first.ids_N, second.ids_N]).equal(batch.ids_N)
    assert first.old_logprobs_C is None
    assert len(split_groups(batch, group_size=2, num_parts=5)) == 3  # no part is empty
    with pytest.raises(ValueError, match="6 sequences are not whole groups of 4"):
        split_groups(batch, group_size=4, num_parts=1)


def test_what_counts():
    # completions of 2, 1 and 3 tokens; the second sequence has no reward, the third a sampling log-prob that is -inf
    batch = dataclasses.replace(
        make_batch([1, 1, 1], [2, 1, 3]),
        advantages_S=torch.tensor([1.0, torch.nan, 0.0]),
        generator_logprobs_C=torch.tensor([-1.0, -2.0, -3.0, -4.0, -torch.inf, -6.0]),
    )
    assert batch.counted_C.tolist() == [True, True, False, True, False, True]
    assert batch.counted_lengths_S.tolist() == [2, 0, 2]
    bare = make_batch([1, 1, 1], [2, 1, 3])
    bare = dataclasses.replace(bare, generator_logprobs_C=None)
    assert bare.counted_C.all() and bare.counted_lengths_S.tolist() == [2, 1, 3]
