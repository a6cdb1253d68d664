"""The gradient of a step does not depend on how it is split: ranks, micro-batches, packing, order of completions.

Nor on how often FSDP gathers the weights and adds up the gradients.
"""

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


def test_gradient_is_the_same_however_the_step_is_split(tmp_path):
    folder = make_tiny(tmp_path, "qwen3-tied")
    # the first writes what the others compare with
    for nproc, gather in ((1, "micro_batch"), (2, "micro_batch"), (2, "update")):
        print(torchrun("tests/dist/programs/normalisation.py", folder, tmp_path, gather, nproc=nproc, deadline=120))
