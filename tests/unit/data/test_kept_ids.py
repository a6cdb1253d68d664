"""The ids that top_p, top_k and min_p kept stay with their tokens, from the engine's steps to a mini-batch."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from grpo.data.batches import make_batch, split_groups
from grpo.data.recorded import RecordedStep, save_step
from grpo.tools.recorded import read_step
from grpo.types import Piece, Prompt, Rollout
from tests.rollouts import completion, conversation, over_the_wire, rewarded

GROUP_SIZE = 3


def piece_of(draw: random.Random, version: int, num_tokens: int) -> Piece:
    """Sampled tokens, each of which was chosen from itself and the tokens before it in the piece; some were cut off."""
    ids = [draw.randrange(1000) for _ in range(num_tokens + draw.randint(0, 2))]
    kept = [np.array([*ids[: t + 1], -1], dtype=np.int32) for t in range(len(ids))]
    return Piece.sampled(ids, [0.0] * len(ids), version, kept).first(num_tokens)


def rollout_of(draw: random.Random, prompt: Prompt, index: int) -> Rollout:
    """Some pieces: continued by other weights or the same, with something written in between, or all lost."""
    if draw.random() < 0.1:
        return completion([], prompt=prompt, index=index)
    pieces = [piece_of(draw, 0, draw.randint(1, 9))]
    if draw.random() < 0.5:
        pieces += [Piece.written([7] * draw.randint(1, 4)), piece_of(draw, 0, draw.randint(1, 9))]
    begun = conversation(pieces, prompt, index, ended_by="")
    further = conversation([piece_of(draw, draw.randint(0, 1), draw.randint(1, 9))], prompt, index)
    return begun.go_on(further) if draw.random() < 0.5 else dataclasses.replace(begun, ended_by="stop")


def expected(rollout: Rollout) -> list[list[int]]:
    """For each token behind a prompt the ids that it was chosen from, piece by piece as `piece_of` made them."""
    found = []
    for piece in rollout.behind:
        ends = (piece.kept_C < 0).nonzero()[:, 0] + 1
        parts = piece.kept_C.tensor_split(ends)[:-1] if piece.num_tokens else ()
        found += [part[:-1].tolist() for part in parts] or [[] for _ in range(piece.num_tokens)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_token_keeps_its_own_ids_from_the_engine_to_a_mini_batch(tmp_path, seed):
    """Over the wire, into a step, a file and mini-batches; test_layout follows them into rows."""
    draw = random.Random(seed)
    prompts = [Prompt(place, [draw.randrange(1000) for _ in range(draw.randint(1, 6))]) for place in range(5)]
    rollouts = [rollout_of(draw, prompts[index // GROUP_SIZE], index) for index in range(5 * GROUP_SIZE)]
    wanted = [[[] for _ in rollout.prompt.ids] + expected(rollout) for rollout in rollouts]
    batch = make_batch(over_the_wire(rollouts))
    batch = rewarded(batch, torch.zeros(batch.num_rollouts))
    save_step(tmp_path, 1, RecordedStep(batch, GROUP_SIZE, {}))
    for mini_batch in split_groups(read_step(str(tmp_path), 1).batch, GROUP_SIZE, 2):
        found = [[] for _ in range(mini_batch.num_tokens)]
        for token, kept in zip(mini_batch.token_C.tolist(), mini_batch.kept_C.tolist(), strict=True):
            found[token] += [kept] if kept >= 0 else []
        assert found == sum((wanted[sequence] for sequence in mini_batch.sequence_S.tolist()), [])
