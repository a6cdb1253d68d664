"""Every row of the table of methods takes two steps, and a method of older weights samples a step ahead."""

import itertools
import math

import pytest

from grpo.tools.recorded import read_step
from tests.e2e.runs import NO_KL, read_metrics, run_tiny, split
from tests.methods import methods
from tests.torchrun import run_python

DPPO = "configs/examples/methods/dppo.py:dppo"
# Rows that at the weights of the sampler have one gradient: clips cannot act, so advantages and averages say all. No
# token of these steps lies within the bounds of Clip-Cov.
ALIKE = [{"GRPO", "GSPO", "SAPO", "GMPO"}, {"DAPO", "CISPO", "Dual clip", "VESPO", "Clip-Cov"}, {"Dr. GRPO", "DPPO"}]


def test_every_method_takes_two_steps(model, tmp_path):
    """On two steps of episodes that DPPO sampled ahead, without a correction, and whose turns have rewards."""
    episodes = pytest.importorskip("tests.e2e.test_environments", reason="return_to_go needs environments")
    method = f"--algorithm.loss {DPPO} --algorithm.old-logprobs generator --algorithm.advantages return_to_go {NO_KL}"
    flags = f"{episodes.DIGITS} {episodes.ROOM} {split(1, 0, 1)} {method} --overlap-steps 1 --record"
    run_tiny(model, tmp_path / "live", flags, "--seed 1", nproc=2)  # with others Clip-Cov and DAPO can differ at once
    parts_FR = read_step(str(tmp_path / "live"), 1).batch.parts_FR
    assert parts_FR.shape == (2, 16) and (parts_FR > 0).any(1).all()  # the environment's, and a reward function's

    run_python("-m", "tests.e2e.each_method", tmp_path / "live", tmp_path)
    first = {}
    for name in methods():
        steps = [record for record in read_metrics(tmp_path / name) if "loss" in record]
        assert [record["step"] for record in steps] == [1, 2], name
        assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in steps), name
        first[name] = steps[0]["grad_norm"]
    assert "loss/divergence_mean" in read_metrics(tmp_path / "DPPO")[0]
    for one, other in itertools.combinations(first, 2):
        alike = any({one, other} <= names for names in ALIKE)
        assert math.isclose(first[one], first[other], rel_tol=1e-4) == alike, (one, other)
