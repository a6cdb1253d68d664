"""Runs in the form that GPUs run, compiled and on flash attention's path, take the same steps as plain ones on a CPU.

How torch compiles tensors that are spread over ranks has failed where everything else was right. Blocks of one rank are
compiled in unit/models/test_attention.py, the LM head in unit/models/test_logprob_head.py.
"""

import pathlib
import re
import shutil
import sysconfig

import pytest

from configs.examples import toys
from tests.e2e.runs import COLOCATED, NO_KL, TINY, read_metrics
from tests.tiny_models import SMALL
from tests.torchrun import torchrun

HEADER = pathlib.Path(sysconfig.get_path("include"), "Python.h")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") and HEADER.exists()), reason="torch.compile needs g++ and Python.h on a CPU"
    ),
]

TP = "--trainer.tensor-parallel 2"
TWO = f"{COLOCATED} --roles.num-trainers 2"
LAYOUTS = {
    "TP 2": (2, f"{TWO} {TP} {NO_KL}"),  # a reference would be compiled for itself
    "TP 2, a reference": (2, f"{TWO} {TP}"),
    "replicas": (2, f"{TWO} --trainer.data-replicas 2"),
    "TP 2, checkpointing": (2, f"{TWO} {TP} --trainer.activation-checkpointing selective"),
    "TP 2, everything recomputed, rows of any length": (
        2,
        f"{TWO} {TP} --trainer.activation-checkpointing full --trainer.no-share-prompts",
    ),
    "two ranks a row": (2, f"{TWO} --trainer.context-parallel 2"),
    "TP 2, LoRA": (2, f"{TWO} {TP} --trainer.lora-rank 4"),
    "FSDP 2 x TP 2, an engine of TP 2": (4, f"{COLOCATED} --roles.num-trainers 4 {TP} --generator.tensor-parallel 2"),
    "TP 2, reference and generator apart, a step behind": (4, f"{TP} --overlap-steps 1"),
}
COMPILED = {"forward", "chunk_statistics", "chunk_gradients"}  # of blocks, and of the LM head
SAME = ("reward/mean", "completion/length_mean", "entropy", "grad_norm", "kl")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """Two key-value heads, one for each of two ranks."""
    changes = SMALL | {"max_position_embeddings": 128, "num_key_value_heads": 2}
    return toys.make_model(
        tmp_path_factory.mktemp("like") / "model", toys.addition_tokenizer(), seed=0, changes=changes
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_steps_are_the_plain_ones(layout, model, tmp_path, monkeypatch):
    nproc, flags = LAYOUTS[layout]
    monkeypatch.setenv("GRPO_CACHE_DIR", str(tmp_path / "caches"))
    steps = []
    for name, wrapped in (("plain", []), ("compiled", ["tests/dist/programs/like_gpu.py"])):
        more = ""
        if wrapped:
            more = "--trainer.compile"  # as the default is, not this recipe's
            monkeypatch.setenv("COLD_STARTS", "1")  # the process that forks.py forks has imported torch without dynamo
        own = f"--model.path {model} --run-dir {tmp_path / name}"
        output = torchrun(*wrapped, "train_grpo.py", TINY, f"{own} {flags} {more}", nproc=nproc)
        steps.append(read_metrics(tmp_path / name))
    assert set(re.findall(r"compiled (\w+)", output)) >= COMPILED
    for plain, compiled in zip(*steps, strict=True):
        for name in {*SAME} - ({"kl"} if NO_KL in flags else set()):
            assert compiled[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-6), (plain["step"], name)
