"""Steps whose update was skipped: told once each, and after some in a row the end."""

import math
import types

import pytest

from grpo.roles.weight_sync import check_distance
from grpo.run.steps import Steps
from grpo.watch.failures import BadInput

GOOD = {"skipped_frac": 0.0}
BAD = {"skipped_frac": 0.5, "skipped/loss": 1.0}


def test_three_in_a_row_end_the_run(capsys):
    logged = []
    run_log = types.SimpleNamespace(log=lambda step, metrics: logged.append(step))
    driver = Steps(types.SimpleNamespace(config=None, roles=None, timer=None, run_log=run_log))
    for step, metrics in enumerate((BAD, BAD, GOOD, BAD, BAD), start=1):
        driver.log_step(step, metrics)
    told = capsys.readouterr().out.splitlines()
    assert told == [f"warning: step {n} skipped 50% of its update, because not finite: loss" for n in (1, 2, 4, 5)]
    with pytest.raises(BadInput, match="^step 6 skipped 50% .*: loss; so did the 2 before it.*--resume"):
        driver.log_step(6, BAD)
    assert logged == [1, 2, 3, 4, 5, 6]


def test_the_sync_is_blamed_for_a_mean_that_is_finite_and_above_the_tolerance():
    for mean in (math.nan, math.inf, 0.05):  # one token may differ by more
        check_distance(mean, 5.0, 0.1)
    with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
        check_distance(0.5, 0.5, 0.1)
