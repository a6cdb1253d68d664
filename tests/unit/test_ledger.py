"""The slowest rank of each phase, and the phases that the ledger knows."""

import pathlib
import re

import torch

from grpo.config import MetricsConfig
from grpo.report.ledger import PHASES, slowest_ranks
from grpo.report.log import RunLog

ROOT = pathlib.Path(__file__).parents[2]


def seconds(**of_ranks: list[float]) -> torch.Tensor:
    """[R, PHASES] with these seconds of ranks 0, 1, ..., and 0 elsewhere."""
    num_ranks = len(next(iter(of_ranks.values())))
    return torch.tensor([of_ranks.get(phase, [0.0] * num_ranks) for phase in PHASES], dtype=torch.float64).T


def test_the_slowest_rank_of_each_phase_that_anyone_worked_in():
    assert slowest_ranks(seconds(generate=[0.5, 3.0, 4.0], train=[2.0, 1.0, 0.0])) == {
        "time/generate_max": 4.0,
        "time/generate_max_rank": 2,
        "time/train_max": 2.0,
        "time/train_max_rank": 0,
    }
    assert slowest_ranks(seconds(train=[2.0])) == {}  # one rank is the slowest of itself


def test_every_phase_of_the_scripts_is_in_the_ledger():
    named = set()
    for file in ("train_grpo.py", "grpo/run/driver.py", "grpo/run/step_timer.py"):
        named |= set(re.findall(r'phase\("(\w+)"\)', (ROOT / file).read_text()))
    assert named | {"other"} == set(PHASES)


def test_ledger_file(tmp_path):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=2)
    assert log.ledger(None) == {} and not (tmp_path / "ledger.jsonl").exists()
    assert log.ledger((3, seconds(train=[2.0, 1.0])))["time/train_max"] == 2.0
    line = (tmp_path / "ledger.jsonl").read_text()
    assert line.startswith('{"step": 3, ') and '"train": [2.0, 1.0]' in line and line.count("\n") == 1
