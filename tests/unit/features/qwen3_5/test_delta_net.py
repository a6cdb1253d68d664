"""Gated delta nets against the recurrence, token by token in float64; what a model with them cannot do here."""

import collections
import types

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.config import GeneratorConfig, TrainerConfig
from grpo.config.engine_options import argument_names
from grpo.data.batches import make_batch
from grpo.features.qwen3_5.delta_net import CHUNK_TOKENS, causal_convolution, document_chunks, gated_delta_rule
from grpo.metrics import StepMetrics
from grpo.models.hf_folder import check_lengths, check_trainer, read_hf_config
from grpo.models.lora import adapted_paths
from grpo.roles.engine.vllm_engine import check_engine, options_of_model
from tests.rollouts import sequence
from tests.tiny_models import make_tiny
from tests.unit.algorithm.test_updates import trainer_of

# Not in the order in which they are computed; below, at and above the ends of chunks
LENGTHS = [3, CHUNK_TOKENS + 1, 1, 3 * CHUNK_TOKENS, CHUNK_TOKENS, 2 * CHUNK_TOKENS - 1]


def chunks_of(lengths):
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    positions_BT = torch.cat([torch.arange(length) for length in lengths])[None]
    facts = {"document_starts": starts, "positions_BT": positions_BT, "longest_document": max(lengths)}
    micro = types.SimpleNamespace(**facts, shared=None)
    return document_chunks(micro)


def recurrence(q, k, v, g, beta):
    """The rule of one document [T, N, ..], as its paper writes it (arXiv:2412.06464, equation 10)."""
    state = q.new_zeros(q.shape[1], k.shape[2], v.shape[2])
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        held = torch.einsum("nkv,nk->nv", state, k[t])
        written = beta[t][:, None] * (v[t] - held)
        state = state + torch.einsum("nk,nv->nkv", k[t], written)
        outputs.append(torch.einsum("nkv,nk->nv", state, q[t]))
    return torch.stack(outputs)


def test_the_rule_in_chunks_is_the_recurrence_of_each_document_with_its_gradients():
    draw = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)

    def random(*shape):
        return torch.randn(num_tokens, 2, *shape, generator=draw, dtype=torch.float64)

    q, k, v = random(4), F.normalize(random(4), dim=-1), random(3)
    inputs = [q, k, v, -F.softplus(random()), random().sigmoid()]
    weights = random(3)
    wanted = [x.clone().requires_grad_() for x in inputs]
    documents = zip(*(x.split(LENGTHS) for x in wanted), strict=True)
    expected = torch.cat([recurrence(*document) for document in documents])
    (expected * weights).sum().backward()
    got = [x.clone().requires_grad_() for x in inputs]
    out = gated_delta_rule(*got, chunks_of(LENGTHS))
    (out * weights).sum().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)


def test_a_convolution_sees_nothing_of_the_document_before():
    x = torch.tensor([[1.0], [10], [100], [1000], [2], [20]])  # documents of 4 and 2 tokens
    weight = torch.tensor([[4.0, 3, 2]])  # the last one is for the token itself
    out = causal_convolution(x, weight, chunks_of([4, 2]).offset_T)
    # 2 x 1; 2 x 10 + 3 x 1; 2 x 100 + 3 x 10 + 4 x 1; ..; 2 x 2; 2 x 20 + 3 x 2
    assert out.flatten().tolist() == [2, 23, 234, 2340, 4, 46]


def test_what_is_refused_has_a_remedy(tmp_path):
    folder = make_tiny(tmp_path, "qwen3_5")
    hf = read_hf_config(folder)
    quantized = GeneratorConfig(engine={"quantization": "fp8"})
    for remedy, call in {
        "tensor_parallel=2 must be 1": lambda: check_lengths(folder, hf, 64, 2),
        "needs trainer.context_parallel=1: its gated delta nets": lambda: check_trainer(
            folder, hf, TrainerConfig(context_parallel=2)
        ),
        "expert_parallel to divide its 0 experts, not 2": lambda: check_trainer(
            folder, hf, TrainerConfig(expert_parallel=2)
        ),
        "lora_rank=4: .*leave it out": lambda: adapted_paths(hf, TrainerConfig(lora_rank=4)),
        "quantization .*leave it out": lambda: check_engine(quantized, hf, on_gpu=False),
        "needs a GPU.*SFT without evaluation": lambda: check_engine(GeneratorConfig(), hf, on_gpu=False),
    }.items():
        with pytest.raises(ValueError, match=remedy):
            call()


def test_an_engine_on_a_gpu_keeps_states_in_float32_whatever_the_folder_says(tmp_path):
    """transformers writes no `mamba_ssm_dtype`; without it vLLM would round the states of each token to bfloat16."""
    hf = read_hf_config(make_tiny(tmp_path, "qwen3_5"))
    options = options_of_model(hf, {}, torch.device("cuda"))
    assert options["mamba_ssm_cache_dtype"] == "float32"
    assert {*options} <= {*argument_names("vllm/engine/arg_utils.py", "EngineArgs")}


class Products(TorchDispatchMode):
    """Counts batched products, which only the rule has, and those of linear layers."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **kwargs or {})


@pytest.mark.usefixtures("one_rank")
def test_selective_checkpointing_keeps_linear_layers_and_computes_the_rule_again(tmp_path):
    """On an H200 the rule's products took 12 GiB of 16,384 tokens in the shape of 0.8B."""
    folder = make_tiny(tmp_path, "qwen3_5")
    batch = make_batch([sequence(torch.arange(40) % 8, torch.arange(40) > 3, prompt_tokens=4)])
    found = {}
    for kind in ("none", "selective", "full"):
        trainer = trainer_of(folder, micro_batch_tokens=128, activation_checkpointing=kind)
        with Products() as products:
            trainer.forward_backward(batch, lambda _, found_BT, __: (found_BT.sum(), {}), StepMetrics(1))
        found[kind] = [products.counts[op.default] for op in (torch.ops.aten.bmm, torch.ops.aten.mm)]
    (_, none_mm), (bmm, mm), (full_bmm, full_mm) = found.values()
    assert found["none"][0] < bmm == full_bmm
    assert none_mm < mm < full_mm
