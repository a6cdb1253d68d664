"""Rows against a plain writing of what they must hold, plans that can be checked by hand, and how even rows are."""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
import torch

from grpo.data.batches import make_batch
from grpo.data.layout import Layout, PackedRow, plan, take_out
from grpo.types import MicroBatch, TrainBatch
from tests.rollouts import sequence
from tests.rows import one_row

torch.set_num_threads(1)


def batch_of(*groups: tuple[list[int], list[int]]) -> TrainBatch:
    """Groups of (prompt, lengths of its completions); a completion's ids begin at 100, 200, ..; all of it counts."""
    samples = []
    for prompt, lengths in groups:
        for length in lengths:
            first = 100 * len(samples) + 100
            ids_T = torch.tensor([*prompt, *range(first, first + length)])
            counts_T = torch.arange(len(ids_T)) >= len(prompt)
            samples.append(sequence(ids_T, counts_T, -ids_T.float(), prompt_tokens=len(prompt)))
    return make_batch(samples)


def of_lengths(*lengths: int) -> TrainBatch:
    """Sequences without prompts, as of SFT; all tokens except the first count."""
    return make_batch([sequence(torch.ones(n).long(), torch.arange(n) > 0) for n in lengths])


# ---- What a row holds ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Place:
    """A position of a row, written plainly."""

    sequence: int = -1
    position: int = 0
    keys: tuple[int, ...] = ()
    """Places that its document attends to, as far as they are not behind it."""
    begins: bool = False
    """A document begins here."""


def plain_row(batch: TrainBatch, sequences: list[int], row_length: int) -> list[Place]:
    """What a row of these sequences must hold, place by place. Neighbours with one prompt have it once."""
    lengths = batch.lengths_S.tolist()
    prompts = [ids[:n].tolist() for ids, n in zip(batch.ids_N.split(lengths), batch.prompt_lengths_S, strict=True)]
    places: list[Place] = []
    shared: tuple[int, ...] = ()

    def write(sequence: int, begin: int, end: int, keys: tuple[int, ...] = ()) -> tuple[int, ...]:
        for position in range(begin, end):
            keys += (len(places),)
            places.append(Place(sequence, position, keys, begins=position == begin))
        return keys

    for prompt, neighbours in itertools.groupby(sequences, key=prompts.__getitem__):
        neighbours = [*neighbours]
        num_shared = len(prompt) - 1 if len(neighbours) > 1 and len(prompt) > 1 else 0
        shared = write(neighbours[0], 0, num_shared)
        for index in neighbours:
            write(index, num_shared, lengths[index], shared)
    while len(places) < row_length:  # padding, in documents of 128
        write(-1, 0, min(128, row_length - len(places)))
    return places


def sequences_of(row: PackedRow) -> list[int]:
    return [sequence for sequence, _ in itertools.groupby(document.sequence for document in row.documents)]


