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
from tests.e2e.runs import COLOCATED, RANK_0, TINY, assert_same_run, read_metrics, run_tiny, split
from tests.torchrun import run_python

RANK = 2
LORA = f"--trainer.lora-rank {RANK} --trainer.lora-alpha 8"
FLAGS = f"{split(2, 0, 1)} {LORA} --algorithm.num-mini-batches 2 --num-steps 4 --checkpoint.interval 2 --resume"


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> pathlib.Path:
    """Folder of 4 steps of two updates; 2 trainers that are the reference too, 1 generator."""
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    run_tiny(model, run_dir, FLAGS, nproc=3)
    return run_dir


def test_trainer_and_vllm_agree_after_every_sync(run):
    metrics = read_metrics(run)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert m["mismatch/mean"] < 1e-5 and m["grad_norm"] > 1e-3
    assert metrics[0]["kl"] != 0 and min(m["kl"] for m in metrics[1:]) > 1e-6


def test_a_checkpoint_holds_adapters_and_their_moments_alone(run):
    names = SafeReader(run / "checkpoints" / "step-00000004").read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("model.")]
    moments = [name for name in names if "exp_avg" in name]
    assert len(weights) == 2 * 7 * 2 and len(moments) == 2 * len(weights)  # A and B of 7 layers in 2 blocks
    assert all("lora_" in name for name in weights + moments)


def test_the_run_says_in_the_adapters_folder_what_they_belong_to(run, model):
    """That merged weights and adapters are what PEFT makes of them, tests/dist/test_lora_parity.py shows."""
    config = json.loads((run / "model-adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (RANK, 8, 7)
    assert config["base_model_name_or_path"] == str(model)


def test_4_steps_equal_2_resume_and_2(run, model, tmp_path):
    """And the older checkpoint, exported on one rank, is the policy of its step."""
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    for name in ("model", "model-adapter", "checkpoints/step-00000004"):
        shutil.rmtree(resumed / name)
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[:2]))

    output = run_tiny(model, resumed, FLAGS, nproc=3)

    assert "starting at step 2" in output
    assert_same_run(run, resumed)
    adapters = "model-adapter/adapter_model.safetensors"
    assert (resumed / adapters).read_bytes() == (run / adapters).read_bytes()
    newest = tmp_path / "newest"
    assert f"step-00000004 -> {newest}" in run_python("-m", "grpo.export", run, f"--to {newest}")
    for folder, file in (("newest", "model.safetensors"), ("newest-adapter", "adapter_model.safetensors")):
        same = load_file(tmp_path / folder / file)
        for name, tensor in load_file(run / folder.replace("newest", "model") / file).items():
            torch.testing.assert_close(same[name], tensor, atol=1e-6, rtol=1e-6)
    shutil.rmtree(newest)
    with pytest.raises(BadInput, match="newest-adapter exists"):  # it may be another run's
        export.main([str(run), "--to", str(newest)])


def test_resume_with_another_base_under_the_adapters_is_refused(run, model, tmp_path):
    """The folder has other weights than when the run began, and the name is the same."""
    shutil.copytree(run, tmp_path / "run")
    flags = f"--model.path {model} {FLAGS} --run-dir {tmp_path}/run --num-steps 5"
    file = model / "model.safetensors"
    kept = file.read_bytes()
    try:
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        with pytest.raises(BadInput, match="since step 4 was saved: the weights of model.path: checksum"):
            config = load(GRPOConfig, TINY, flags.split())
            Session(config, "train_grpo.py", read_grpo, config.roles, RANK_0, "").read_on_driver()
    finally:
        file.write_bytes(kept)


@pytest.mark.slow
def test_bfloat16_with_lora(model, tmp_path):
    """The base is held in bfloat16. vLLM has W + alpha / rank * B A rounded to it; the trainer adds in its forward."""
    flags = f"{COLOCATED} --roles.num-trainers 2 --model.dtype bfloat16 {LORA}"
    run_tiny(model, tmp_path / "run", flags, nproc=2)
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 2 and metrics[0]["kl"] == 0 < metrics[1]["kl"]
    assert all(m["mismatch/mean"] < 0.05 for m in metrics)  # half of what the sync check allows
