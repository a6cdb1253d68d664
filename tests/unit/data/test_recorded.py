"""Recorded batches: what is written comes back, what cannot be trained on is refused from the heads of the files."""

from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo.config import GRPOConfig, ModelConfig, RolesConfig
from grpo.config.recipes import as_recipe
from grpo.data.batches import make_batch
from grpo.data.recorded import RecordedStep, batch_path, save_step
from grpo.tools.recorded import check_recorded, read_step
from grpo.tools.replay import load_config
from grpo.types import TrainBatch
from tests.rollouts import rewarded, sequence


def recorded(with_reference: bool = True, with_turns: bool = False) -> RecordedStep:
    """Two sequences of 2 and 3 tokens; one sampled log-prob is not finite."""
    first = sequence(torch.tensor([1, 2]), torch.tensor([False, True]), torch.tensor([0.0, -0.5]), temperature=0.7)
    logprobs_T = torch.tensor([0.0, -1.5, -torch.inf])
    second = sequence(torch.tensor([1, 2, 3]), torch.tensor([False, True, False]), logprobs_T, ended_by="tokens")
    samples = [first, second]
    batch = make_batch(samples)
    if with_reference:
        batch = replace(batch, ref_logprobs_N=torch.arange(5.0) / 3)
    if with_turns:
        batch = replace(batch, turn_N=torch.arange(5), earned_N=torch.arange(5.0) / 4)
    batch = rewarded(batch, torch.tensor([1.0, 0.0]), torch.tensor([[1.0, torch.nan]]), torch.tensor([True, False]))
    return RecordedStep(batch, 2, {"reward/mean": 1.0})


def test_a_step_comes_back_as_it_was(tmp_path):
    step = recorded(with_turns=True)
    save_step(tmp_path, 7, step)
    back = read_step(tmp_path, 7)
    check_recorded(tmp_path, [7], 2, needs_turns=True)
    for field in fields(TrainBatch):
        mine, theirs = getattr(step.batch, field.name), getattr(back.batch, field.name)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True, msg=field.name)
    assert (back.group_size, back.metrics) == (2, {"reward/mean": 1.0})
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step-00000007.safetensors"]


def test_missing_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--record"):
        check_recorded(tmp_path, [1], group_size=2)
    for step in (1, 2, 4):
        save_step(tmp_path, step, recorded())
    with pytest.raises(ValueError, match="3 of the 4 steps from 1 to 4, and step 3 .*fewer --num-steps"):
        check_recorded(tmp_path, [1, 2, 3, 4], group_size=2)


def test_other_groups_a_missing_reference_and_missing_turns_are_refused(tmp_path):
    save_step(tmp_path, 1, recorded(with_reference=False))
    check_recorded(tmp_path, [1], group_size=2)
    with pytest.raises(ValueError, match="groups of 2, not of group_size=4"):
        check_recorded(tmp_path, [1], group_size=4)
    with pytest.raises(ValueError, match="reference, which algorithm.kl_coef=0.1 needs"):
        check_recorded(tmp_path, [1], 2, "algorithm.kl_coef=0.1")
    with pytest.raises(ValueError, match="does not say what turns earned"):
        check_recorded(tmp_path, [1], 2, needs_turns=True)


def test_what_save_step_did_not_write_is_refused_by_name(tmp_path):
    save_step(tmp_path, 1, recorded())
    path = batch_path(tmp_path, 1)
    tensors, facts = load_file(path), {"group_size": "2", "metrics": "{}"}
    for changes, message in (
        ({"has_reward_R": None}, "has_reward_R"),
        ({"further_N": torch.zeros(5)}, "further_N"),
    ):
        save_file({name: x for name, x in (tensors | changes).items() if x is not None}, path, facts)
        with pytest.raises(ValueError, match=message):
            read_step(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=path.name):
        check_recorded(tmp_path, [1], 2)


def test_the_config_of_a_replay_is_the_recorded_runs_with_other_trainers(tmp_path):
    alone = RolesConfig(colocated=True, num_trainers=1, num_references=0)
    config = GRPOConfig(
        model=ModelConfig(path="configs/examples/toys.py:addition_model"), roles=alone, run_dir=str(tmp_path / "a")
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.py").write_text(as_recipe(config))
    replayed = load_config(str(tmp_path / "a"), ["--num-steps", "2"], num_trainers=2)
    assert replayed.roles.num_trainers == 2 and replayed.num_steps == 2
    assert replayed.run_dir == f"{tmp_path}/a-replay" and replayed.model.path == f"{tmp_path}/a/initial_model"
