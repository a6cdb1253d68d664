"""GRPO with LoRA: vLLM gets the merged weights, the reference is the policy without adapters, resume is exact."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo.config import GRPOConfig
from grpo.config.recipes import load
from grpo.folder.checkpoint import SafeReader
from grpo.run.session import Session
from grpo.run.start import read_grpo
from grpo.tools import export
from grpo.watch.failures import BadInput
from tests.e2e.runs import RANK_0, TINY, assert_same_run, read_metrics
from tests.e2e.test_layouts import COLOCATED, split
from tests.torchrun import run_python, torchrun

RANK = 2
LORA = ("--trainer.lora-rank", RANK, "--trainer.lora-alpha", 8)


@pytest.fixture(scope="module")
def run(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    """Folder and arguments of 4 steps of two updates; 2 trainers that are the reference too, 1 generator."""
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    arguments = [TINY, "--model.path", model, *split(2, 0, 1), *LORA, "--algorithm.num-mini-batches", 2]
    arguments += ["--num-steps", 4, "--checkpoint.interval", 2, "--resume"]
    torchrun("train_grpo.py", *arguments, "--run-dir", run_dir, nproc=3)
    return run_dir, [str(argument) for argument in arguments]


def test_trainer_and_vllm_agree_after_every_sync(run):
    metrics = read_metrics(run[0])
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert m["mismatch/mean"] < 1e-5 and m["grad_norm"] > 1e-3
    assert metrics[0]["kl"] != 0 and min(m["kl"] for m in metrics[1:]) > 1e-6


def test_a_checkpoint_holds_adapters_and_their_moments_alone(run):
    names = SafeReader(run[0] / "checkpoints" / "step-00000004").read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("model.")]
    moments = [name for name in names if "exp_avg" in name]
    assert len(weights) == 2 * 7 * 2 and len(moments) == 2 * len(weights)  # A and B of 7 layers in 2 blocks
    assert all("lora_" in name for name in weights + moments)


def test_the_run_leaves_merged_weights_and_adapters(run, model):
    """W + 8 / 2 * B A, and the rest as it was."""
    base, merged = (load_file(folder / "model.safetensors") for folder in (model, run[0] / "model"))
    adapters = load_file(run[0] / "model-adapter" / "adapter_model.safetensors")
    config = json.loads((run[0] / "model-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (RANK, 8, 7)
    assert config["base_model_name_or_path"] == str(model)
    for name, weight in base.items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            a, b = adapters.pop(f"{place}.lora_A.weight"), adapters.pop(f"{place}.lora_B.weight")
            assert a.shape[0] == b.shape[1] == RANK and b.abs().max() > 1e-3
            torch.testing.assert_close(merged[name], weight + 4 * b @ a, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(merged[name], weight), name
    assert adapters == {}


def test_4_steps_equal_2_resume_and_2(run, tmp_path):
    """And the older checkpoint, exported on one rank, is the policy of its step."""
    run_dir, arguments = run
    resumed = tmp_path / "run"
    shutil.copytree(run_dir, resumed)
    for name in ("model", "model-adapter", "checkpoints/step-00000004"):
        shutil.rmtree(resumed / name)
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[:2]))

    output = torchrun("train_grpo.py", *arguments, "--run-dir", resumed, nproc=3)

    assert "starting at step 2" in output
    assert_same_run(run_dir, resumed)
    adapters = "model-adapter/adapter_model.safetensors"
    assert (resumed / adapters).read_bytes() == (run_dir / adapters).read_bytes()
    assert f"step-00000004 -> {tmp_path / 'newest'}" in run_python(
        "-m", "grpo.export", run_dir, "--to", tmp_path / "newest"
    )
    for folder, file in (("newest", "model.safetensors"), ("newest-adapter", "adapter_model.safetensors")):
        same = load_file(tmp_path / folder / file)
        for name, tensor in load_file(run_dir / folder.replace("newest", "model") / file).items():
            torch.testing.assert_close(same[name], tensor, atol=1e-6, rtol=1e-6)
    shutil.rmtree(tmp_path / "newest")
    with pytest.raises(BadInput, match="newest-adapter exists"):  # it may be another run's
        export.main([str(run_dir), "--to", str(tmp_path / "newest")])


def test_resume_with_another_base_under_the_adapters_is_refused(run, model, tmp_path):
    """The folder has other weights than when the run began, and the name is the same."""
    shutil.copytree(run[0], tmp_path / "run")
    arguments = [*run[1], "--run-dir", str(tmp_path / "run"), "--num-steps", "5"]
    file = model / "model.safetensors"
    kept = file.read_bytes()
    try:
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        with pytest.raises(BadInput, match="since step 4 was saved: the weights of model.path: checksum"):
            config = load(GRPOConfig, "", arguments)
            Session(config, "train_grpo.py", read_grpo, config.roles, RANK_0, "").read_on_driver()
    finally:
        file.write_bytes(kept)


@pytest.mark.slow
def test_bfloat16_with_lora(model, tmp_path):
    """The base is held in bfloat16. vLLM has W + alpha / rank * B A rounded to it; the trainer adds in its forward."""
    flags = (*COLOCATED, "--roles.num-trainers", "2", "--model.dtype", "bfloat16")
    torchrun("train_grpo.py", TINY, *flags, *LORA, "--model.path", model, "--run-dir", tmp_path / "run", nproc=2)
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 2 and metrics[0]["kl"] == 0 < metrics[1]["kl"]
    assert all(m["mismatch/mean"] < 0.05 for m in metrics)  # half of what the sync check allows
