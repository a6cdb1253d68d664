"""Whatever the chat template, what is trained on is what was sampled: ids only grow, log-probs are the engine's."""

from tests.torchrun import torchrun
from tests.unit.features.environments.test_turns_suffix import CARRIED


def test_what_is_trained_on_is_what_was_sampled_whatever_the_template(tmp_path):
    output = torchrun("tests.dist.programs.turns", tmp_path, nproc=1)
    assert output.count("turns, log-probs within") == len(CARRIED)
