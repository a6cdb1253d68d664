"""Prompts that are laid out once for several sequences: rows by hand, plans, and that nothing else changes."""

import dataclasses
import random

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

from grpo.data.batches import build_micro_batch, make_batch, split_groups, take_out
from grpo.data.packing import pack
from grpo.data.shared_prompts import repeated_prompts, row_tokens
from grpo.models import attention
from grpo.models.attention import (
    DocumentAttention,
    FlashAttention,
    document_masks,
    for_compiler,
    shared_prompt_mask,
    window_mask,
)
from grpo.models.families import titan_config
from grpo.types import MicroBatch, Sample, TrainBatch
from tests import plain_attention

torch.set_num_threads(1)


def batch_of(*groups: tuple[list[int], list[int]]) -> TrainBatch:
    """Groups of (prompt, lengths of its completions); a completion's ids begin at 100, 200, ..; all of it counts."""
    samples = []
    for prompt, lengths in groups:
        for length in lengths:
            ids_T = torch.tensor([*prompt, *range(100 * len(samples) + 100, 100 * len(samples) + 100 + length)])
            counts_T = torch.arange(len(ids_T)) >= len(prompt)
            samples.append(Sample(ids_T, counts_T, -ids_T.float(), prompt_tokens=len(prompt)))
    return make_batch(samples)


def test_a_row_by_hand():
    batch = batch_of(([1, 2, 3], [2, 1]), ([7, 8], [1]))
    micro = build_micro_batch(batch, [[0, 1, 2]], row_length=12, prompts=repeated_prompts(batch))
    #                             prompt  completions      other    padding
    assert micro.ids_BT.tolist() == [[1, 2, 3, 100, 101, 3, 200, 7, 8, 300, 0, 0]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1]]
    assert micro.targets_BT.tolist() == [[2, 3, 100, 101, 0, 200, 0, 8, 300, 0, 0, 0]]
    assert micro.loss_mask_BT.int().tolist() == [[0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0]]
    assert micro.sequence_BT.tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, -1, -1]]
    assert micro.generator_logprobs_BT[micro.loss_mask_BT].tolist() == [-100, -101, -200, -300]
    assert micro.document_starts.tolist() == [0, 2, 5, 7, 10, 12] and micro.longest_document == 3
    shared = micro.shared
    assert shared.keys_K.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]
    assert shared.key_starts.tolist() == [0, 2, 7, 11, 14, 16] and shared.longest == 5
    assert shared.own_T.tolist() == [0, 1, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15]
    assert shared.reused_R.tolist() == [0, 1] and shared.uses_RU.tolist() == [[0, 2, 7], [1, 3, 8]]
    index_M, ids_M = take_out(micro.targets_BT, micro)
    assert torch.equal(batch.ids_N[index_M], ids_M)
    # the first token of each sequence, and the second sequence's prompt
    assert set(range(batch.num_tokens)) - set(index_M.tolist()) == {0, 5, 6, 7, 9}


def test_what_is_shared():
    same, other = [1, 2, 3], [1, 2, 4]
    assert repeated_prompts(batch_of((same, [1, 1]), (other, [1]), (same, [2]))) == ([0, 0, 2, 0], [2, 2, 2, 2])
    assert repeated_prompts(batch_of((same, [1]), (other, [1]))) is None  # every prompt once
    ending = [7, 8, 9, 1, 2, 3]  # as of all chats: prompts of one length with one ending are not the same prompt
    assert repeated_prompts(batch_of(([4, *ending], [1]), ([5, *ending], [1]))) is None
    assert repeated_prompts(batch_of(([1], [1, 1]))) is None  # its only token predicts
    batch = batch_of((same, [1, 1]))
    assert repeated_prompts(dataclasses.replace(batch, prompt_lengths_S=None)) is None
    with pytest.raises(ValueError, match="sequence 1 has a token that counts in the loss within its prompt"):
        repeated_prompts(dataclasses.replace(batch, loss_mask_N=batch.loss_mask_N | (torch.arange(8) == 6)))
    second = split_groups(batch_of((other, [1, 1]), (same, [2, 2])), group_size=2, num_parts=2)[1]
    assert repeated_prompts(second) == ([0, 0], [2, 2])


def test_only_neighbours_share():
    batch = batch_of(([1, 2, 3], [1, 1]), ([4, 5], [1]))
    micro = build_micro_batch(batch, [[0, 2, 1]], row_length=11, prompts=repeated_prompts(batch))
    assert micro.ids_BT.tolist() == [[1, 2, 3, 100, 4, 5, 300, 1, 2, 3, 200]]
    assert micro.shared.keys_K.tolist() == list(range(11))
    assert (micro.shared.uses_RU >= 0).sum() == 2  # nothing is reused: two places of one use, for the compiler's sake


