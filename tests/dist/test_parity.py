"""Sharded models agree with transformers: values, gradients, weights in and out."""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

CASES = {  # ranks: (model, tensor_parallel, data_replicas, activation checkpointing, packing)
    1: [("qwen3-tied", 1, 1, "none", 1)],
    2: [
        ("qwen3-tied", 1, 1, "selective", 1),  # FSDP
        ("qwen3-untied", 2, 1, "full", 0),  # TP, the vocabulary sharded
        ("llama3", 1, 2, "none", 0),  # replicas
    ],
    4: [
        ("llama3", 2, 1, "none", 1),  # FSDP x TP
        ("llama3-tied", 2, 1, "selective", 1),
        ("qwen3-tied", 2, 2, "none", 1),  # replicas x TP
        ("qwen3-untied", 1, 2, "full", 0),  # replicas x FSDP
    ],
}


@pytest.mark.parametrize("nproc", CASES)
def test_sharded_models_equal_transformers(tmp_path, nproc):
    kinds = {kind: make_tiny(tmp_path, kind) for kind, *_ in CASES[nproc]}
    cases = [",".join(map(str, (kinds[kind], *rest))) for kind, *rest in CASES[nproc]]
    print(torchrun("tests/dist/programs/parity.py", *cases, nproc=nproc, deadline=120))
