"""Mixture of experts: the trainer computes with the experts that the engine took."""

from tests.torchrun import torchrun


def test_only_replayed_routes_give_the_engines_log_probs(tmp_path):
    output = torchrun("tests.dist.programs.routes", tmp_path, nproc=1, deadline=240)
    print(output)
    assert output.count("replayed: mismatch/mean") == 3
