"""The parts as a library: the example for notebooks runs in one process, and its comments say what is true."""

import re

import pytest

from tests.torchrun import run_python


@pytest.mark.usefixtures("cold_starts")
def test_the_example_for_notebooks():
    output = run_python("-m", "configs.examples.notebook", deadline=240)
    assert "[1.0, 0.0]\n" in output
    assert "tensor([ 0.7070, -0.7070])" in output
    # advantage +-0.7070: -(1.2 * 0.7070) where clipped, exp(0.5) * 0.7070 where not
    assert len(re.findall(r"-0\.8484", output)) == len(re.findall(r" 1\.1657", output)) == 3
    # both loops took their two steps
    assert len(re.findall(r"^step [12]/2 ", output, re.MULTILINE)) == 4
    assert "grad" in output
    assert output.splitlines()[-1].startswith("done; everything is in ")  # nothing is said behind it
