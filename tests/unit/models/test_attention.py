"""Attention within documents; the kernels of flash attention are in test_shared_prompts.py."""

import grpo.models  # noqa: F401  before torchtitan, whose device it sets

# isort: split

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import CompileConfig
from torchtitan.models.common.attention import FlexAttention, create_varlen_metadata_for_document

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models import attention, build
from grpo.models.attention import ATTENTIONS, DocumentAttention, DocumentMasks, choose_attention
from grpo.models.families import titan_config
from tests import plain_attention
from tests.rollouts import sequence
from tests.tiny_models import make_tiny
from tests.unit.algorithm.test_updates import trainer_of

LENGTHS = [[3, 4, 1], [5, 3]]  # of the documents of two rows of 8 tokens


def masks_of(lengths):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return DocumentMasks(*create_varlen_metadata_for_document(positions)[:4], shared=None)


@pytest.mark.parametrize(
    ("window", "keys", "moved"),
    [
        # a change in one document moves no output of another; a document's first token sees itself alone
        (None, [(0, 3), (0, 4), (0, 5), (0, 6)], [[0, 4], [0, 5], [0, 6]]),
        # a key moves the outputs of its own token and of the next one, within its document
        (2, [(0, 1), (0, 6), (1, 0), (1, 3)], [[0, 1], [0, 2], [0, 6], [1, 1], [1, 3], [1, 4]]),
    ],
)
def test_documents_are_apart_and_windows_hide_what_lies_further_away(window, keys, moved):
    attention = DocumentAttention(DocumentAttention.Config())
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, heads, 16) for heads in (4, 2, 2))
    masks = masks_of(LENGTHS)._replace(window=window)
    before = attention(q, k, v, attention_masks=masks, enable_gqa=True)
    for row, place in keys:
        k[row, place] += 1
    after = attention(q, k, v, attention_masks=masks, enable_gqa=True)
    assert (before != after).any(-1).any(-1).nonzero().tolist() == moved
    if window is None:
        document = [x[1:, :5].transpose(1, 2) for x in (q, k, v)]
        whole = F.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(after[1:, :5], whole.transpose(1, 2), atol=2e-6, rtol=0)


def test_a_cpu_takes_documents_and_refuses_flash():
    cpu = torch.device("cpu")
    assert choose_attention(ModelConfig(), cpu) == "documents"
    assert choose_attention(ModelConfig(attention="flex"), cpu) == "flex"
    with pytest.raises(ValueError, match="needs a GPU such as H100 or B200"):
        choose_attention(ModelConfig(attention="flash"), cpu)


def test_flex_attention_is_compiled_without_timing_many_kernels():
    """By itself as within compiled blocks, where torch compiles the same function as a part of the block."""
    module = ATTENTIONS["flex"].Config().build()
    options = FlexAttention._compiled_flex_attn.get_compiler_config()
    assert not options["max_autotune"] and not options["coordinate_descent_tuning"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    document_T = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    rule = lambda b, h, query, key: (query >= key) & (document_T[query] == document_T[key])  # noqa: E731
    mask = create_block_mask(rule, 1, None, 8, 8, device="cpu")
    block = torch.compile(module, backend="eager", fullgraph=True)
    found = block(q, k, v, attention_masks=mask, enable_gqa=True)
    documents = DocumentAttention(DocumentAttention.Config())
    expected = documents(q, k, v, attention_masks=masks_of([[3, 4, 1]]), enable_gqa=True)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "recomputed", "num_compiled"),
    [("flash", "none", 1), ("flash", "selective", 1), ("flash", "full", 1), ("documents", "none", 0)],
)
def test_blocks_are_compiled_once_for_rows_of_any_length(tmp_path, monkeypatch, kind, recomputed, num_compiled):
    """The first length is no other than the next ones, also behind FSDP's hooks, which make other tensors of rows.

    Blocks with plain attention, which torch cannot compile, are not compiled; on a GPU a run may ask for it too.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(attention, "kernels", lambda: (plain_attention.forward, plain_attention.backward))
    monkeypatch.setattr(build, "choose_attention", lambda *of: kind)
    monkeypatch.setattr(build, "compiles", lambda *of: True)
    monkeypatch.setattr(build, "CompileConfig", partial(CompileConfig, backend=counter))
    monkeypatch.setattr(build, "titan_config", lambda *of: titan_config(*of[:3], False, of[4]))  # its LM head is not
    options = {"micro_batch_tokens": 128, "activation_checkpointing": recomputed, "compile": TrainerConfig().compile}
    trainer = trainer_of(make_tiny(tmp_path, "qwen3-tied"), **options)
    for lengths in ([64, 60], [50, 30], [9, 9], [40, 40, 16]):
        samples = [sequence(torch.arange(n) % 8, torch.arange(n) > 3, prompt_tokens=4) for n in lengths]
        trainer.forward_backward(make_batch(samples), lambda _, found_BT, __: (found_BT.sum(), {}), StepMetrics(1))
    assert counter.frame_count == num_compiled
