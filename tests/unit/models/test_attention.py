"""Attention within documents; the kernels of flash attention are in test_shared_prompts.py."""

import grpo.models  # noqa: F401  before torchtitan, whose device it sets

# isort: split

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torchtitan.config import CompileConfig
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.models import attention, build
from grpo.models.attention import DocumentAttention, DocumentMasks, choose_attention
from grpo.models.families import titan_config
from grpo.roles.trainer import Trainer
from grpo.types import Sample
from tests import plain_attention
from tests.tiny_models import make_tiny

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
    layers = dict.fromkeys("01", lambda hidden, masks, positions: given.append(masks))
    parts = dict.fromkeys(("tok_embeddings", "norm", "lm_head"), lambda *of: None) | {"layers": layers}
    model._modules.update(parts)
    model(None, None, positions, {None: masks}, None, None)
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


def test_a_window_hides_what_lies_further_away():
    """A key moves the outputs of its own token and of the next one, within its document; a first token's own, none."""
    attention = DocumentAttention(DocumentAttention.Config())
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, heads, 16) for heads in (4, 2, 2))
    masks = masks_of(LENGTHS)._replace(window=2)
    before = attention(q, k, v, attention_masks=masks, enable_gqa=True)
    k[0, [1, 6]] += 1
    k[1, [0, 3]] += 1
    after = attention(q, k, v, attention_masks=masks, enable_gqa=True)
    moved = (before != after).any(-1).any(-1)
    assert moved.nonzero().tolist() == [[0, 1], [0, 2], [0, 6], [1, 1], [1, 3], [1, 4]]


def test_a_cpu_takes_documents_and_refuses_flash():
    cpu = torch.device("cpu")
    assert choose_attention(ModelConfig(), cpu) == "documents"
    assert choose_attention(ModelConfig(attention="flex"), cpu) == "flex"
    with pytest.raises(ValueError, match="needs a GPU such as H100 or B200"):
        choose_attention(ModelConfig(attention="flash"), cpu)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_blocks_are_compiled_once_for_rows_of_any_length(tmp_path, monkeypatch, recomputed):
    """The first length is no other than the next ones, also behind FSDP's hooks, which make other tensors of rows."""
    torch.compiler.reset()
    counter, roles = CompileCounterWithBackend("eager"), SimpleNamespace(device=torch.device("cpu"), is_driver=False)
    monkeypatch.setattr(attention, "kernels", lambda: (plain_attention.forward, plain_attention.backward))
    monkeypatch.setattr(build, "choose_attention", lambda *of: "flash")
    monkeypatch.setattr(build, "compiles", lambda *of: True)
    monkeypatch.setattr(build, "CompileConfig", partial(CompileConfig, backend=counter))
    monkeypatch.setattr(build, "titan_config", lambda *of: titan_config(*of[:3], False, of[4]))  # its LM head is not
    options = TrainerConfig(micro_batch_tokens=128, activation_checkpointing=recomputed)
    trainer = Trainer(ModelConfig(dtype="float32"), options, make_tiny(tmp_path, "qwen3-tied"), 1, roles)
    for lengths in ([64, 60], [50, 30], [9, 9], [40, 40, 16]):
        samples = [Sample(torch.arange(n) % 8, torch.arange(n) > 3, prompt_tokens=4) for n in lengths]
        trainer.forward_backward(make_batch(samples), lambda _, found_BT, __: (found_BT.sum(), {}), StepMetrics(1))
    assert counter.frame_count == 1
