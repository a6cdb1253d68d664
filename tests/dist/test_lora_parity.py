"""LoRA on sharded models equals PEFT: losses, gradient norms, merged weights, folders out."""

import pytest

from tests.dist import test_parity

ALL = "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
ATTENTION = "q_proj+k_proj+v_proj+o_proj"
CASES = [  # model, tensor_parallel, data_replicas, activation checkpointing, targets
    ("qwen3-tied", 1, 1, "selective", ALL),  # FSDP
    ("qwen2-tied", 2, 1, "selective", ALL),  # TP, the biases sharded
]
LAYOUTS = {
    1: [(1, 1, "none")],
    2: [(1, 1, "selective"), (2, 1, "full"), (1, 2, "none")],
    3: [(1, 1, "none")],
    4: [(2, 1, "none"), (2, 2, "none")],
}


def test_lora_equals_peft(tmp_path):
    compare(tmp_path, 2, CASES)


@pytest.mark.slow
def test_lora_beside_experts_equals_peft(tmp_path):
    compare(tmp_path, 2, [("moe", 2, 1, "full", ATTENTION)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["qwen3-tied", "qwen3-untied", "qwen2-tied", "llama3", "mistral-tied", "smollm3", "gemma3", "olmo3"],
)
@pytest.mark.parametrize("nproc", LAYOUTS)
def test_lora_equals_peft_in_every_layout(tmp_path, nproc, kind):
    compare(
        tmp_path,
        nproc,
        [(kind, *layout, targets) for layout in LAYOUTS[nproc] for targets in (ALL, "k_proj+down_proj")],
    )


def compare(folder, nproc, cases):
    pytest.importorskip("peft")
    test_parity.compare(folder, nproc, cases, "tests/dist/programs/lora.py", folder / "out")
