"""Resuming with another config: what differs is shown, what breaks exactness is refused, the file is never run."""

import dataclasses
import pathlib
from operator import attrgetter

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.fields import complete
from grpo.config.recipes import as_recipe, field_paths, load_recipe
from grpo.config.saved import HARMLESS, HARMLESS_IN_SFT, changes_since, is_harmless, read_saved
from grpo.folder.resume import is_same_run

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
EVERY_FIELD = {*field_paths(GRPOConfig()), *field_paths(SFTConfig())}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_saved_config_is_read_as_it_is(recipe):
    config = complete(load_recipe(str(recipe), GRPOConfig, SFTConfig))
    values = read_saved(as_recipe(config))
    leaves = [p for p in field_paths(config) if not dataclasses.is_dataclass(attrgetter(p)(config))]
    assert list(values) == leaves or set(values) == set(leaves)
    for path, value in values.items():
        assert value == attrgetter(path)(config), path
    assert changes_since(as_recipe(config), config) == []


def test_what_python_would_run_is_not_run(tmp_path):
    proof = tmp_path / "ran"
    for text in (
        f"open({str(proof)!r}, 'w')\nconfig = c.GRPOConfig(seed=1)\n",
        f"config = c.GRPOConfig(seed=open({str(proof)!r}, 'w'))\n",
        f"config = open({str(proof)!r}, 'w')\n",
        "config = c.GRPOConfig(*x)\n",
        "config = (",
        "",
        "config = 1\nconfig = 2\n",
    ):
        try:
            read_saved(text)
        except ValueError as error:
            assert "no config that a run wrote" in str(error) or "malformed" in str(error) or "unpack" in str(error)
        assert not proof.exists()


def test_infinite_numbers_are_read():
    config = change(GRPOConfig(), {"trainer.max_grad_norm": float("inf")})
    assert read_saved(as_recipe(config))["trainer.max_grad_norm"] == float("inf")
    assert changes_since(as_recipe(config), config) == []


def test_every_harmless_field_exists():
    for name in HARMLESS + HARMLESS_IN_SFT:
        assert any(path.startswith(name) if name.endswith(".") else path == name for path in EVERY_FIELD), name


@pytest.mark.parametrize(
    "path",
    ["data.path", "seed", "group_size", "prompts_per_step", "model.path", "model.dtype", "algorithm.loss"]
    + ["overlap_steps", "sampling.carry_over"],
)
def test_what_the_result_depends_on(path):
    assert not is_harmless(path, GRPOConfig())


def test_sft_may_change_what_only_its_evaluation_reads():
    for path in ("reward.functions", "generator.max_completion_tokens", "data.answer_column"):
        assert is_harmless(path, SFTConfig()) and not is_harmless(path, GRPOConfig())
    assert not is_harmless("data.path", SFTConfig())


def test_the_number_of_steps_moves_a_schedule_that_ends_with_them():
    assert is_harmless("num_steps", GRPOConfig())
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


def test_fields_that_one_of_the_two_versions_does_not_have(tmp_path):
    config = GRPOConfig()
    text = as_recipe(config).replace("    seed=0,\n", "    sed=5,\n")
    (gone,) = changes_since(text, config)  # a new field counts with its default
    assert (gone.path, gone.old, gone.new, gone.breaks_exactness) == ("sed", "5", "not there", True)


def test_a_config_that_is_missing_or_somebodys_own_is_no_obstacle(tmp_path, capsys):
    config = change(GRPOConfig(), {"run_dir": str(tmp_path)})
    assert not is_same_run(config)
    (tmp_path / "config.py").write_text("import sys\n")
    assert not is_same_run(config)
    assert capsys.readouterr().out.count("cannot be compared with this run's config") == 2
