"""Sharded models agree with transformers: values, gradients, weights in and out."""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

CASES = [  # ranks, model, tensor_parallel, data_replicas, activation checkpointing, packing
    (1, "qwen3-tied", 1, 1, "none", 1),
    (2, "qwen3-tied", 1, 1, "selective", 1),  # FSDP
    (2, "qwen3-untied", 2, 1, "full", 0),  # TP, the vocabulary sharded
    (2, "llama3", 1, 2, "none", 0),  # HSDP
    (4, "llama3-tied", 2, 1, "none", 1),  # FSDP x TP
    (4, "qwen3-untied", 2, 2, "none", 1),  # HSDP x TP
]


@pytest.mark.parametrize("nproc, kind, tensor_parallel, replicas, checkpointing, packing", CASES)
def test_sharded_model_equals_transformers(tmp_path, nproc, kind, tensor_parallel, replicas, checkpointing, packing):
    folder = make_tiny(tmp_path, kind)
    arguments = (folder, tensor_parallel, replicas, checkpointing, packing)
    torchrun("tests/dist/programs/parity.py", *arguments, nproc=nproc, deadline=120)
