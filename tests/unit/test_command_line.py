"""The scripts' command line: refused before torch is imported, and one process without torchrun."""

import os
import pathlib
import subprocess
import sys

import pytest

from grpo.config import GeneratorConfig, GRPOConfig, RolesConfig, SFTConfig
from grpo.config.checks import check_world_size, for_one_process, validate
from grpo.config.fields import SHARED_GPU

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["train_grpo.py", "train_sft.py"])
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--trainer.learning-rat", "1e-5"], 1, "--trainer.learning-rate"),
        (["--num-steps", "0"], 1, "error: num_steps=0"),
        (["configs/nothing.py"], 1, "error: recipe configs/nothing.py does not exist"),
        (["--help"], 0, "usage: train_"),
    ],
)
def test_the_command_line_is_read_before_torch_is_imported(script, arguments, code, text):
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-X", "importtime", script, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert result.returncode == code
    assert text in result.stdout + result.stderr
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "grpo.config.fields" in imported
    assert not imported & {"torch", "vllm", "transformers", "datasets", "numpy"}


def test_one_process_has_every_role():
    config = for_one_process(GRPOConfig(roles=RolesConfig(num_trainers=4, num_references=1, num_generators=3)))
    validate(config)
    check_world_size(config, 1)
    assert config.generator.gpu_memory_utilization == SHARED_GPU
    check_world_size(for_one_process(SFTConfig(num_trainers=2)), 1)


def test_a_layout_of_one_process_stays_as_it_is():
    roles = RolesConfig(colocated=True, num_trainers=1, num_references=0)
    config = GRPOConfig(roles=roles, generator=GeneratorConfig(gpu_memory_utilization=0.5))
    assert for_one_process(config) is config