def check_row(micro: MicroBatch, batch: TrainBatch, places: list[Place]) -> None:
    """Each field of a micro-batch is what the plain row says."""
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    own = [starts[p.sequence] + p.position if p.sequence >= 0 else -1 for p in places]
    token = [n + 1 if n >= 0 and p.position + 1 < lengths[p.sequence] else -1 for p, n in zip(places, own, strict=True)]

    def at(indices: list[int], values: torch.Tensor | None, elsewhere: float = 0) -> torch.Tensor | None:
        if values is None:
            return None
        found = values.tolist()
        return torch.tensor([[found[i] if i >= 0 else elsewhere for i in indices]], dtype=values.dtype)

    sequence = [p.sequence for p in places]
    wanted = {name.replace("_N", "_BT"): at(token, values_N) for name, values_N in batch.per_token.items()}
    wanted["targets_BT"] = wanted["ids_BT"]
    wanted |= {"ids_BT": at(own, batch.ids_N), "token_BT": torch.tensor([token])}
    wanted |= {"positions_BT": torch.tensor([[p.position for p in places]])}
    wanted |= {"sequence_BT": at(sequence, batch.sequence_S, -1)}
    wanted |= {"temperatures_BT": at(sequence, batch.temperatures_S, 1)}
    wanted |= {"num_loss_tokens_BT": at(sequence, batch.num_loss_tokens_S).clamp(min=1)}
    wanted |= {"num_rollout_tokens_BT": at(sequence, batch.num_rollout_tokens_S).clamp(min=1)}
    assert wanted.keys() == {name for name in vars(micro) if name.endswith("_BT")}
    for name, values_BT in wanted.items():
        torch.testing.assert_close(getattr(micro, name), values_BT, atol=0, rtol=0, msg=name)

    starts = [t for t, place in enumerate(places) if place.begins] + [len(places)]
    assert micro.document_starts.tolist() == starts
    assert micro.longest_document == max(end - start for start, end in itertools.pairwise(starts))
    if micro.shared is None:
        assert all(len(place.keys) == place.position + 1 for place in places)  # their documents are whole sequences
        return
    keys_K, key_starts = micro.shared.keys_K.tolist(), micro.shared.key_starts.tolist()
    wanted_keys = [places[end - 1].keys for end in starts[1:]]
    assert [tuple(keys_K[a:b]) for a, b in itertools.pairwise(key_starts)] == wanted_keys
    assert micro.shared.longest == max(map(len, wanted_keys))
    # what comes back for the keys of the documents reaches each place once: its own, or all its uses
    reused = micro.shared.reused_Q.tolist()
    uses = {place: [k for k in row.tolist() if k >= 0] for place, row in zip(reused, micro.shared.uses_QU, strict=True)}
    wanted_uses: dict[int, list[int]] = {}
    for k, place in enumerate(keys_K):
        wanted_uses.setdefault(place, []).append(k)
    for place, wanted_of_place in wanted_uses.items():
        own = micro.shared.own_T[place].item()
        assert uses.get(place, [own]) == wanted_of_place and own == wanted_of_place[0]


def random_batch(draw: random.Random) -> TrainBatch:
    """Groups whose prompts are few ids, so that some are the same; SFT; turns, kept ids, tokens that do not count."""
    is_sft, with_kept, with_turns = (draw.random() < share for share in (0.2, 0.4, 0.3))
    longest = draw.choice([4, 40, 120])
    samples = []
    kept = []
    for _ in range(draw.randint(1, 8)):
        prompt = draw.choices(range(3), k=draw.choice([1, 2, 3, 30]))
        for _ in range(draw.randint(1, 6)):
            if draw.random() < 0.1:  # an environment wrote another prompt
                prompt = draw.choices(range(3), k=draw.randint(1, 30))
            ids = prompt + draw.choices(range(9), k=draw.randint(1, longest))
            counts = [t >= len(prompt) and draw.random() < 0.8 for t in range(len(ids))]
            for t in range(len(ids)):
                kept += [*draw.choices(range(9), k=draw.randint(1, 3) if t >= len(prompt) else 0), -1]
            facts = {"temperature": draw.choice([0.7, 1.0])}
            if not is_sft:
                facts |= {"logprobs_T": -torch.rand(len(ids)), "prompt_tokens": len(prompt)}
            samples.append(sequence(torch.tensor(ids), torch.tensor(counts), **facts))
    batch = make_batch(samples)
    if with_kept and not is_sft:
        batch = dataclasses.replace(batch, kept_C=torch.tensor(kept).int())
    if with_turns and not is_sft:
        turn_N = torch.randint(0, 3, (batch.num_tokens,))
        batch = dataclasses.replace(batch, turn_N=turn_N, earned_N=torch.rand(batch.num_tokens))
    if draw.random() < 0.5:
        batch = dataclasses.replace(batch, advantages_N=torch.randn(batch.num_tokens))
    return batch


