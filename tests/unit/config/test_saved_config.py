"""Resuming with another config: what differs is shown, and what breaks exactness is refused."""

import json
import pathlib

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.recipes import RESUME_SAFE, field_paths, is_resume_safe, load_recipe
from grpo.config.user_files import load_function, own_files
from grpo.folder.was_read import READ, WasRead
from grpo.run.saved import begin_to_read

RECIPES = sorted((pathlib.Path(__file__).parents[3] / "configs").glob("*.py"))


def resumed(config: GRPOConfig | SFTConfig, before: GRPOConfig | SFTConfig, **parts: dict[str, str]) -> WasRead:
    """What a run reads that is resumed with `config` from step 3 of another one."""
    saved = json.loads(json.dumps({**begin_to_read(before, {}).facts, **parts}))
    return begin_to_read(config, {"step": 3, READ: saved})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_config_has_not_changed_since_it_was_saved(recipe, capsys):
    config = load_recipe(str(recipe), GRPOConfig, SFTConfig)
    config = change(config, {"trainer.max_grad_norm": float("inf")})
    assert resumed(change(config, {"resume": True, "overwrite": True}), config).is_same_run
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "path",
    ["data.path", "seed", "group_size", "prompts_per_step", "model.path", "model.dtype", "algorithm.loss"]
    + ["algorithm.clip_low", "overlap_steps", "sampling.carry_over", "generator.engine", "trainer.learning_rate"],
)
def test_what_the_result_depends_on(path):
    assert not is_resume_safe(path, GRPOConfig())


def test_what_the_result_does_not_depend_on():
    assert {*RESUME_SAFE.split()} <= {*field_paths(GRPOConfig()), *field_paths(SFTConfig())}
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
def test_changes_are_shown_and_refused(config, capsys):
    longer = change(config, {"num_steps": 999, "checkpoint.keep": 5, "resume": True})
    assert resumed(longer, config).is_same_run
    lines = ["checkpoint.keep: 2 -> 5", f"num_steps: {config.num_steps} -> 999"]
    assert capsys.readouterr().out == "".join(f"resumed with a change: {line}\n" for line in lines)
    other = change(longer, {"seed": 7, "trainer.learning_rate": 1.0})
    with pytest.raises(ValueError, match="since step 3 was saved: .*--allow-changes") as refused:
        resumed(other, config)
    assert f"trainer.learning_rate: {config.trainer.learning_rate!r} -> 1.0; seed: 0 -> 7" in str(refused.value)
    assert "num_steps" not in str(refused.value)
    assert not resumed(change(other, {"allow_changes": True}), config).is_same_run
    assert "resumed with a change: seed: 0 -> 7\n" in capsys.readouterr().out


def test_a_field_of_another_version_is_a_change():
    for added, message in (({"sed": "0"}, "sed: 0 -> not there"), ({}, "seed: not there -> 0")):
        saved = begin_to_read(GRPOConfig(), {}).facts
        saved["config"] = {name: value for name, value in saved["config"].items() if name != "seed" or added} | added
        with pytest.raises(ValueError, match=message):
            begin_to_read(GRPOConfig(), {"step": 3, READ: saved})


def test_an_edited_file_is_named_and_other_weights_are_refused(capsys):
    """What a change of the config brings or takes away, such as a second function, is said there."""
    files = {"files/mine.py": "aa", "files/gone.py": "cc", "script.py": "ee"}
    read = resumed(GRPOConfig(), GRPOConfig(), files=files, weights={"model.path": "aa"}, rows={})
    assert not read.note("files", {"files/mine.py": "bb", "files/new.py": "dd", "script.py": "ee"})
    assert capsys.readouterr().out == "resumed with a change: mine.py differs from the one of step 3\n"
    assert read.note("weights", {"model.path": "aa"}) and read.is_same_run
    with pytest.raises(ValueError, match="since step 3 was saved: model.path: aa -> bb.*--allow-changes"):
        read.note("weights", {"model.path": "bb"})


def test_the_files_that_a_config_names(tmp_path):
    """In any field, also one that names it as an entry; with what it imports from beside it, and each once."""
    (tmp_path / "other").mkdir()
    for name in ("mine.py", "beside_mine.py", "chat.jinja", "play.sh", "other/mine.py", "unused.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    with open(tmp_path / "mine.py", "a") as file:
        file.write("import beside_mine\ndef f(completions): return []\n")
    load_function(f"{tmp_path}/mine.py:f", "reward")
    changes = {
        "reward.functions": {f"{tmp_path}/mine.py:f": 1.0},
        "algorithm.loss": f"{tmp_path}/other/mine.py:loss",
        "data.path": f"{tmp_path}/mine.py:rows:train[:9]",
        "data.prompt_template": f"{tmp_path}/chat.jinja",
        "model.path": f"{tmp_path}/absent.py:model",
        "environment.agent": f"bash {tmp_path}/play.sh --steps 3",
    }
    texts = own_files(change(GRPOConfig(), changes))
    assert texts.keys() == {"mine.py", "beside_mine.py", "chat.jinja", "play.sh", "other-mine.py"}
    assert texts["other-mine.py"] == "# other/mine.py\n" and "def f" in texts["mine.py"]
