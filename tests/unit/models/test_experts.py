"""A mixture of experts: a router that is told the experts of a token, a folder in and out, layers without adapters."""

import json
import pathlib

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from grpo.config import ModelConfig, TrainerConfig
from grpo.data.batches import make_batch
from grpo.models.build import ShardedModel, build_model
from grpo.models.experts import FREE, Router
from grpo.models.export import export_hf, hf_tensors
from grpo.models.hf_folder import read_hf_config
from grpo.models.lora import adapted_places
from grpo.types import MicroBatch, Sample
from tests.tiny_models import QWEN3_MOE, make_tiny, tensors_of

pytestmark = pytest.mark.usefixtures("one_rank")
TOKENS, LAYERS = 25, 2
EXPERTS, CHOSEN = QWEN3_MOE["num_experts"], QWEN3_MOE["num_experts_per_tok"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny(tmp_path_factory.mktemp("moe"), "moe")


def model_and_batch(folder: str, checkpointing: str) -> tuple[ShardedModel, MicroBatch]:
    """The model in float32, and one row: a sequence of TOKENS tokens, and padding."""
    trainer = TrainerConfig(activation_checkpointing=checkpointing, compile=False, micro_batch_tokens=64)
    model = build_model(ModelConfig(dtype="float32"), trainer, folder, device=torch.device("cpu"), tensor_parallel=1)
    ids = torch.randint(3, 32, (TOKENS,), generator=torch.Generator().manual_seed(1))
    batch = make_batch([Sample(ids, torch.arange(TOKENS) > 0, prompt_tokens=1, temperature=1.0)])
    ((micro, _),) = model.micro_batches(model.pack(batch, trainer))
    return model, micro


def run(model: ShardedModel, micro: MicroBatch, routes_BTLE: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Log-probs, and gradients of their sum under Hugging Face's names."""
    masks = model.module.masks(micro)
    inputs = micro.ids_BT, micro.targets_BT, micro.positions_BT, masks, micro.temperatures_BT, micro.scored_M
    logprobs_BT, _ = model.module(*inputs, routes_BTLE)
    logprobs_T = logprobs_BT[0, : TOKENS - 1]
    logprobs_T.sum().backward()
    model.drop_copy()
    weights = [parameter.detach().clone() for parameter in model.module.parameters()]
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(parameter.grad)
        gradients = dict(hf_tensors(model, torch.float32))
        for parameter, weight in zip(model.module.parameters(), weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
    return gradients | {"log-probs": logprobs_T.detach()}


def routers(model: ShardedModel) -> list[Router]:
    return [part for part in model.module.modules() if isinstance(part, Router)]


@pytest.mark.parametrize("checkpointing, forwards", [("none", 1), ("full", 2)])
def test_told_its_own_choice_nothing_changes(folder: str, checkpointing: str, forwards: int):
    """To the last bit, in whatever order the experts are named; and what is told is counted, where it differs too."""
    model, micro = model_and_batch(folder, checkpointing)
    chosen = []
    hooks = [router.register_forward_hook(lambda *of: chosen.append(of[-1][1])) for router in routers(model)]
    expected = run(model, micro)
    for hook in hooks:
        hook.remove()
    assert all(router.told_2.tolist() == [0, 0] for router in routers(model))
    routes_BTLE = torch.stack(chosen[:LAYERS], dim=2).flip(-1).byte()
    found = run(model, micro, routes_BTLE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    num_tokens = micro.ids_BT.numel()
    assert all(router.told_2.tolist() == [0, forwards * num_tokens] for router in routers(model))
    routes_BTLE[0, 3:5, 1] = FREE  # two tokens choose themselves in the second layer
    routes_BTLE[0, 7, 1] = (routes_BTLE[0, 7, 1] + 1) % EXPERTS  # another set of two
    run(model, micro, routes_BTLE)
    first, second = (router.told_2 / forwards for router in routers(model))
    assert first.tolist() == [0, 2 * num_tokens] and second.tolist() == [1, 2 * num_tokens - 2]


def test_told_other_experts_it_equals_transformers(folder: str, monkeypatch: pytest.MonkeyPatch):
    """With experts drawn at random for two tokens of three: log-probs and all gradients, those of the gates too."""
    generator = torch.Generator().manual_seed(2)
    routes_TLE = torch.rand(TOKENS, LAYERS, EXPERTS, generator=generator).topk(CHOSEN).indices
    routes_TLE[::3] = FREE

    model, micro = model_and_batch(folder, "none")
    padding = micro.ids_BT.shape[1] - TOKENS
    found = run(model, micro, F.pad(routes_TLE.byte(), (0, 0, 0, 0, 0, padding), value=FREE)[None])

    def told(self: Qwen3MoeTopKRouter, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores_TX = (hidden_TD.reshape(TOKENS, -1) @ self.weight.T).softmax(-1)
        mine_TE = routes_TLE[:, self.layer]
        experts_TE = torch.where(mine_TE == FREE, scores_TX.topk(CHOSEN).indices, mine_TE)
        scores_TE = scores_TX.gather(1, experts_TE)
        return scores_TX, scores_TE / scores_TE.sum(1, keepdim=True), experts_TE

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", told)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, layer in enumerate(original.model.layers):
        layer.mlp.gate.layer = index
    ids = micro.ids_BT[:, :TOKENS]
    logprobs_T = original(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    logprobs_T.sum().backward()
    wanted = tensors_of(original, gradients=True) | {"log-probs": logprobs_T.detach()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() < 1e-5 * value.abs().max(), name
    assert all(found[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 0 for layer in range(LAYERS))


def test_an_exported_folder_is_the_one_it_came_from(folder: str, tmp_path: pathlib.Path):
    """To the last bit, a matrix for each expert, which transformers loads whole; config.json says the same."""
    model, _ = model_and_batch(folder, "none")
    export_hf(model, tmp_path / "model", torch.float32)
    before, after = (load_file(path / "model.safetensors") for path in (pathlib.Path(folder), tmp_path / "model"))
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight" in before
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    configs = [json.loads((path / "config.json").read_text()) for path in (pathlib.Path(folder), tmp_path / "model")]
    assert configs[0] | {"torch_dtype": configs[0]["dtype"]} == configs[1]
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report


def test_experts_take_no_adapters(folder: str):
    """All targets, the default, are all that the model has; one by name that it lacks is refused."""
    hf = read_hf_config(folder)
    places = [f"attention.{name}" for name in ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo")]
    assert adapted_places(hf, TrainerConfig(lora_rank=4)) == places
    assert adapted_places(hf, TrainerConfig(lora_rank=4, lora_targets=("v_proj",))) == places[2:3]
    with pytest.raises(ValueError, match="qwen3_moe .*up_proj, down_proj .*experts; .*q_proj"):
        adapted_places(hf, TrainerConfig(lora_rank=4, lora_targets=("q_proj", "up_proj", "down_proj")))
