"""What benches say of runs: whether a run is as expected; the shapes of random models."""

import ast
import importlib.util
import json
import sys

import pytest

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import random_checkpoint
import real

PROGRAM = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
lines = [{"step": 0, "time": 0, "eval/a/accuracy": 0.2, "eval/b/accuracy": 0.4}]
lines += [{"step": n, "time": 0, "reward/mean": n / 100} for n in range(1, 20)]
lines += [{"step": 20, "time": 0, "eval/a/accuracy": 0.5, "eval/b/accuracy": 0.6}]
lines += [{"step": 20, "time": 0, "reward/mean": 0.2}]  # a step's own line comes after its evaluation
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
sys.exit(3)
"""


def test_a_real_run_leaves_its_evaluations_and_the_means_of_ten_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "RUNS_DIR", tmp_path)
    expected = {0: (0.2, 0.4), 20: (0.6, 0.7), 30: (0.6, 0.7)}
    monkeypatch.setitem(real.RUNS, "gsm8k", real.Run("recipe.py", expected=expected))
    options = real.read_options(["gsm8k", "--out", str(tmp_path)])
    (job,) = options.jobs
    command = [sys.executable, "-c", PROGRAM, tmp_path / job.label]
    assert real.run_all(options.jobs, [command], apart=0, seconds=600) == 1  # it fails
    lines = [json.loads(line) for line in (tmp_path / f"{job.label}.jsonl").read_text().splitlines()]
    means = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    assert means == {1: 0.01, 2: 0.02, 10: pytest.approx(0.065), 20: pytest.approx(0.155)}
    verdicts = {"0": "within 0.2 to 0.4: 0.300", "20": "OUTSIDE 0.6 to 0.7: 0.550", "30": "not reached"}
    assert lines[-1] == {"exit_code": 3, "verdict": verdicts}


@pytest.mark.parametrize("name", real.RUNS)
def test_flags_of_a_real_run_parse(name, tmp_path):
    """With local folders, as on a machine without a network, alone and beside another run."""
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--teacher", str(tmp_path), "--steps", "3"]
    words += ["--", "--trainer.learning-rate", "0.5"]
    chosen = real.RUNS[name]
    kind = SFTConfig if chosen.script == "train_sft.py" else GRPOConfig
    for others in ([], ["gsm8k:8"]):
        options = real.read_options([name, *others, *words])
        command = [str(word) for word in real.command_of(options.jobs[0], options)]
        config = load(kind, "", command[command.index(chosen.script) + 1 :])
        paths = [source.path for source in (*config.data.all_sources, *config.evaluation.held_out(config.data))]
        # rows that a function of a package makes need no folder
        paths = [path for path in paths if ".py:" not in path]
        assert config.num_steps == 3 and config.trainer.learning_rate == 0.5
        assert all(path.startswith(str(tmp_path)) for path in paths)
        assert config.model.path.startswith(str(tmp_path)) != chosen.has_own_model
    assert config.generator.engine == {"max_num_seqs": 512, "kv_cache_memory_bytes": chosen.cache_bytes}


@pytest.mark.parametrize(
    "name", [name for name, shape in random_checkpoint.SHAPES.items() if "qwen2" in shape.values()]
)
def test_heads_of_a_random_qwen2_are_as_wide_as_vllm_takes_them_to_be(name):
    """vLLM divides, whatever config.json says, and reads the first rows of weights that are too large."""
    shape = {"head_dim": random_checkpoint.HEAD_DIM} | random_checkpoint.SHAPES[name]
    assert shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]


@pytest.mark.parametrize("file", sorted((ROOT / "tests/bench").glob("*.py")), ids=lambda file: file.stem)
def test_what_a_bench_imports_of_the_project_is_there(file):
    """Most of them no test runs."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not any(importlib.util.find_spec(f"{node.module}.{name}") is None for name in missing), missing
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in {"trl"}, node.module
