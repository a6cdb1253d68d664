"""The scripts' command line: refused before torch is imported, and one process without torchrun."""

import pathlib
import subprocess
import sys

import pytest

import train_grpo
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.fields import SHARED_GPU
from grpo.config.recipes import FIELDS_OF_FLAGS, as_recipe, change, for_one_process
from grpo.config.values import field_paths
from grpo.run.command_line import begin_early, checked_config
from grpo.tools import check_loss, evaluate, replay
from grpo.watch.failures import BadInput
from tests.door import skipping_what_needs_a_deleted_feature

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("train_grpo.py --trainer.learning-rat 1e-5", 1, "--trainer.learning-rate"),
        ("train_sft.py configs/nothing.py", 1, "error: recipe configs/nothing.py is no file"),
        ("train_grpo.py --run-dir /proc/nowhere", 1, "error: run_dir /proc/nowhere cannot be written"),
        ("train_sft.py --run-dir configs", 1, "error: configs has files"),
        ("train_grpo.py --model.path /proc/nowhere", 1, "error: model folder /proc/nowhere does not exist"),
        ("train_sft.py --help", 0, "usage: train_"),
    ],
)
def test_the_command_line_is_read_before_torch_is_imported(command, code, text, without_torchrun):
    words = [sys.executable, "-X", "importtime", *command.split()]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == code
    assert text in result.stdout + result.stderr
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "grpo.config.fields" in imported
    assert not imported & {"torch", "vllm", "transformers", "datasets", "numpy"}


def test_torch_is_quiet_from_its_import_on(monkeypatch):
    """It reads the variable only then: in the first look for torch by anybody."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print(os.environ.get('TORCH_CPP_LOG_LEVEL'), flush=True); os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import grpo.tools.evaluate\n"
    )
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ERROR\n"


def test_flags_of_other_tools_are_answered_by_fields_that_there_are():
    fields = {*field_paths(GRPOConfig()), *field_paths(SFTConfig())}
    assert fields.issuperset(FIELDS_OF_FLAGS.values())
    with pytest.raises(ValueError, match="--generator.max-completion-tokens"):
        checked_config(GRPOConfig, ["--max_completion_length", "64"])


ON_ONE_GPU = ("--generator.sleep", "--generator.gpu-memory-utilization", "0.4")


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--dry-run", "--gpus", "1")])
def test_one_process_has_every_role_before_it_is_checked(flags, without_torchrun, capsys):
    """What a flag says of the engine's memory holds; what the recipe says is of an engine alone on its GPU."""
    config = checked_config(GRPOConfig, [*ON_ONE_GPU, *flags])
    assert config.num_ranks == 1 and config.roles.colocated and config.generator.sleep
    assert config.generator.gpu_memory_utilization == 0.4
    config = checked_config(GRPOConfig, ["configs/qwen3_32b_gsm8k.py", "--overlap-steps", "1", *flags])
    assert (config.num_ranks, config.overlap_steps, config.generator.gpu_memory_utilization) == (1, 0, SHARED_GPU)
    assert config.generator.tensor_parallel == config.trainer.tensor_parallel == 1
    said = capsys.readouterr().out
    for changed in ("generator.tensor_parallel = 1, not 4", "overlap_steps = 0, not 1"):
        assert changed in said
    assert checked_config(SFTConfig, list(flags)).num_ranks == 1


def test_several_gpus_or_processes_have_the_ranks_configured(without_torchrun, monkeypatch):
    assert checked_config(GRPOConfig, ["--dry-run", "--gpus", "8"]).num_ranks == 8
    with pytest.raises(ValueError, match="generator.sleep needs roles.colocated"):
        checked_config(GRPOConfig, [*ON_ONE_GPU, "--dry-run", "--gpus", "8"])
    monkeypatch.setenv("RANK", "0")
    for flags in ([], ["--dry-run"]):
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert checked_config(GRPOConfig, flags).num_ranks == 8
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(ValueError, match="needs 8 processes"):
            checked_config(GRPOConfig, flags)


def test_tools_leave_what_the_run_did_with_its_checkpoints(tmp_path):
    """An evaluation may lack the metric of keep_best; a replay does not replace the model that its run uploaded."""
    changes = {"evaluation.interval": 10, "evaluation.num_samples": 8, "checkpoint.interval": 10}
    changes |= {"checkpoint.keep_best": "pass_at_8", "checkpoint.push_to_hub": "me/mine"}
    recipe = tmp_path / "config.py"
    recipe.write_text(as_recipe(change(GRPOConfig(), changes)))
    alone = evaluate.load_config("my/model", [str(recipe), "--evaluation.num-samples", "0"], num_ranks=1)
    assert alone.checkpoint.keep_best == alone.checkpoint.push_to_hub == ""
    again = replay.load_config(str(tmp_path), [], num_trainers=1)
    assert again.checkpoint.push_to_hub == ""
    with skipping_what_needs_a_deleted_feature():
        elsewhere = replay.load_config(str(tmp_path), ["--checkpoint.push-to-hub", "me/other"], num_trainers=1)
    assert elsewhere.checkpoint.push_to_hub == "me/other"


def test_tools_check_the_ranks_that_they_have(tmp_path):
    """Engines alone on 8 ranks, then trainers alone on 2, of a run of one process whose engine sleeps."""
    alone = evaluate.load_config("my/model", [*ON_ONE_GPU, "--generator.tensor-parallel", "8"], num_ranks=8)
    assert alone.roles.num_engine_ranks == 8
    with pytest.raises(ValueError, match="3 generator ranks .* replicas of generator.tensor_parallel=2"):
        evaluate.load_config("my/model", ["--generator.tensor-parallel", "2"], num_ranks=3)
    recorded = for_one_process(change(GRPOConfig(), {"generator.sleep": True, "run_dir": str(tmp_path)}))
    (tmp_path / "config.py").write_text(as_recipe(recorded))
    again = replay.load_config(str(tmp_path), ["--trainer.tensor-parallel", "2"], num_trainers=2)
    assert (again.roles.num_trainers, again.trainer.tensor_parallel) == (2, 2)
    for flags in (ON_ONE_GPU, ("--overlap-steps", "1")):  # a run's own, of one process or several
        with skipping_what_needs_a_deleted_feature():
            assert check_loss.main(["grpo", *flags]) == 0


def test_a_config_that_met_no_command_line_is_checked_too(without_torchrun):
    """As in a notebook."""
    with pytest.raises(BadInput, match="needs 8 processes"):
        train_grpo.main(GRPOConfig())
    with pytest.raises(BadInput, match="generator.sleep needs roles.colocated"):
        train_grpo.main(change(GRPOConfig(), {"generator.sleep": True}))


@pytest.mark.parametrize("field", ["model.path", "model.reference_path", "reward.model"])
def test_a_folder_that_cannot_be_a_model_is_refused_before_rows_are_read(field, tmp_path, monkeypatch):
    """A name of the hub and a function that builds a model may be there; a run's folder has its model in `model`."""
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()

    def check(path):
        config = change(GRPOConfig(), {field: str(path), "run_dir": str(tmp_path / "new"), "dry_run": True})
        begin_early(config, "train_grpo.py")

    for path, said in {
        tmp_path / "run": "no config.json; name .*run/model, its model",
        tmp_path: "no config.json; it must be",
        "../absent": "absent does not exist",
        "some/folder/absent": "absent does not exist",
    }.items():
        with pytest.raises(FileNotFoundError, match=said):
            check(path)
    for usable in (tmp_path / "run/model", "owner/name", "path/file.py:builder"):
        check(usable)
