"""Which step a trace is of, and steps that no run has."""

import gzip
import json
import types

import pytest
import torch

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.checks import validate
from grpo.run.step_timer import StepTimer, profile_step

ROLES = types.SimpleNamespace(rank=3, name="generator")


def test_the_trace_is_of_the_chosen_step_alone(tmp_path):
    timer, seen = StepTimer(), []
    for step in profile_step(range(4), 2, str(tmp_path), ROLES):  # the second step is the one after 1
        with timer.phase(("generate", "train", "sync", "save")[step]):
            torch.ones(2).add(1)
        seen.append(step)
    assert seen == [0, 1, 2, 3]
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step-00000002-rank-003-generator.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"train", "aten::add"} <= names and not {"generate", "sync", "save"} & names


@pytest.mark.parametrize("config_type", [GRPOConfig, SFTConfig])
def test_a_step_outside_of_the_run_is_refused(config_type):
    validate(config_type(num_steps=5, profile=5))
    with pytest.raises(ValueError, match="profile=6 is no step of a run of num_steps=5"):
        validate(config_type(num_steps=5, profile=6))
