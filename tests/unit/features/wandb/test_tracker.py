"""Weights & Biases: what it is given (by a stand-in for the package), and the package itself in offline mode."""

import importlib.util
import math
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from grpo.config import GRPOConfig, MetricsConfig, change
from grpo.features.wandb import open_tracker
from grpo.report.log import RunLog
from grpo.run.command_line import checked_config
from grpo.types import Prompt
from tests.rollouts import completion
from tests.unit.workers.processes import wait_until

METRICS = MetricsConfig(tensorboard=False, wandb_project="additions")
ROLLOUT = completion(
    [3],
    prompt=Prompt(0, [1, 2], columns={"answer": 3}),
    ended_by="tokens",
    text="3\x1b[2J",
    rewards={"math_reward": 1.0},
    reward=1.0,
)


@pytest.fixture
def wandb(monkeypatch) -> Iterator[mock.MagicMock]:
    """A stand-in that records what the package is told."""
    wandb = mock.MagicMock()
    wandb.init.return_value = wandb
    wandb.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    yield wandb
    sys.modules.pop("grpo.features.wandb.tracker", None)  # which has imported it


def open_log(run_dir: pathlib.Path, start_step: int = 0, **changes: object) -> RunLog:
    """As a session does."""
    config = change(GRPOConfig(metrics=METRICS, run_dir=str(run_dir)), changes)
    tracker = open_tracker(config, start_step)
    return RunLog(METRICS, str(run_dir), num_steps=9, start_step=start_step, trackers=[tracker])


def test_metrics_and_samples_reach_the_project(wandb, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    options = {"judge": {"url": "u", "api_key": "sk-1", "keys": ["a"], "many": [{"hf_TOKEN": "t"}], "token": 5}}
    words = ["train_grpo.py", "--reward.options", "judge", str(options["judge"])]
    monkeypatch.setattr(sys, "argv", words)
    wandb.init.side_effect = lambda **_: [sent.append(list(sys.argv)), wandb][1]  # it sends the command line too
    sent = []
    log = open_log(run_dir, **{"reward.options": options})
    log.log(1, {"loss": 0.5, "kl": math.nan})
    log.completions(1, [ROLLOUT], ["1+2="])
    log.log_held_out(1, {"eval/accuracy": 0.25})
    log.close()
    init = wandb.init.call_args.kwargs
    assert (init["project"], init["name"], init["dir"]) == ("additions", "run", str(run_dir))
    shown = {"judge": {"url": "u", "api_key": "...", "keys": ["a"], "many": [{"hf_TOKEN": "..."}], "token": 5}}
    assert (init["config"]["reward"]["options"], init["resume"]) == (shown, "allow")
    assert init["config"]["algorithm"]["clip_high"] == 0.2  # what follows from the loss
    assert options["judge"]["api_key"] == "sk-1"
    assert sent == [[*words[:3], str(shown["judge"])]] and sys.argv is words
    wandb.define_metric.assert_called_with("*", step_metric="step")
    first, samples, evaluation = (call.args[0] for call in wandb.log.call_args_list)
    assert (first["step"], first["loss"]) == (1, 0.5) and math.isnan(first["kl"])
    (shown,) = samples["samples"]
    assert samples["step"] == 1 and shown == {"prompt": "1+2=", "completion": "3\\x1b[2J", "reward": "1.0"}
    assert evaluation == {"step": 1, "eval/accuracy": 0.25}
    wandb.finish.assert_called_once_with()


def test_a_resumed_run_is_the_same_one_and_a_fresh_one_another(wandb, tmp_path):
    for start_step in (0, 5, 0):
        open_log(tmp_path, start_step).close()
    first, resumed, fresh = (call.kwargs["id"] for call in wandb.init.call_args_list)
    assert first == resumed != fresh


def test_without_the_package_it_is_refused_while_the_command_line_is_read(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="wandb_project='mine' needs a package: pip install wandb"):
        checked_config(GRPOConfig, ["--metrics.wandb-project", "mine"])


def test_the_package_itself_offline(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = open_log(tmp_path)
    log.log(1, {"loss": 0.5})
    log.completions(1, [ROLLOUT], ["1+2="])
    log.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    for word in (b"loss", b"samples"):
        wait_until(lambda word=word: word in written.read_bytes(), "wandb's own process to write")
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
