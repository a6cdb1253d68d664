"""The ids that top_p, top_k and min_p kept stay with their tokens, from the engine's steps to a mini-batch."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from grpo.data.batches import make_batch, sample_of, split_groups
from grpo.data.layout import plan
from grpo.data.recorded import RecordedStep, read_step, save_step
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.run.groups import join
from grpo.types import Completion, Piece, Prompt
from tests.rollouts import rewarded

GROUP_SIZE = 3


def piece_of(draw: random.Random, version: int, num_tokens: int) -> Piece:
    """Sampled tokens, each of which was chosen from itself and the tokens before it in the piece."""
    ids = [draw.randrange(1000) for _ in range(num_tokens)]
    kept = [np.array([*ids[: t + 1], -1], dtype=np.int32) for t in range(num_tokens)]
    return Piece.sampled(torch.tensor(ids).long(), torch.zeros(num_tokens), version, kept)


def completion_of(draw: random.Random, index: int) -> Completion:
    """Some pieces: continued by other weights or the same, with something written in between, or all lost."""
    if draw.random() < 0.1:
        return Completion((Piece.nothing(),), False, index=index)
    pieces = [piece_of(draw, 0, draw.randint(1, 9))]
    if draw.random() < 0.5:
        written_T = torch.tensor([7] * draw.randint(1, 4))
        pieces += [Piece(written_T, written_T < 0), piece_of(draw, 0, draw.randint(1, 9))]
    begun = Completion(tuple(pieces), False, index=index, ended=False)
    further = Completion((piece_of(draw, draw.randint(0, 1), draw.randint(1, 9)),), False, index=index)
    return join(begun, further, index) if draw.random() < 0.5 else dataclasses.replace(begun, ended=True)


def expected(completion: Completion) -> list[list[int]]:
    """For each token of a completion the ids that it was chosen from, piece by piece as `piece_of` made them."""
    found = []
    for piece in completion.pieces:
        ends = (piece.kept_C < 0).nonzero()[:, 0] + 1
        parts = piece.kept_C.tensor_split(ends)[:-1] if piece.num_tokens else ()
        found += [part[:-1].tolist() for part in parts] or [[] for _ in range(piece.num_tokens)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_token_keeps_its_own_ids_from_the_engine_to_a_mini_batch(tmp_path, seed):
    """Over the wire, into a step, a file and mini-batches; test_layout follows them into rows."""
    draw = random.Random(seed)
    completions = [completion_of(draw, index) for index in range(5 * GROUP_SIZE)]
    prompts = [Prompt(place, [draw.randrange(1000) for _ in range(draw.randint(1, 6))]) for place in range(5)]
    wanted: list[list[list[int]]] = []
    for index, completion in enumerate(completions):
        wanted.append([[] for _ in prompts[index // GROUP_SIZE].ids] + expected(completion))
    completions = unflatten_completions(flatten_completions(completions))
    samples = [sample_of(prompts[index // GROUP_SIZE], completion) for index, completion in enumerate(completions)]
    batch = make_batch(samples)
    batch = rewarded(batch, torch.zeros(batch.num_rollouts))
    save_step(tmp_path, 1, RecordedStep(batch, GROUP_SIZE, {}))
    for mini_batch in split_groups(read_step(str(tmp_path), 1).batch, GROUP_SIZE, 2):
        found = [[] for _ in range(mini_batch.num_tokens)]
        for token, kept in zip(mini_batch.token_C.tolist(), mini_batch.kept_C.tolist(), strict=True):
            found[token] += [kept] if kept >= 0 else []
        assert found == sum((wanted[sequence] for sequence in mini_batch.sequence_S.tolist()), [])


def test_nothing_is_carried_if_every_id_was_kept():
    completion = Completion.of(torch.tensor([5, 6]), torch.zeros(2), False)
    batch = make_batch([sample_of(Prompt(0, [1]), c) for c in unflatten_completions(flatten_completions([completion]))])
    assert batch.kept_C is None
    (micro,) = plan(batch, 1, 64).micro_batches(0)
    assert micro.kept is None
