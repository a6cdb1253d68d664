"""The gradient does not depend on how a step is split."""

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


def test_gradient_is_the_same_however_the_step_is_split(tmp_path):
    folder = make_tiny(tmp_path, "qwen3-tied")
    for nproc in (1, 2):  # the first writes what both compare with
        print(torchrun("tests/dist/programs/normalisation.py", folder, tmp_path, nproc=nproc))
