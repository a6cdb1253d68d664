"""Conversations as engine and trainer see them."""

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun
from tests.unit.environments.test_turns_suffix import CARRIED


def test_what_is_trained_on_is_what_was_sampled_whatever_the_template(tmp_path):
    output = torchrun("tests.dist.programs.turns", tmp_path, nproc=1)
    assert output.count("turns, log-probs within") == len(CARRIED)


def test_what_an_environment_wrote_has_no_gradient(tmp_path):
    folder = make_tiny(tmp_path, "qwen3-tied")
    output = torchrun("tests.dist.programs.observations", folder, nproc=1)
    assert "what an environment wrote has no gradient" in output