def random_layout(draw: random.Random) -> Layout:
    batch = random_batch(draw)
    max_tokens = max(int(batch.lengths_S.max()), draw.choice([0, 90, 157, 500]))
    arguments = (batch, draw.choice([1, 2, 3]), max_tokens, draw.choice([1, 3, 16, 150]))
    num_stretches = draw.choice([1, 1, 2, 3])
    layout = plan(*arguments, share_prompts=draw.random() < 0.8, num_stretches=num_stretches)
    whole = plan(*arguments, share_prompts=False, num_stretches=num_stretches)
    assert len(layout.rows[0]) * layout.row_length <= len(whole.rows[0]) * whole.row_length
    assert all(row.num_tokens <= max_tokens for rows in layout.rows for row in rows)
    return layout


@pytest.mark.parametrize("seed", range(60))
def test_rows_hold_what_a_plain_writing_of_them_holds(seed):
    """All fields of all ranks; each sequence in one row; what counts is scored in one stretch, over its kept ids."""
    torch.manual_seed(seed)
    layout = random_layout(random.Random(seed))
    batch, width = layout.batch, layout.row_length // layout.num_stretches
    assert layout.row_length % (layout.multiple * layout.num_stretches) == 0
    assert len({len(rows) for rows in layout.rows}) == 1
    seen, scored, kept = [], Counter(), Counter()
    for (rank, rows), stretch in itertools.product(enumerate(layout.rows), range(layout.num_stretches)):
        for row, micro in zip(rows, layout.micro_batches(rank, stretch), strict=True):
            sequences = sequences_of(row)
            if layout.shares_prompts:
                check_row(micro, batch, plain_row(batch, sequences, layout.row_length))
            else:
                alone = dataclasses.replace(batch, prompt_lengths_S=torch.zeros_like(batch.lengths_S))
                check_row(micro, batch, plain_row(alone, sequences, layout.row_length))
            seen += sequences if stretch == 0 else []
            # the places that count, and the first others up to the multiple
            counts = micro.loss_mask_BT[0].split(width)[stretch]
            num_others = len(micro.scored_M) - int(counts.sum())
            others = (~counts).nonzero()[:num_others, 0]
            assert micro.scored_M.tolist() == sorted([*counts.nonzero()[:, 0].tolist(), *others.tolist()])
            assert len(micro.scored_M) % layout.multiple == 0
            assert num_others == layout.multiple if not counts.any() else num_others < layout.multiple
            tokens_M = micro.token_BT[0, micro.scored_M + stretch * width]
            scored.update(tokens_M[counts[micro.scored_M]].tolist())
            if micro.kept:
                kept.update(zip(tokens_M[micro.kept.place_C].tolist(), micro.kept.ids_C.tolist(), strict=True))
            index_L, ids_L = take_out(micro.targets_BT, micro)
            assert torch.equal(batch.ids_N[index_L], ids_L)
    assert sorted(seen) == list(range(batch.num_sequences))
    assert scored == Counter(batch.loss_mask_N.nonzero()[:, 0].tolist())
    if batch.kept_C is not None:
        pairs = zip(batch.token_C.tolist(), batch.kept_C.tolist(), strict=True)
        wanted = Counter((token, id_) for token, id_ in pairs if id_ >= 0 and batch.loss_mask_N[token])
        assert Counter({pair: n for pair, n in kept.items() if batch.loss_mask_N[pair[0]]}) == wanted


def test_a_row_by_hand():
    micro = one_row(batch_of(([1, 2, 3], [2, 1]), ([7, 8], [1])), multiple=12)
    #                             prompt  completions      other    padding
    assert micro.ids_BT.tolist() == [[1, 2, 3, 100, 101, 3, 200, 7, 8, 300, 0, 0]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1]]
    assert micro.shared.keys_K.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]


