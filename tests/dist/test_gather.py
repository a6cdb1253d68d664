"""Weights on their way to the engines: gathered in packed shards, and copied to where vLLM keeps them, bit by bit.

That four ranks of FSDP x TP and with replicas give every weight is seen in test_parity.py too, in buckets of one size.
"""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

CASES = {  # ranks: (model, tensor_parallel, data_replicas, LoRA's rank)
    3: [("qwen2-untied", 1, 1, 0), ("qwen3-tied", 1, 1, 4)],  # FSDP with uneven shards: 32 rows over 3 ranks
    4: [
        ("qwen2-untied", 2, 1, 0),  # FSDP x TP
        ("qwen3-tied", 2, 1, 4),
        ("qwen3-tied", 1, 2, 0),  # replicas x FSDP
        ("qwen2-untied", 2, 2, 0),  # replicas x TP
        ("llama3", 1, 4, 0),  # replicas alone
    ],
}
ENGINE_KINDS = ("qwen3-tied", "qwen2-untied", "llama3", "mistral")


@pytest.mark.parametrize("nproc", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_gathered_buckets_equal_full_tensors(tmp_path, nproc):
    kinds = {kind: make_tiny(tmp_path, kind) for kind, *_ in CASES[nproc]}
    arguments = [",".join(map(str, (kinds[kind], *rest))) for kind, *rest in CASES[nproc]]
    print(torchrun("tests/dist/programs/gather.py", *arguments, nproc=nproc, deadline=120))


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_copies_into_vllms_modules_equal_its_own_loading(tmp_path, tensor_parallel):
    folders = [make_tiny(tmp_path, kind) for kind in ENGINE_KINDS]
    print(torchrun("tests/dist/programs/engine_weights.py", *folders, nproc=tensor_parallel, deadline=120))
