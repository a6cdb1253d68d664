"""An adapter by hand: forward, merged weight, adapters off, the numbers A starts with."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torchtitan.models.common import Linear

from grpo.config import TrainerConfig
from grpo.models import export
from grpo.models.lora import LoRALinear, adapters_off, draw_uniform, merged_weight


@pytest.fixture
def layer() -> LoRALinear:
    """W = [[1, 2], [3, 4]] in bfloat16, A = [[1, 0]], B = [[0], [2]], alpha / rank = 3."""
    base = Linear.Config(in_features=2, out_features=2, param_init={"weight": torch.nn.init.zeros_}).build()
    base.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(), requires_grad=False)
    layer = LoRALinear(base, "layers.0.attention.wo", TrainerConfig(lora_rank=1, lora_alpha=3.0), seed=0)
    with torch.no_grad():
        layer.lora_a.copy_(torch.tensor([[1.0, 0.0]]))
        layer.lora_b.copy_(torch.tensor([[0.0], [2.0]]))
    return layer


def test_forward_with_and_without_the_adapter(layer):
    """x = [1, 10]: W x = [21, 43]; A x = 1, B A x = [0, 2], times 3. Compiled once each, without breaks."""
    layer.weight = torch.nn.Parameter(layer.weight.float(), requires_grad=False)
    counter, x = CompileCounter(), torch.tensor([1.0, 10.0])
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for forward in (layer, compiled, compiled):
        assert forward(x).tolist() == [21, 49]
        with pytest.raises(KeyError), adapters_off(layer):
            assert forward(x).tolist() == [21, 43]
            raise KeyError
        assert forward(x).tolist() == [21, 49]
    assert counter.frame_count == 2


def test_merged_in_float32_and_rounded_once(layer):
    """W + 3 B A = [[1, 2], [9, 4]]; then with a B that bfloat16 would round."""
    assert merged_weight(layer, torch.float32).tolist() == [[1, 2], [9, 4]]
    with torch.no_grad():
        layer.lora_b[1] = 2 + 1 / 96  # bfloat16 has 2 and 2 + 1/64 there
    merged = merged_weight(layer, torch.float32)
    assert merged[1, 0].item() == pytest.approx(9 + 1 / 32)
    assert merged_weight(layer, torch.bfloat16).dtype == torch.bfloat16


def test_a_starts_with_the_same_numbers_everywhere(layer):
    """Uniform within 1 / sqrt(inputs), another sample for each layer and seed."""
    first, same, other = torch.empty(4, 1000), torch.empty(4, 1000), torch.empty(4, 1000)
    for values, seed in ((first, 1), (same, 1), (other, 2)):
        draw_uniform(values, bound=0.5, seed=seed)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.abs().max() <= 0.5 and first.mean().abs() < 0.02
    assert first.std().item() == pytest.approx(1 / 12**0.5, rel=0.02)  # of a range of 1


def test_gradients_in_bfloat16_and_compiled():
    """Against float64, within what bfloat16 rounds; compiled the same to the last digit."""
    torch.manual_seed(0)
    base = Linear.Config(in_features=32, out_features=48, param_init={"weight": torch.nn.init.zeros_}).build()
    base.weight = torch.nn.Parameter(torch.randn(48, 32).bfloat16(), requires_grad=False)
    layer = LoRALinear(base, "layers.0.attention.wo", TrainerConfig(lora_rank=4, lora_alpha=8.0), seed=0)
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    x = torch.randn(2, 5, 32).bfloat16().requires_grad_()

    def results(function):
        y = function(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, layer.lora_a, layer.lora_b))]

    found = results(layer)
    exact = [value.detach().double().requires_grad_() for value in (x, layer.lora_a, layer.lora_b)]
    y = exact[0] @ (layer.weight.double() + 2 * exact[2] @ exact[1]).T
    for one, wanted in zip(found, [y, *torch.autograd.grad(y.square().sum(), exact)], strict=True):
        assert (one.double() - wanted).norm() < 0.01 * wanted.norm()
    for one, other in zip(found, results(torch.compile(layer, backend="aot_eager", fullgraph=True)), strict=True):
        assert torch.equal(one, other)


def test_peft_gets_the_name_of_the_base_and_its_revision(layer, tmp_path, monkeypatch):
    """PEFT takes NAME@REVISION for a name of the hub. A folder may have an @ in its path."""
    names = SimpleNamespace(to_hf=lambda layers: {"model.layers.0.self_attn.o_proj.weight": layer})
    monkeypatch.setattr(export.dist, "get_rank", lambda: 0)
    folder = tmp_path / "me@here"
    folder.mkdir()
    bases = {
        "owner/base@v2": ("owner/base", "v2"),
        "owner/base": ("owner/base", None),
        str(folder): (str(folder), None),
    }
    for base, expected in bases.items():
        export.export_adapters(SimpleNamespace(module=layer, name=base, names=names), tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == expected
