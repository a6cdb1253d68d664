"""Whatever a recipe, a flag or a user's file says: it is taken, or refused by one line that names it."""

import math

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.checks import validate
from grpo.config.recipes import field_paths, load, load_recipe
from grpo.config.user_files import load_function
from grpo.config.values import check_fields
from tests.door import LACKS

MOST_CHARACTERS = 2000  # of a message
HUGE = 10**30
ODD_VALUES = (None, True, -1, HUGE, math.nan, math.inf, "", "x", "\ud800", (), ("x", 1), {1: 2}, {"x": "y"}, object())


@pytest.mark.parametrize("config", [GRPOConfig(), SFTConfig()], ids=["grpo", "sft"])
def test_any_field_takes_an_odd_value_or_names_it(config):
    """Each field with each value; what fits its type and bounds may still be refused for what it means."""
    num_refused = 0
    for path in field_paths(config):
        for value in ODD_VALUES:
            try:
                check_fields(changed := change(config, {path: value}))
                validate(changed)
            except ValueError as error:
                message, name = str(error), path.rpartition(".")[2]
                num_refused += 1
                is_named = name in message or (value == HUGE and str(HUGE)[:20] in message)  # a sum of two fields, say
                is_named |= LACKS in message
                assert is_named and "\n" not in message and len(message) < MOST_CHARACTERS, (path, message)
    assert num_refused > 8 * len(list(field_paths(config)))  # of 14 values


# Files in place of a recipe, and what is said behind their names
RECIPES = {
    "NUL bytes": (b"\0\0\0", "null bytes"),
    "nothing": (b"", "it binds NoneType"),
    "a recipe of SFT": (
        b"from grpo import config as c\nconfig = c.SFTConfig()",
        "it binds SFTConfig, which is for train_sft",
    ),
    "a dict": (b"config = {'num_steps': 3}", "it binds dict"),
    "YAML": (b"num_steps: 3\nmodel:\n  path: x\n", "line 2: SyntaxError"),
    "recursion": (b"def f():\n    f()\nf()", "RecursionError"),
    "an end of the program": (b"import sys\nsys.exit(0)", "line 2: SystemExit"),
    "an error of several lines": (b"raise ValueError('one\\ntwo\\nthree')", "one two three"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_that_is_no_recipe(name, tmp_path):
    content, said = RECIPES[name]
    (tmp_path / "mine.py").write_bytes(content)
    with pytest.raises(ValueError) as refused:
        load_recipe(str(tmp_path / "mine.py"), GRPOConfig)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/mine.py") and said in message
    assert "\n" not in message and len(message) < MOST_CHARACTERS


# Files in place of a user's own reward, loss or row function
FUNCTIONS = RECIPES | {
    "another name": (b"def g(): pass", "has no function 'f'"),
    "a value of that name": (b"f = 3", "has no function 'f'"),
    "a module that is not there": (b"import no_such_module", "line 1: ModuleNotFoundError"),
}
NO_FILES = ("", ":", "f", "file.py:", "file.txt:f", "no.py:f")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "bind" not in FUNCTIONS[name][1]])
def test_a_file_without_the_function(name, tmp_path):
    content, said = FUNCTIONS[name]
    path = tmp_path / "mine.py"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        load_function(f"{path}:f", "loss")
    message = str(refused.value)
    assert message.startswith("loss file ") and str(path) in message and said in message and "\n" not in message


@pytest.mark.parametrize("spec", NO_FILES)
def test_what_names_no_function(spec):
    with pytest.raises(ValueError, match="^loss ") as refused:
        load_function(spec, "loss")
    assert "\n" not in str(refused.value)


# ---- the command line -----------------------------------------------------------------------------------------------

FLAGS = {
    "--num-steps three": "--num-steps",
    "--num-steps": "--num-steps",
    "--learning-rate 1e-5": "Perhaps you meant: --trainer.learning-rate",
    "actor_rollout_ref.rollout.n=8 data.train_batch_size=64": "docs/from-verl.md have their names",
    "trainer.learning_rate=1e-5": "trainer.learning_rate=1e-5; docs/from-trl.md",
    "--record true": "true; write --field VALUE, --field NAME VALUE NAME VALUE .., or for a switch --field or",
    "--no-trainer.compile": "--no-trainer.compile",
    "--trainer.learning-rate fast": "--trainer.learning-rate",
    "--algorithm.kl-in both": "Expected one of ('loss', 'reward'); write",
    "--generator.engine {": "generator.engine",
    "--reward.functions math_reward": "--reward.functions [STR FLOAT [STR FLOAT ...]]",
    "--data.columns solution": "--data.columns [STR STR [STR STR ...]]",
    "--data.path a a.jsonl b": "--data.path",
    "--generator.temperature 0": "generator.temperature=(0.0,) must be a tuple, each entry a number, at least 0.01",
    "--num-steps 2 configs/toy_sft.py": "configs/toy_sft.py: a recipe stands before the first flag",
    "--data.path \0": "data.path",
    "stray": "stray",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_are_none(flags):
    """One line that names the flag or field."""
    with pytest.raises(ValueError) as refused:
        load(GRPOConfig, "", ["tests/e2e/tiny.py", *flags.split(" ")])
    assert FLAGS[flags] in str(refused.value) and "\n" not in str(refused.value)
