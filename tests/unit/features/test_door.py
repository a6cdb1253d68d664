"""The door: which features a config turns on, and what happens without their folders."""

import ast
import pathlib

import pytest

from grpo import features
from grpo.config import GRPOConfig, change
from grpo.config.checks import validate

ROOM = "room.py:Room"
FOLDER = pathlib.Path(features.__file__).parent
TURNED_ON = {
    "agents": [{"environment.agent": "my.py:run"}],
    "environments": [{"environment.name": ROOM}, {"algorithm.advantages": "return_to_go"}],
    "hub": [{"checkpoint.push_to_hub": "me/mine"}],
    "programs": [{"reward.functions": {"code_reward": 1.0}}, {"environment.tools": ("python",)}],
    "reward_model": [{"reward.model": "my/judge"}],
    "wandb": [{"metrics.wandb_project": "mine"}],
}


def test_the_door_names_every_folder_and_each_has_a_page():
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == {*features.present()} <= {*features.FEATURES}
    assert all((FOLDER / name / "README.md").is_file() for name in features.present())


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for name in TURNED_ON for fields in TURNED_ON[name]])
def test_a_config_that_needs_a_deleted_feature_is_refused_by_its_name(name, fields, monkeypatch):
    others = {"machine", "qwen3_5", "show", "trial"}  # which no GRPO config needs
    assert TURNED_ON.keys() | others == features.FEATURES.keys()
    here = [other for other in features.present() if other != name]
    monkeypatch.setattr(features, "present", lambda: here)
    validate(GRPOConfig())
    lacking = "|".join(features.FEATURES.keys() - here)
    with pytest.raises(ValueError, match=f"needs grpo/features/({lacking}), which this checkout lacks"):
        validate(change(GRPOConfig(), fields))


@pytest.mark.parametrize("name", features.present())
def test_no_module_takes_the_place_of_a_hook(name):
    """Python sets a module, once it is imported, as an attribute of its package, over a function of the same name."""
    hooks = set()
    for node in ast.parse((FOLDER / name / "__init__.py").read_text()).body:
        hooks |= {target.id for target in getattr(node, "targets", [])} | {getattr(node, "name", "")} - {""}
    assert hooks and not hooks & {path.stem for path in (FOLDER / name).glob("*.py")}