def test_plan_by_hand():
    # 4 prompts of 10 tokens (9 to share) with 4 completions of 10 each: 9 + 4 * 11 = 53 tokens a group, whole 80
    batch = batch_of(*(([i] * 10, [10] * 4) for i in range(4)))
    packing = pack(batch, 1, 110)
    assert packing.rows == [[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]] and packing.row_length == 106
    assert packing.metrics() == {"packing/padding_frac": 0, "packing/shared_frac": 1 - 212 / 320}
    assert len(pack(batch, 1, 110, share_prompts=False).rows[0]) == 4
    # over three ranks two groups are cut, and their prompts laid out twice
    packing, lengths = pack(batch, 3, 110), batch.lengths_S.tolist()
    rows = [row for of_rank in packing.rows for row in of_rank]
    assert sorted(row_tokens(row, lengths, packing.prompts) for row in rows) == [53, 84, 84]  # of 4, 6 and 6


def random_batches():
    draw = random.Random(0)
    for _ in range(60):
        num_groups, size = draw.randint(1, 12), draw.randint(1, 9)
        longest = draw.choice([5, 60])
        groups = [
            ([draw.randint(1, 9) for _ in range(draw.randint(1, 30))], [draw.randint(1, longest) for _ in range(size)])
            for _ in range(num_groups)
        ]
        yield batch_of(*groups), draw.choice([1, 2, 3]), draw.choice([90, 128, 500]), draw.choice([1, 16])


@pytest.mark.parametrize("batch, num_ranks, max_tokens, multiple", list(random_batches()))
def test_properties_of_packings(batch, num_ranks, max_tokens, multiple):
    """Every sequence once, rows within their limit, never more positions than without sharing; every token in place."""
    packing, lengths = pack(batch, num_ranks, max_tokens, multiple), batch.lengths_S.tolist()
    assert packing.rows == pack(batch, num_ranks, max_tokens, multiple).rows
    assert len({len(rows) for rows in packing.rows}) == 1
    rows = [row for of_rank in packing.rows for row in of_rank]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row_tokens(row, lengths, packing.prompts) <= max_tokens for row in rows)
    whole = pack(batch, num_ranks, max_tokens, multiple, share_prompts=False)
    assert len(packing.rows[0]) * packing.row_length <= len(whole.rows[0]) * whole.row_length
    counted = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for rank in range(num_ranks):
        for micro in packing.micro_batches(rank):
            check_keys(micro, batch)
            index_M, ids_M = take_out(micro.targets_BT, micro)
            assert torch.equal(ids_M, batch.ids_N[index_M])
            counted[micro.token_BT[micro.loss_mask_BT]] += 1
    assert torch.equal(counted, batch.loss_mask_N.long())


def check_keys(micro: MicroBatch, batch: TrainBatch) -> None:
    """Each position attends to its sequence up to itself, found by ids and positions; gradients come back once each."""
    if (shared := micro.shared) is None:
        return
    ids, positions = micro.ids_BT.flatten(), micro.positions_BT.flatten()
    sequences = batch.ids_N.split(batch.lengths_S.tolist())
    starts, key_starts = micro.document_starts.tolist(), shared.key_starts.tolist()
    for d, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        keys = shared.keys_K[key_starts[d] : key_starts[d + 1]]
        assert positions[keys].tolist() == list(range(len(keys)))
        assert keys[len(keys) - (end - start) :].tolist() == list(range(start, end))
        if (owner := int(micro.sequence_BT.flatten()[start])) >= 0:  # not padding
            assert torch.equal(ids[keys], sequences[owner][: len(keys)])
    uses = torch.zeros(len(shared.keys_K), dtype=torch.int64)
    kept = torch.ones(len(ids), dtype=torch.bool)
    kept[shared.reused_R] = False
    places = torch.cat([shared.own_T[kept], shared.uses_RU[shared.uses_RU >= 0]])
    assert torch.equal(uses.index_add_(0, places, torch.ones_like(places)), torch.ones_like(uses))
    for place, row in zip(shared.reused_R.tolist(), shared.uses_RU, strict=True):
        assert all(shared.keys_K[row[row >= 0]] == place)


@pytest.fixture(params=[("documents", None), ("documents", 9), ("flash", None), ("flash", 9)])
def model(request, monkeypatch):
    """A model of two layers with a kind of attention, and a window."""
    kind, window = request.param
    monkeypatch.setattr(attention, "kernels", lambda: (plain_attention.forward, plain_attention.backward))
    sizes = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    hf = transformers.AutoConfig.for_model("mistral", **sizes, **heads, sliding_window=window)
    torch.manual_seed(0)
    model = titan_config(hf, kind, 64).build()
    model.init_weights(buffer_device=None)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    return model


