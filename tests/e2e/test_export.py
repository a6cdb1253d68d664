"""What a run leaves: a Hugging Face folder with the weights of the last checkpoint, that transformers and vLLM load."""

import json
import pathlib
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.e2e.runs import ONE_RANK, read_metrics, run_tiny
from tests.hub import OWNER, hub_server  # noqa: F401
from tests.tiny_models import KINDS, WITH_STATES, make_tiny
from tests.torchrun import run_python, torchrun

# float32
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def exported(finished_run) -> pathlib.Path:
    return finished_run[0] / "model"


def test_transformers_loads_the_export(exported, model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(model).chat_template
    assert tokenizer.decode(tokenizer("12+34")["input_ids"]) == "12+34"
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"  # the latter for transformers before 4.56
    policy, report = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weights
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_any_checkpoint_is_exported(exported, finished_run, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished_run[0], run_dir)
    recipe = run_dir / "config.py"  # as of a run whose trainers hold replicas, which one process cannot
    recipe.write_text(recipe.read_text().replace("data_replicas=1", "data_replicas=2"))
    newest, older = tmp_path / "newest", tmp_path / "older"
    assert f"step-00000006 -> {newest}" in run_python("-m", "grpo.export", run_dir, "--to", newest)
    torchrun("grpo.export", run_dir, "--step 3 --to", older, nproc=2)
    expected, same, other = (load_file(folder / "model.safetensors") for folder in (exported, newest, older))
    assert expected.keys() == same.keys() == other.keys()
    assert all(torch.equal(expected[name], same[name]) for name in expected)
    assert not any(torch.equal(expected[name], other[name]) for name in expected)
    assert (newest / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()


def one_step(model: pathlib.Path | str, run_dir: pathlib.Path) -> dict:
    """Metrics of a run of one step on one rank, which exports what it trained."""
    run_tiny(model, run_dir, ONE_RANK, "--num-steps 1")
    (metrics,) = read_metrics(run_dir)
    return metrics


def test_vllm_serves_the_export(exported, tmp_path):
    """A run from the exported folder: vLLM loads it by itself, and its log-probs are the trainer's."""
    assert one_step(exported, tmp_path / "run")["mismatch/max"] < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITH_STATES])
def test_every_family_is_exported_reloaded_and_served(kind, tmp_path):
    """Trained for a step, loaded by transformers with no weight too many or too few, and sampled from by vLLM."""
    start = make_tiny(tmp_path, kind)
    one_step(start, tmp_path / "first")
    before = transformers.AutoModelForCausalLM.from_pretrained(start).state_dict()
    policy, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "first" / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    unchanged = [name for name, tensor in policy.state_dict().items() if torch.equal(tensor, before[name])]
    assert unchanged == []
    assert one_step(tmp_path / "first" / "model", tmp_path / "second")["mismatch/max"] < 10 * TOLERANCE


def test_a_run_uploads_what_it_exported(hub, model, tmp_path):
    """Two steps of SFT, with the hub's client in the run's own process."""
    pytest.importorskip("grpo.features.hub")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"""
import os

from huggingface_hub import constants

from configs.toy_sft import config

os.environ["HF_TOKEN"] = "hf_test"
constants.ENDPOINT = {hub.url!r}
constants.HF_HUB_OFFLINE = False
"""
    )
    flags = f"--model.path {model} --data.path tests/e2e/tiny_rows.py:addition --num-trainers 1 --num-steps 2"
    output = run_python("train_sft.py", recipe, flags, f"--run-dir {tmp_path}/run --checkpoint.push-to-hub sums")
    assert f"uploaded {tmp_path}/run/model: {hub.url}/{OWNER}/sums" in output
    exported = {path.name: path.read_bytes() for path in (tmp_path / "run/model").iterdir()}
    assert hub.files == exported
