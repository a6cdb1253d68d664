"""Prompts that are laid out once for several sequences change no number of a model."""

import random

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

from grpo.data.layout import plan
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
from grpo.types import TrainBatch
from tests import plain_attention
from tests.rows import one_row
from tests.unit.data.test_layout import batch_of

torch.set_num_threads(1)


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
    for micro in plan(batch, 1, 256, 128, shares).micro_batches(0):
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
    micro = one_row(batch, multiple=200)
    values = [torch.randn(1, 200, heads, 64, requires_grad=True) for heads in (9, 3, 3)]
    masks = document_masks(micro)
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(20):
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
    # rows of many sequences, of two, of one, and two of padding
    for num_ranks, rank in [(2, 0), (2, 1), (5, 0), (5, 4), (11, 0), (11, 5), (11, 9), (11, 10)]:
        (micro,) = plan(batch, num_ranks, 60, 200, shares).micro_batches(rank)
        values = [torch.randn(1, 200, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
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
    micro = one_row(batch, multiple=40)
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
