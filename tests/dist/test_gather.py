"""Full tensors under HF names, out of weights in every sharding, bit by bit those that were loaded."""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

CASES = {  # ranks: (model, tensor_parallel, data_replicas, LoRA's rank)
    # FSDP with uneven shards: 32 rows, or 4 experts, over 3 ranks
    3: [("qwen2-untied", 1, 1, 0), ("qwen3-tied", 1, 1, 4), ("moe", 1, 1, 4)],
    4: [
        ("qwen2-untied", 2, 1, 0),  # FSDP x TP
        ("qwen3-tied", 2, 1, 4),
        ("qwen3-tied", 1, 2, 0),  # replicas x FSDP
        ("qwen2-untied", 2, 2, 0),  # replicas x TP
        ("llama3", 1, 4, 0),  # replicas alone
        ("moe", 2, 1, 0),
        ("moe", 2, 2, 4),
    ],
    8: [
        ("moe", 1, 1, 0),  # more ranks than experts, of which each rank has some rows
    ],
}


@pytest.mark.parametrize("nproc", [3, *(pytest.param(nproc, marks=pytest.mark.slow) for nproc in (4, 8))])
def test_gathered_tensors_are_those_of_the_folder(tmp_path, nproc):
    kinds = {kind: make_tiny(tmp_path, kind) for kind, *_ in CASES[nproc]}
    arguments = [",".join(map(str, (kinds[kind], *rest))) for kind, *rest in CASES[nproc]]
    print(torchrun("tests/dist/programs/gather.py", *arguments, nproc=nproc))
