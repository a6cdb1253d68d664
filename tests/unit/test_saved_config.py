"""Resuming with another config: what differs is shown, what breaks exactness is refused, the file is never run."""

import pathlib

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.recipes import as_recipe, changes_since, is_harmless, load_recipe
from grpo.folder.resume import is_same_run

RECIPES = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_config_has_not_changed_since_it_was_saved(recipe):
    config = load_recipe(str(recipe), GRPOConfig, SFTConfig)
    config = change(config, {"trainer.max_grad_norm": float("inf")})
    assert changes_since(as_recipe(config), config) == []
    assert changes_since(as_recipe(config), change(config, {"resume": True, "overwrite": True})) == []


def test_what_python_would_run_is_not_run(tmp_path):
    proof, config = tmp_path / "ran", change(GRPOConfig(), {"run_dir": str(tmp_path)})
    opening = f"open({str(proof)!r}, 'w')"
    for text in (f"{opening}\nconfig = c.GRPOConfig(seed=1)\n", f"config = c.GRPOConfig(seed={opening})\n"):
        assert changes_since(text, config) and not proof.exists()
    for text in (f"config = {opening}\n", "config = (", "", "config = 1\nconfig = 2\n", "import sys\n", "(" * 10_000):
        with pytest.raises(ValueError, match="no config that a run wrote"):
            changes_since(text, config)
    assert not proof.exists()


@pytest.mark.parametrize(
    "path",
    ["data.path", "seed", "group_size", "prompts_per_step", "model.path", "model.dtype", "algorithm.loss"]
    + ["algorithm.clip_low", "overlap_steps", "sampling.carry_over", "generator.engine", "trainer.learning_rate"],
)
def test_what_the_result_depends_on(path):
    assert not is_harmless(path, GRPOConfig())


def test_what_the_result_does_not_depend_on():
    for path in ("run_dir", "roles.num_trainers", "checkpoint.keep", "evaluation.path", "trainer.micro_batch_tokens"):
        assert is_harmless(path, GRPOConfig())
    for path in ("reward.functions", "generator.max_completion_tokens"):  # SFT's evaluation
        assert is_harmless(path, SFTConfig()) and not is_harmless(path, GRPOConfig())
    assert not is_harmless("data.path", SFTConfig()) and is_harmless("num_steps", GRPOConfig())
    # a schedule that ends with the steps
    assert not is_harmless("num_steps", change(GRPOConfig(), {"trainer.schedule": "cosine"}))


@pytest.mark.parametrize("config", [GRPOConfig(), SFTConfig()], ids=["grpo", "sft"])
def test_changes_are_shown_and_refused(config, tmp_path, capsys):
    before = change(config, {"run_dir": str(tmp_path)})
    (tmp_path / "config.py").write_text(as_recipe(before))
    assert is_same_run(before)
    assert capsys.readouterr().out == ""
    longer = change(before, {"num_steps": 999, "checkpoint.keep": 5, "resume": True})
    assert is_same_run(longer)
    assert capsys.readouterr().out == (
        f"resumed with another config than before\n  checkpoint.keep: 2 -> 5\n  num_steps: {before.num_steps} -> 999\n"
    )
    other = change(longer, {"seed": 7, "trainer.learning_rate": 1.0})
    with pytest.raises(ValueError, match="--allow-changes") as refused:
        is_same_run(other)
    assert f"trainer.learning_rate: {before.trainer.learning_rate!r} -> 1.0; seed: 0 -> 7" in str(refused.value)
    assert "num_steps" not in str(refused.value)
    assert not is_same_run(change(other, {"allow_changes": True}))
    assert "seed: 0 -> 7" in capsys.readouterr().out


def test_a_field_that_only_one_of_the_two_has_is_a_change():
    text = as_recipe(GRPOConfig()).replace("    seed=0,\n", "    sed=5,\n")
    changes = [(c.path, c.old, c.new, c.breaks_exactness) for c in changes_since(text, GRPOConfig())]
    assert changes == [("seed", "not there", "0", True), ("sed", "5", "not there", True)]


def test_a_config_that_is_missing_or_somebodys_own_is_no_obstacle(tmp_path, capsys):
    config = change(GRPOConfig(), {"run_dir": str(tmp_path)})
    assert not is_same_run(config)
    (tmp_path / "config.py").write_text("import sys\n")
    assert not is_same_run(config)
    assert capsys.readouterr().out.count("cannot be compared with this run's config") == 2
