"""What benches say of runs: which seconds count, what a run leaves that is cut off, whether it is as expected; models
that several processes write."""

import json
import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import learning
import random_checkpoint
import real
import thirty

OURS = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 1, "time/startup": 60, "time/step": 2},
    {"step": 2, "eval/accuracy": 0.5},  # written before its step's line
    {"step": 2, "time/step": 3, "time/evaluate": 1},
]
TRL = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 0, "time/startup": 60},
    {"step": 1, "time/step": 2},
    {"step": 2, "time/step": 2},  # its steps are without evaluations
    {"step": 2, "eval/accuracy": 0.5},
]


@pytest.mark.parametrize("lines", [OURS, TRL])
def test_seconds_are_those_since_the_launch_without_evaluations(lines):
    assert learning.curve(lines) == [(0, 60, 0.4), (2, 60 + 2 + 2, 0.5)]


PROGRAM = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
lines = [{"step": 0, "time": 0, "eval/a/accuracy": 0.2, "eval/b/accuracy": 0.4}]
lines += [{"step": n, "time": 0, "reward/mean": n / 100} for n in range(1, 21)]
lines += [{"step": 20, "time": 0, "eval/a/accuracy": 0.5, "eval/b/accuracy": 0.6}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
sys.exit(3)
"""


def test_a_real_run_that_fails_leaves_its_evaluations_and_the_means_of_ten_steps(tmp_path):
    out = tmp_path / "out.jsonl"
    with open(out, "w") as file:
        program = [sys.executable, "-c", PROGRAM, tmp_path / "run"]
        assert real.follow(program, tmp_path / "run", tmp_path / "log", file, limit=None) == 3
    written = [json.loads(line) for line in out.read_text().splitlines()]
    means = {line["step"]: line["reward/mean"] for line in written if "reward/mean" in line}
    assert means == {1: 0.01, 2: 0.02, 10: pytest.approx(0.065), 20: pytest.approx(0.155)}
    accuracies = {line["step"]: real.accuracy_of(line) for line in written if real.accuracy_of(line) is not None}
    assert accuracies == {0: pytest.approx(0.3), 20: pytest.approx(0.55)}
    expected = {0: (0.2, 0.4), 20: (0.6, 0.7), 30: None}
    verdicts = [real.verdict(accuracies, step, expected) for step in expected]
    assert verdicts == ["within 0.2 to 0.4: 0.300", "OUTSIDE 0.6 to 0.7: 0.550", "not reached"]


@pytest.mark.parametrize("name", real.RUNS)
def test_flags_of_a_real_run_parse(name, tmp_path):
    """With local folders, as on a machine without a network."""
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--steps", "3", "--tiny"]
    words += ["--", "--trainer.learning-rate", "0.5"]
    options = real.read_options([name, *words])
    chosen = real.RUNS[name]
    config = load(
        SFTConfig if chosen.script == "train_sft.py" else GRPOConfig,
        str(ROOT / "configs" / chosen.recipe),
        real.given_flags(chosen, options),
    )
    paths = [source.path for source in (*config.data.all_sources, *config.evaluation.held_out(config.data))]
    assert config.num_steps == 3 and config.trainer.learning_rate == 0.5
    # rows that a function of a package makes need no folder
    paths = [path for path in paths if ".py:" not in path]
    assert all(path.startswith(str(tmp_path)) for path in (config.model.path, *paths))


@pytest.fixture
def blocks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A mixture of two blocks, each in a file of its own, where thirty.py looks for it."""
    monkeypatch.setenv("BENCH_MODELS", str(tmp_path))
    folder = tmp_path / "tiny-moe-2-in-blocks"
    folder.mkdir()
    random_checkpoint.main(random_checkpoint.Arguments("tiny-moe", folder, num_layers=2, writers=2))
    return folder


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("fails", "outcome"), [((True, False), "done"), ((True, True), "exit code 1")])
def test_steps_whose_sync_check_fails_are_taken_once_more_without_it(fails, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(thirty, "RUNS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["thirty.py", "--tiny"])
    bench = thirty.Bench(thirty.read_options(), "", gpu_gib=80, shape="tiny-moe", ends=0.0, out=tmp_path / "out")
    flags = []

    def train(bench: thirty.Bench, part: str, layers: int, run_dir: pathlib.Path, more: list) -> int:
        flags.append("--sync-check-interval" in bench.flags(layers, run_dir))
        has_failed = fails[len(flags) - 1]
        (tmp_path / "steps.log").write_text(f"error: {thirty.CHECK_FAILED}" if has_failed else "done")
        return int(has_failed)

    monkeypatch.setattr(thirty, "train", train)
    assert thirty.take_steps(bench) == outcome
    assert flags == [False, True]


def test_a_model_written_in_blocks_is_one_that_transformers_loads(blocks: pathlib.Path, monkeypatch):
    """So is the model of its first block, whose weights are links to the same files."""
    monkeypatch.setattr(sys, "argv", ["thirty.py", "--tiny"])
    bench = thirty.Bench(thirty.read_options(), base="", gpu_gib=80, shape="tiny-moe", ends=0.0, out=blocks)
    thirty.take_first_blocks(bench, 1)
    written = tensors_of(blocks)
    for number, folder in ((2, blocks), (1, bench.model(1))):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()) and len(model.model.layers) == number
        assert model.lm_head.weight.equal(written["lm_head.weight"])
        experts = model.model.layers[number - 1].mlp.experts.down_proj
        assert experts[5].equal(written[f"model.layers.{number - 1}.mlp.experts.5.down_proj.weight"])
    assert tensors_of(bench.model(1)).keys() < written.keys()
    assert model.dtype == torch.bfloat16 and 0.019 < experts.float().std() < 0.021
