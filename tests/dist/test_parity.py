"""Sharded models agree with transformers: values, gradients, weights in and out."""

import pytest

from tests.tiny_models import KINDS, WITH_STATES, make_tiny
from tests.torchrun import torchrun

# ranks: (model, tensor_parallel, data_replicas, activation checkpointing, prompts shared[, context_parallel[,
# expert_parallel]])
CASES = {
    2: [
        ("qwen3-tied", 1, 1, "selective", 1),  # FSDP
        ("qwen3-untied", 2, 1, "full", 0),  # TP, the vocabulary sharded
        ("llama3", 1, 2, "logits", 0),  # replicas
        ("qwen2-untied", 2, 1, "none", 1),  # the biases sharded
        ("olmo3", 2, 1, "none", 1),  # windows, and norms over the heads of both ranks
        ("qwen3_5", 1, 1, "selective", 0),  # states that begin anew in each document
        ("moe", 1, 1, "selective", 1),
        ("moe-tied", 2, 1, "full", 1),  # each expert sharded
        ("qwen3-tied", 1, 1, "selective", 1, 2),  # heads traded for places
        ("qwen2-untied", 1, 1, "none", 0, 2),
        ("gemma3", 1, 1, "full", 1, 2),
        ("moe", 1, 1, "selective", 1, 2),
        ("moe", 1, 1, "selective", 1, 1, 2),  # each rank half of the experts
    ],
    3: [("qwen2-untied", 1, 1, "none", 0), ("moe", 1, 1, "none", 1)],  # 32 rows, or 4 experts, over 3 ranks
    4: [
        ("qwen3-untied", 1, 2, "full", 0),  # replicas x FSDP
        ("moe", 2, 1, "none", 1),  # FSDP x TP
    ],
}
SLOW_CASES = {
    4: [
        ("qwen3-tied", 2, 2, "none", 1),  # replicas x TP
        ("llama3", 1, 4, "none", 0),  # replicas alone
        ("qwen3_5-tied", 1, 2, "none", 0),
        ("moe", 1, 2, "full", 0),
        ("moe", 1, 2, "none", 1, 1, 2),  # experts spread in each replica
        ("moe", 1, 1, "full", 1, 2, 2),  # stretches and experts on the same ranks
        ("moe", 2, 1, "full", 1, 1, 4),
        ("qwen3-tied", 1, 1, "selective", 1, 4),  # fewer key-value heads than ranks
        ("qwen3-untied", 2, 1, "none", 1, 2),  # stretches x TP
        ("llama3", 1, 2, "none", 1, 2),  # stretches x replicas
    ],
    8: [("moe", 1, 1, "none", 1)],  # more ranks than experts, of which each rank has some rows
}
# Every model, tied and untied, on one rank, FSDP 2, TP 2 and FSDP 2 x TP 2
LAYOUTS = {
    1: [(1, 1, "none", 1)],
    2: [(1, 1, "selective", 1), (2, 1, "none", 1)],
    4: [(2, 1, "full", 1)],
}


@pytest.mark.parametrize("nproc", CASES)
def test_sharded_models_equal_transformers(tmp_path, nproc):
    compare(tmp_path, nproc, CASES[nproc])


@pytest.mark.slow
@pytest.mark.parametrize("nproc", SLOW_CASES)
def test_more_sharded_models_equal_transformers(tmp_path, nproc):
    compare(tmp_path, nproc, SLOW_CASES[nproc])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nproc", LAYOUTS)
def test_every_model_in_every_layout_equals_transformers(tmp_path, nproc, kind):
    layouts = LAYOUTS[nproc]
    if kind in WITH_STATES:
        layouts = [(1, replicas, checkpointing, 0) for tp, replicas, checkpointing, _ in layouts if tp == 1]
    compare(tmp_path, nproc, [(kind, *layout) for layout in layouts])


def compare(folder, nproc, cases, program="tests/dist/programs/parity.py", *first):
    kinds = {kind: make_tiny(folder, kind) for kind, *_ in cases}
    arguments = [",".join(map(str, (kinds[kind], *rest))) for kind, *rest in cases]
    print(torchrun(program, *first, *arguments, nproc=nproc))
