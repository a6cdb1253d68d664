"""A mixture of experts: a folder in and out, layers without adapters. Its numbers are in tests/dist/test_parity.py."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo.config import ModelConfig, SFTConfig, TrainerConfig, change
from grpo.models.build import ShardedModel, build_model
from grpo.models.export import export_hf, hf_tensors
from grpo.models.hf_folder import read_hf_config
from grpo.models.lora import adapted_paths
from grpo.run.policy import read_policy
from tests.tiny_models import QWEN3_MOE, make_tiny

pytestmark = pytest.mark.usefixtures("one_rank")
EXPERTS = QWEN3_MOE["num_experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("moe"), "moe")


def model_of(folder: str) -> ShardedModel:
    trainer = TrainerConfig(compile=False)
    return build_model(ModelConfig(dtype="float32"), trainer, folder, device=torch.device("cpu"), tensor_parallel=1)


def test_an_exported_folder_is_the_one_it_came_from(folder, tmp_path):
    """To the last bit, a matrix for each expert, which transformers loads whole; config.json says the same.

    Whoever may read config.json may read the weights too.
    """
    model = model_of(folder)
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


def test_experts_take_no_adapters(folder):
    """All targets, the default, are all that the model has; one by name that it lacks is refused."""
    hf = read_hf_config(folder)
    paths = [f"attention.{name}" for name in ("qkv_linear.wq", "qkv_linear.wk", "qkv_linear.wv", "wo")]
    assert adapted_paths(hf, TrainerConfig(lora_rank=4)) == paths
    assert adapted_paths(hf, TrainerConfig(lora_rank=4, lora_targets=("v_proj",))) == paths[2:3]
    with pytest.raises(ValueError, match="qwen3_moe .*up_proj, down_proj .*experts; .*q_proj"):
        adapted_paths(hf, TrainerConfig(lora_rank=4, lora_targets=("q_proj", "up_proj", "down_proj")))


def test_the_files_of_a_folder_may_have_any_names(folder, tmp_path):
    """torchtitan's own reader of the index wants a number in each name."""
    split = tmp_path / "split"
    shutil.copytree(folder, split)
    tensors = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    files = {name: "even.safetensors" if number % 2 else "odd.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = model_of(str(split))
    read = dict(hf_tensors(model, torch.float32))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_experts_are_not_updated_by_muon(folder):
    """Muon orthogonalizes one matrix, and experts are stacked; so they are refused, and AdamW is named."""
    trainer = TrainerConfig(optimizer="muon")
    config = SFTConfig(model=ModelConfig(path=folder), trainer=trainer, max_sequence_tokens=64)
    with pytest.raises(ValueError, match=f"needs trainer.optimizer=adamw: .* {EXPERTS} experts are stacked"):
        read_policy(config)
    read_policy(change(config, {"trainer.optimizer": "adamw"}))