def results(model, batch: TrainBatch, shares: bool, weights_N: torch.Tensor):
    """Log-probs and entropy of what counts, and the gradients of their weighted sum."""
    found_2N = torch.zeros(2, batch.num_tokens)
    model.zero_grad()
    for micro in pack(batch, 1, 256, 128, shares).micro_batches(0):
        counts, index_M = micro.loss_mask_BT, micro.token_BT[micro.loss_mask_BT]
        values_2 = model(micro)
        sum((value[counts] * weights_N[index_M]).sum() for value in values_2).backward()
        for found_N, value in zip(found_2N, values_2, strict=True):
            found_N[index_M] = value[counts].detach()
    return found_2N, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_sharing_changes_no_number(model):
    """Log-probs, entropy and gradients, of several groups over several rows, some cut."""
    draw = random.Random(1)
    prompts = [[draw.randrange(2048) for _ in range(n)] for n in (40, 3, 17, 60, 1)]
    batch = batch_of(*((prompt, [draw.randint(1, 25) for _ in range(4)]) for prompt in prompts))
    weights_N = torch.randn(batch.num_tokens)
    wanted_2N, gradients = results(model, batch, False, weights_N)
    found_2N, found_gradients = results(model, batch, True, weights_N)
    assert wanted_2N[0].count_nonzero() == batch.loss_mask_N.sum()
    torch.testing.assert_close(found_2N, wanted_2N, atol=2e-5, rtol=0)
    for name, wanted in gradients.items():
        torch.testing.assert_close(found_gradients[name], wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def test_threads_of_a_cpu_add_the_gradients_of_shared_keys_in_one_order():
    """As a resumed run and a replay need it. The order of their sums must not depend on which thread is first."""
    batch = batch_of(([1] * 60, [14] * 8))
    micro = build_micro_batch(batch, [[*range(8)]], row_length=200, prompts=repeated_prompts(batch))
    values = [torch.randn(1, 200, heads, 64, requires_grad=True) for heads in (9, 3, 3)]
    masks = document_masks(micro)
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(40):
            out = DocumentAttention(None)(*values, attention_masks=masks, enable_gqa=True)
            gradients.append(torch.cat([x.flatten() for x in torch.autograd.grad(out.sin().sum(), values)]))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shares", [False, True])
def test_flash_attention_is_compiled_once_and_right(monkeypatch, shares, window):
    """Not the number of documents, prompts or completions is compiled in, nor a length, nor if a row has any to share.

    Its kernels, plain ones here, get documents and give gradients back as plain attention does.
    """
    torch.compiler.reset()
    monkeypatch.setattr(attention, "kernels", lambda: (plain_attention.forward, plain_attention.backward))
    counter = CompileCounterWithBackend("aot_eager")
    plain, flash = DocumentAttention(None), FlashAttention(FlashAttention.Config())
    compiled = torch.compile(flash, backend=counter, fullgraph=True)
    batch = batch_of(([1] * 5, [3, 9]), ([2] * 4, [7, 1, 5, 2]), ([3] * 9, [6]), ([4] * 2, [8, 4]))
    for rows in ([[0, 1], []], [[0, 1, 2], [3, 4]], [[2, 3, 4, 5, 6], [7, 8]], [[6], [0]], [[], []]):
        micro = build_micro_batch(batch, rows, row_length=60, prompts=repeated_prompts(batch) if shares else None)
        values = [torch.randn(2, 60, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
        found, wanted = (
            [out, *torch.autograd.grad(out.sin().sum(), values)]
            for out in (
                compiled(*values, attention_masks=for_compiler(document_masks(micro, window))),
                plain(*values, attention_masks=document_masks(micro, window), enable_gqa=True),
            )
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=5e-6, rtol=0)
    assert counter.frame_count == 1


def test_what_flex_attention_sees():
    """Its mask shows each query what the keys of its document are for the others; its kernels do not run here."""
    batch = batch_of(([1, 2, 3], [2, 1, 3]), ([7, 8], [1]), ([4, 5], [2, 2]))
    micro = build_micro_batch(batch, [[0, 1, 2, 3, 4, 5]], row_length=40, prompts=repeated_prompts(batch))
    places = torch.arange(40)
    seen = shared_prompt_mask(micro)(None, None, places[:, None], places) & (places <= places[:, None])
    near = seen & window_mask(micro.positions_BT, 2)(0, None, places[:, None], places)
    starts, key_starts, keys = micro.document_starts.tolist(), micro.shared.key_starts.tolist(), micro.shared.keys_K
    for d, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        own = keys[key_starts[d] : key_starts[d + 1]]
        for query in range(start, end):
            before = [key for key in own.tolist() if key <= query]
            assert seen[query].nonzero().flatten().tolist() == before
            assert near[query].nonzero().flatten().tolist() == before[-2:]
