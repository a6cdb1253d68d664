"""Which seconds the learning bench counts."""

import sys

import pytest

from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import learning

OURS = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 1, "time/startup": 60, "time/step": 2},
    {"step": 2, "eval/accuracy": 0.5},  # written before its step's line
    {"step": 2, "time/step": 3, "time/evaluate": 1},
]
TRL = [
    {"step": 0, "eval/accuracy": 0.4},
    {"step": 0, "time/startup": 60},
    {"step": 1, "time/step": 2},
    {"step": 2, "time/step": 2},  # its steps are without evaluations
    {"step": 2, "eval/accuracy": 0.5},
]


@pytest.mark.parametrize("lines", [OURS, TRL])
def test_seconds_are_those_since_the_launch_without_evaluations(lines):
    assert learning.curve(lines) == [(0, 60, 0.4), (2, 60 + 2 + 2, 0.5)]
