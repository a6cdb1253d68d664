"""The ids that top_p, top_k and min_p kept stay with their tokens, from the engine's steps to the LM head."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from grpo.algorithm.importance import kl
from grpo.data.batches import make_batch, sample_of, split_groups
from grpo.data.layout import plan
from grpo.data.recorded import RecordedStep, read_step, save_step
from grpo.roles.comm import flatten_completions, unflatten_completions
from grpo.run.groups import join
from grpo.types import Completion, Piece, Prompt

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


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_loss_token_is_scored_over_its_own_ids(tmp_path, seed, shares):
    """Over the wire, into a step, a file, mini-batches and packed rows of two ranks, with tokens that do not count."""
    draw = random.Random(seed)
    completions = [completion_of(draw, index) for index in range(5 * GROUP_SIZE)]
    kept = [expected(completion) for completion in completions]
    assert {*map(len, sum(kept, []))} >= set(range(8))
    completions = unflatten_completions(flatten_completions(completions))
    prompts = [Prompt(place, [draw.randrange(1000) for _ in range(draw.randint(1, 6))]) for place in range(5)]
    samples = [sample_of(prompts[index // GROUP_SIZE], completion) for index, completion in enumerate(completions)]
    batch = make_batch(samples)
    batch = dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N & (torch.rand(batch.num_tokens) < 0.7))
    none_S = torch.zeros(batch.num_sequences)
    save_step(tmp_path, 1, RecordedStep(batch, none_S, none_S > 0, none_S[None].clone(), GROUP_SIZE, {}))
    batch = read_step(str(tmp_path), 1).batch
    num_seen = 0
    for mini_batch in split_groups(batch, GROUP_SIZE, 2):
        layout = plan(mini_batch, 2, 64, 16, shares)
        for micro in (micro for rank in range(2) for micro in layout.micro_batches(rank)):
            found = [[] for _ in micro.scored_M]
            for place, token in zip(micro.kept.place_C.tolist(), micro.kept.ids_C.tolist(), strict=True):
                found[place].append(token)
            for place, ids in zip(micro.scored_M.tolist(), found, strict=True):
                if micro.loss_mask_BT.flatten()[place]:
                    index = int(micro.token_BT.flatten()[place])
                    sequence = int(mini_batch.owner_N[index])
                    at = index - int(mini_batch.starts_S[sequence]) - int(mini_batch.prompt_lengths_S[sequence])
                    assert ids == kept[int(mini_batch.sequence_S[sequence])][at]
                    assert ids[-1] == micro.targets_BT.flatten()[place]
                    num_seen += 1
    assert num_seen == batch.loss_mask_N.sum() > 50


def test_nothing_is_carried_if_every_id_was_kept():
    completion = Completion.of(torch.tensor([5, 6]), torch.zeros(2), False)
    batch = make_batch([sample_of(Prompt(0, [1]), c) for c in unflatten_completions(flatten_completions([completion]))])
    assert batch.kept_C is None
    (micro,) = plan(batch, 1, 64).micro_batches(0)
    assert micro.kept is None


@pytest.mark.parametrize("top_p", [0.5, 0.8, 0.95])
def test_over_the_ids_that_were_kept_kl_is_unbiased_and_0_for_equal_policies(top_p):
    """Exact sums over the samples, that is over the kept ids S: k1 and k3 give KL(policy over S || reference over S).

    With the reference over all ids, k3 of a policy that did not move is above 0, by -log of what S holds of it - 1 +
    that, and so its gradient is not 0; k1 would be -log of it.
    """
    torch.manual_seed(0)
    log_policy_V, log_reference_V = torch.randn(2, 50, dtype=torch.float64).mul(1.5).log_softmax(-1)
    order = log_policy_V.argsort(descending=True)
    is_kept_V = torch.zeros(50, dtype=torch.bool)
    is_kept_V[order[: int((log_policy_V[order].exp().cumsum(0) < top_p).sum()) + 1]] = True
    policy, reference = (log_V[is_kept_V].log_softmax(-1) for log_V in (log_policy_V, log_reference_V))
    truth = (policy.exp() * (policy - reference)).sum().item()
    for estimator in ("k1", "k3"):
        assert (policy.exp() * kl(policy - reference, estimator)).sum().item() == pytest.approx(truth)
        assert kl(policy - policy, estimator).abs().max() == 0
    mass = log_policy_V[is_kept_V].exp().sum()
    whole = (policy.exp() * kl(policy - log_policy_V[is_kept_V], "k3")).sum()
    assert whole.item() == pytest.approx((mass - 1 - mass.log()).item()) and whole > 0
