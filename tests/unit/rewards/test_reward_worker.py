"""One reward process: what a function may return, which functions run confined, and which variables they get."""

import decimal
import fractions
import math
import os
import pathlib

import numpy as np
import pytest
import torch

from grpo.config import RewardConfig
from grpo.rewards import loading
from grpo.rewards.loading import part
from grpo.rewards.pool import RewardPool
from grpo.types import Prompt, Rollout
from grpo.workers import kernel, processes
from grpo.workers.worker import Failure, plain_values
from tests.rollouts import completion

# ---- Values


class Unspeakable:
    def __repr__(self):
        raise KeyError("no words")


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ([1.5, None, True, -1e9], [1.5, None, 1.0, -1e9]),
        ([fractions.Fraction(1, 4), decimal.Decimal("0.5")], [0.25, 0.5]),
        (np.array([1.0, None], dtype=object), [1.0, None]),
        ([np.float16(0.5), np.int64(3), np.bool_(True), torch.tensor(0.5)], [0.5, 3.0, 1.0, 0.5]),
        (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
    ],
)
def test_what_is_a_number_becomes_a_float(values, plain):
    found = plain_values(values, len(plain))
    assert found == plain
    assert type(found) is list and all(value is None or type(value) is float for value in found)


@pytest.mark.parametrize(
    ("values", "failure"),
    [
        ([math.nan], "nan (float), not None or a finite number"),
        ([1.1e9], "1100000000.0 (float), not None or a finite number of at most 1e+09"),
        ([10**6000], "a value that cannot be shown (int), not"),
        (["1"], "'1' (str), not"),
        ([1j], "1j (complex), not"),
        ([Unspeakable()], "a value that cannot be shown (Unspeakable), not"),
        ([torch.tensor([1.0])], "tensor([1.]) (Tensor), not"),
        ([1.0, 2.0], "returned 2 values for 1 completions"),
        (np.ones((1, 1)), "(ndarray), not a list with 1 values"),
        (1.0, "1.0 (float), not a list with 1 values"),
    ],
)
def test_what_is_none_is_a_failure_that_says_what_came(values, failure):
    with pytest.raises(Failure) as caught:
        plain_values(values, 1)
    assert failure in str(caught.value) and len(str(caught.value)) < 700


# ---- Who gets what

OWN = r"""
import os, pathlib, tempfile
def sees_a_secret(completions, **columns):
    places = [os.environ, pathlib.Path("/proc/self/environ"), pathlib.Path(f"/proc/{os.getppid()}/environ")]
    texts = [str(dict(place)) if place is os.environ else place.read_bytes().decode() for place in places]
    return [float(sum("hunter2" in text for text in texts))]
def needs_a_key(completions, **columns):
    return [float(len(os.environ["JUDGE_KEY"]))]
def plain_key_error(completions, **columns):
    return [{}["JUDGE_KEY"]]
def writes(completions, **columns):
    pathlib.Path(__file__).with_name("written").write_text(completions[0])
    pathlib.Path(__file__).with_name("temporary").write_text(tempfile.mkdtemp())
    return [1.0]
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def rewards(functions: list[str], *texts: str, fields: dict | None = None, **columns) -> list[Rollout]:
    config = RewardConfig(
        functions=dict.fromkeys(functions, 1.0), num_workers=1, timeout_seconds=600.0, **(fields or {})
    )
    pool = RewardPool(config, 100)
    try:
        pool.submit([completion([1], prompt=Prompt(0, [1], columns), text=text) for text in texts], 1)
        return pool.collect()
    finally:
        pool.close()


def test_no_secret_reaches_a_reward_process(own, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "ANYTHING", "OMP_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    assert rewards([f"{own}:sees_a_secret"], "a")[0].reward == 0.0
    assert rewards([f"{own}:sees_a_secret"], "a", fields={"environment": ("ANYTHING",)})[0].reward == 3.0


def test_which_variables_are_passed_on(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    passed = ["PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS"]
    others = ["HF_HOME", "HF_TOKEN", "PATH_KEY", "MY_PATH", "MKL_SECRET", "PYTHON_TOKEN", "MASTER_ADDR", "WANTED"]
    for name in passed + others:
        monkeypatch.setenv(name, "x")
    assert sorted(processes.environment(["WANTED"])) == sorted([*passed, "WANTED"])
    with pytest.raises(ValueError, match="reward.environment names ABSENT, which is not set"):
        processes.environment(["WANTED", "ABSENT"])


def test_a_variable_that_is_missing_says_how_to_have_it(own, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    (scored,) = rewards([f"{own}:needs_a_key"], "a")
    assert "own.py:8); reward functions get few environment variables" in scored.failures[f"{own}:needs_a_key"]
    assert rewards([f"{own}:needs_a_key"], "a", fields={"environment": ("JUDGE_KEY",)})[0].reward == 7.0
    (scored,) = rewards([f"{own}:plain_key_error"], "a")
    assert scored.failures[f"{own}:plain_key_error"] == f"KeyError: 'JUDGE_KEY' ({own}:10)"


def test_built_in_functions_and_the_users_own_run_in_different_processes(own, tmp_path):
    """One worker each: that of the built-in has a filter of system calls (Seccomp 2), the other has none."""
    functions = ["math_reward", "thinking_reward", f"{own}:writes"]
    config = RewardConfig(functions=dict.fromkeys(functions, 1.0), options={"thinking_reward": {}}, num_workers=1)
    confined, other = part(config, confined=True), part(config, confined=False)
    assert list(confined.functions) == functions[:2] and list(other.functions) == functions[2:]
    assert confined.options == {"thinking_reward": {}} and other.options == {}

    pool = RewardPool(config, 100)
    supervisors = [pool.workers[confined].supervisor.pid for confined in (True, False)]
    modes = [filter_mode(pid) for supervisor in supervisors for pid in processes.children(supervisor)]
    pool.close()
    assert modes == ["2" if kernel.can_deny_calls() else filter_mode("self"), filter_mode("self")]

    (scored,) = rewards(functions, "<think>a</think><answer>5</answer>", answer="5")
    assert scored.rewards == dict.fromkeys(functions, 1.0) and scored.failures == {}
    assert (tmp_path / "written").read_text().startswith("<think>")
    assert not os.path.exists((tmp_path / "temporary").read_text())  # temporary files end with the run


def filter_mode(pid: int | str) -> str:
    return pathlib.Path(f"/proc/{pid}/status").read_text().partition("Seccomp:")[2].split()[0]


def test_a_kernel_without_landlock_runs_built_in_rewards_and_says_so(monkeypatch, capfd):
    monkeypatch.setattr(loading.lockdown, "landlock_version", lambda: 0)
    (scored,) = rewards(["format_reward"], "a")
    assert scored.failures == {}
    assert "warning: this kernel has no Landlock: processes of built-in rewards" in capfd.readouterr().out