# ---- Which sequences share a row -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "max_tokens", "rows"),
    [
        # 20 tokens into 2 ranks x 10: longest first, each into the emptiest: 7+3 and 6+4
        ([4, 7, 3, 6], 2, 10, [[[1, 2]], [[3, 0]]]),
        # three sequences of 6 need three rows; 2 ranks then run 2 each
        ([6, 6, 6], 2, 10, [[[0], []], [[1], [2]]]),
        # best fit: into the emptiest of two rows of 6: 3 | 3, then 3 + 2 | 3 + 2, and no room for the last 2
        ([3, 3, 2, 2, 2], 1, 6, [[[0, 1], [2, 3, 4]]]),
        ([5], 3, 10, [[[0]], [[]], [[]]]),  # fewer sequences than ranks
    ],
)
def test_rows_by_hand(lengths, num_ranks, max_tokens, rows):
    layout = plan(of_lengths(*lengths), num_ranks, max_tokens)
    assert [[sequences_of(row) for row in of_rank] for of_rank in layout.rows] == rows


def test_row_length_and_padding_by_hand():
    # rows of 10 and 10, rounded up to 12: 20 of 24 positions hold a token
    layout = plan(of_lengths(4, 7, 3, 6), 2, 10, multiple=4)
    assert layout.row_length == 12 and layout.metrics() == {"packing/padding_frac": pytest.approx(4 / 24)}
    # 4 prompts of 10 tokens (9 to share) with 4 completions of 10 each: 9 + 4 * 11 = 53 tokens a group, whole 80
    layout = plan(batch_of(*(([i] * 10, [10] * 4) for i in range(4))), 1, 110)
    assert [sequences_of(row) for row in layout.rows[0]] == [[*range(8)], [*range(8, 16)]] and layout.row_length == 106
    assert layout.metrics() == {"packing/padding_frac": 0, "packing/shared_frac": 1 - 212 / 320}


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        (of_lengths(3, 11, 12), "sequence 1 has 11 tokens, but a micro-batch holds 1 to 10.* to at least 12"),
        (of_lengths(3, 0), "sequence 1 has 0 tokens"),
        (make_batch([sequence(torch.ones(2).long(), torch.ones(2).bool())]), "sequence 0 .* a prompt needs at least 1"),
        (
            make_batch([sequence(torch.ones(3).long(), torch.arange(3) > 0, prompt_tokens=2)]),
            "sequence 0 begins with 2 tokens",
        ),
    ],
)
def test_what_no_row_can_hold_is_refused(batch, word):
    with pytest.raises(ValueError, match=word):
        plan(batch, 2, 10)


def overflows_into_emptiest(lengths: list[int], num_rows: int, max_tokens: int) -> bool:
    """Whether a row outgrows `max_tokens` if each sequence, the longest first, goes into the emptiest of the rows."""
    loads = [0] * num_rows
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return max(loads) > max_tokens


def test_rows_are_few_and_even():
    draw = random.Random(0)
    for _ in range(100):
        max_tokens, num_ranks = draw.choice([50, 64, 1000]), draw.choice([1, 2, 3, 8])
        longest = draw.choice([max_tokens, max_tokens // 2, max(1, max_tokens // 10)])
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 80))]
        rows = plan(of_lengths(*lengths), num_ranks, max_tokens).rows
        loads = [row.num_tokens for of_rank in rows for row in of_rank]
        assert max(loads) <= max_tokens
        # where even rows fit, a row exceeds any other by at most the sequence that it got last, and so does a rank
        if not overflows_into_emptiest(lengths, len(loads), max_tokens):
            assert max(loads) - min(loads) <= max(lengths)
        if len(rows[0]) > 1:  # with one row less per rank, even rows would not do
            assert overflows_into_emptiest(lengths, len(loads) - num_ranks, max_tokens)
        # if greedy does not fit, every row was more than half full, so one more micro-batch than that always suffices
        fewest = math.ceil(sum(lengths) / (num_ranks * max_tokens))
        assert fewest <= len(rows[0]) <= 2 * sum(lengths) // (num_ranks * max_tokens) + 1
