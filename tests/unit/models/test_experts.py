"""A mixture of experts: transformers' numbers, a folder in and out, layers without adapters."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo.config import ModelConfig, SFTConfig, TrainerConfig, change
from grpo.data.batches import make_batch
from grpo.models.build import ShardedModel, build_model
from grpo.models.export import export_hf, hf_tensors
from grpo.models.hf_folder import read_hf_config
from grpo.models.lora import adapted_places
from grpo.run.inputs import open_model_folder
from grpo.types import MicroBatch, Sample
from tests.tiny_models import QWEN3_MOE, make_tiny, tensors_of

pytestmark = pytest.mark.usefixtures("one_rank")
TOKENS, LAYERS = 25, 2
EXPERTS = QWEN3_MOE["num_experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny(tmp_path_factory.mktemp("moe"), "moe")


def model_and_batch(folder: str, checkpointing: str) -> tuple[ShardedModel, MicroBatch]:
    """The model in float32, and one row: a sequence of TOKENS tokens, and padding."""
    trainer = TrainerConfig(activation_checkpointing=checkpointing, compile=False, micro_batch_tokens=64)
    model = build_model(ModelConfig(dtype="float32"), trainer, folder, device=torch.device("cpu"), tensor_parallel=1)
    ids = torch.randint(3, 32, (TOKENS,), generator=torch.Generator().manual_seed(1))
    batch = make_batch([Sample(ids, torch.arange(TOKENS) > 0, prompt_tokens=1, temperature=1.0)])
    ((micro, _),) = model.micro_batches(model.pack(batch))
    return model, micro


def run(model: ShardedModel, micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Log-probs, and gradients of their sum under Hugging Face's names."""
    logprobs_BT, _ = model.logprobs(micro)
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


def test_log_probs_and_all_gradients_equal_transformers(folder: str):
    """Those of the gates too."""
    model, micro = model_and_batch(folder, "none")
    found = run(model, micro)
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = micro.ids_BT[:, :TOKENS]
    logprobs_T = original(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    logprobs_T.sum().backward()
    expected = tensors_of(original, gradients=True) | {"log-probs": logprobs_T.detach()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-5 * value.abs().max(), name
    assert all(found[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 0 for layer in range(LAYERS))


def test_an_exported_folder_is_the_one_it_came_from(folder: str, tmp_path: pathlib.Path):
    """To the last bit, a matrix for each expert, which transformers loads whole; config.json says the same.

    Whoever may read config.json may read the weights too.
    """
    model, _ = model_and_batch(folder, "none")
    export_hf(model, tmp_path / "model", torch.float32)
    before, after = (load_file(path / "model.safetensors") for path in (pathlib.Path(folder), tmp_path / "model"))
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight" in before
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    configs = [json.loads((path / "config.json").read_text()) for path in (pathlib.Path(folder), tmp_path / "model")]
    assert configs[0] | {"torch_dtype": configs[0]["dtype"]} == configs[1]
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    permissions = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert permissions["model.safetensors"] == permissions["config.json"]


def test_experts_take_no_adapters(folder: str):
    """All targets, the default, are all that the model has; one by name that it lacks is refused."""
    hf = read_hf_config(folder)
    places = [f"attention.{name}" for name in ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo")]
    assert adapted_places(hf, TrainerConfig(lora_rank=4)) == places
    assert adapted_places(hf, TrainerConfig(lora_rank=4, lora_targets=("v_proj",))) == places[2:3]
    with pytest.raises(ValueError, match="qwen3_moe .*up_proj, down_proj .*experts; .*q_proj"):
        adapted_places(hf, TrainerConfig(lora_rank=4, lora_targets=("q_proj", "up_proj", "down_proj")))


def test_the_files_of_a_folder_may_have_any_names(folder: str, tmp_path: pathlib.Path):
    """torchtitan's own reader of the index wants a number in each name."""
    split = tmp_path / "split"
    shutil.copytree(folder, split)
    tensors = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    files = {name: "even.safetensors" if number % 2 else "odd.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model, _ = model_and_batch(str(split), "none")
    read = dict(hf_tensors(model, torch.float32))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_experts_are_not_updated_by_muon(folder: str):
    """Muon orthogonalizes one matrix, and experts are stacked; so they are refused, and AdamW is named."""
    trainer = TrainerConfig(optimizer="muon")
    config = SFTConfig(model=ModelConfig(path=folder), trainer=trainer, max_sequence_tokens=64)
    with pytest.raises(ValueError, match=f"muon does not go with .* {EXPERTS} experts: .*--trainer.optimizer adamw"):
        open_model_folder(config)
    open_model_folder(change(config, {"trainer.optimizer": "adamw"}))
