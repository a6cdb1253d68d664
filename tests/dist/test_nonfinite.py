"""A NaN on one rank is seen on all before it is used, and leaves no trace in weights, moments or schedule."""

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


def test_an_update_is_skipped_by_all_ranks_wherever_the_nan_is(tmp_path):
    folder = make_tiny(tmp_path, "qwen3-tied")
    output = torchrun("tests.dist.programs.nonfinite", folder, nproc=2)
    for place in ("reference", "old", "advantages", "policy", "loss", "gradient"):
        assert f"{place}: skipped on both ranks, then as if it had not been" in output
