"""Attention within documents; the kernels of flash attention are in test_shared_prompts.py."""

import grpo.models  # noqa: F401  before torchtitan, whose device it sets

# isort: split

import pytest
import torch
import torch.nn.functional as F
import transformers
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from grpo.config import ModelConfig
from grpo.models.attention import DocumentAttention, DocumentMasks, choose_attention
from grpo.models.families import titan_config

LENGTHS = [[3, 4, 1], [5, 3]]  # of the documents of two rows of 8 tokens


def masks_of(lengths):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return DocumentMasks(*create_varlen_metadata_for_document(positions)[:4], shared=None)


def test_the_longest_length_becomes_a_tensor_behind_fsdp():
    """Which would move it to the GPU with all other tensors that a forward is given."""
    hf = transformers.AutoConfig.for_model("qwen3", vocab_size=8, hidden_size=16, num_hidden_layers=2)
    config = titan_config(hf, "flash", 4)
    with torch.device("meta"):
        model = config.build()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    masks, given = masks_of([[3, 4, 1]]), []
    assert type(masks.max_q) is int and masks.max_q == 4
    layers = {"0": lambda hidden, masks, positions: given.append(masks)}
    parts = dict.fromkeys(("tok_embeddings", "norm", "lm_head"), lambda *of: None) | {"layers": layers}
    model._modules.update(parts)
    model(None, None, positions, masks, None, None)
    assert given[0].max_q.device.type == "cpu" and given[0].max_q == 4


def test_documents_are_apart():
    """A change in one document moves no output of another."""
    attention = DocumentAttention(DocumentAttention.Config())
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, heads, 16) for heads in (4, 2, 2))
    before = attention(q, k, v, attention_masks=masks_of(LENGTHS), enable_gqa=True)
    k[0, 3:7] += 1
    after = attention(q, k, v, attention_masks=masks_of(LENGTHS), enable_gqa=True)
    moved = (before != after).any(-1).any(-1)
    assert moved.nonzero().tolist() == [[0, 4], [0, 5], [0, 6]]  # a document's first token sees itself alone
    whole = F.scaled_dot_product_attention(
        *(x[1:, :5].transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(after[1:, :5], whole.transpose(1, 2), atol=2e-6, rtol=0)


def test_a_cpu_takes_documents_and_refuses_flash():
    cpu = torch.device("cpu")
    assert choose_attention(ModelConfig(), cpu) == "documents"
    assert choose_attention(ModelConfig(attention="flex"), cpu) == "flex"
    with pytest.raises(ValueError, match="needs a GPU such as H100 or B200"):
        choose_attention(ModelConfig(attention="flash"), cpu)
