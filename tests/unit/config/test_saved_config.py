"""Resuming with another config: what differs is shown, and what breaks exactness is refused."""

import json
import os
import pathlib

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.recipes import changes_since, is_resume_safe, load_recipe, written_fields
from grpo.folder.checkpoint import is_same_run
from grpo.folder.run_folder import begin_run

RECIPES = sorted((pathlib.Path(__file__).parents[3] / "configs").glob("*.py"))


def saved(config: GRPOConfig | SFTConfig) -> dict[str, str]:
    """What `run.json` has of a config."""
    return json.loads(json.dumps(written_fields(config)))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_config_has_not_changed_since_it_was_saved(recipe):
    config = load_recipe(str(recipe), GRPOConfig, SFTConfig)
    config = change(config, {"trainer.max_grad_norm": float("inf")})
    assert changes_since(saved(config), config) == {}
    assert changes_since(saved(config), change(config, {"resume": True, "overwrite": True})) == {}


@pytest.mark.parametrize(
    "path",
    ["data.path", "seed", "group_size", "prompts_per_step", "model.path", "model.dtype", "algorithm.loss"]
    + ["algorithm.clip_low", "overlap_steps", "sampling.carry_over", "generator.engine", "trainer.learning_rate"],
)
def test_what_the_result_depends_on(path):
    assert not is_resume_safe(path, GRPOConfig())


def test_what_the_result_does_not_depend_on():
    for path in ("run_dir", "roles.num_trainers", "checkpoint.keep", "evaluation.path", "trainer.micro_batch_tokens"):
        assert is_resume_safe(path, GRPOConfig())
    for path in ("reward.functions", "generator.max_completion_tokens"):  # SFT's evaluation
        assert is_resume_safe(path, SFTConfig()) and not is_resume_safe(path, GRPOConfig())
    assert not is_resume_safe("data.path", SFTConfig()) and is_resume_safe("num_steps", GRPOConfig())
    # what passes decides which rows a curriculum draws
    assert is_resume_safe("reward.pass_value", GRPOConfig())
    assert not is_resume_safe("reward.pass_value", change(GRPOConfig(), {"data.curriculum": "my.py:mine"}))
    # a schedule that ends with the steps
    assert not is_resume_safe("num_steps", change(GRPOConfig(), {"trainer.schedule": "cosine"}))


@pytest.mark.parametrize("config", [GRPOConfig(), SFTConfig()], ids=["grpo", "sft"])
def test_changes_are_shown_and_refused(config, tmp_path, capsys):
    before = change(config, {"run_dir": str(tmp_path)})
    os.close(begin_run(before, "train.py"))
    capsys.readouterr()
    assert is_same_run(before, saved(before))
    assert capsys.readouterr().out == ""
    longer = change(before, {"num_steps": 999, "checkpoint.keep": 5, "resume": True})
    assert is_same_run(longer, saved(before))
    assert capsys.readouterr().out == (
        f"resumed with another config than before\n  checkpoint.keep: 2 -> 5\n  num_steps: {before.num_steps} -> 999\n"
    )
    other = change(longer, {"seed": 7, "trainer.learning_rate": 1.0})
    with pytest.raises(ValueError, match="--allow-changes") as refused:
        is_same_run(other, saved(before))
    assert f"trainer.learning_rate: {before.trainer.learning_rate!r} -> 1.0; seed: 0 -> 7" in str(refused.value)
    assert "num_steps" not in str(refused.value)
    assert not is_same_run(change(other, {"allow_changes": True}), saved(before))
    assert "seed: 0 -> 7" in capsys.readouterr().out


def test_a_field_that_a_later_version_added_had_its_default_before():
    """A field that a later version took out is a change, since nobody knows what it did."""
    before = saved(GRPOConfig())
    del before["seed"]
    assert changes_since(before, GRPOConfig()) == {}
    assert changes_since(before | {"sed": "0"}, GRPOConfig(seed=7)) == {
        "seed: 0 -> 7": True,
        "sed: 0 -> not there": True,
    }
