"""Trainer, reference and vLLM log-probs of the same completions within 1e-4 in float32, after every sync."""

import json

import pytest

from tests.tiny_models import KINDS, WITH_STATES, make_tiny
from tests.torchrun import torchrun

# Every sharding of the trainer (one rank, FSDP 2, TP 2), generators of TP 1 and 2. Every family, each with each: slow.
CASES = [  # model, trainers, trainer tensor_parallel, generators, generator tensor_parallel
    ("llama3", 2, 2, 1, 1),
    pytest.param("llama3", 2, 2, 2, 1, marks=pytest.mark.slow),  # two replicas
    ("moe", 1, 1, 2, 2),
]
TRAINERS = {"1 rank": (1, 1), "FSDP 2": (2, 1), "TP 2": (2, 2)}


@pytest.mark.parametrize("kind, trainers, trainer_tp, generators, generator_tp", CASES)
def test_all_roles_agree_after_every_sync(tmp_path, kind, trainers, trainer_tp, generators, generator_tp):
    agree(tmp_path, kind, trainers, trainer_tp, generators, generator_tp)


def test_all_roles_agree_on_merged_adapters_and_the_ids_that_were_kept(tmp_path):
    fields = {"trainer.lora_rank": 2, "trainer.lora_alpha": 6.0, "generator.sampling": {"min_p": 0.05}}
    agree(tmp_path, "qwen2-untied", *TRAINERS["TP 2"], 1, 1, json.dumps(fields))


OPTIONS = {
    "top_p": {"top_p": 0.8, "min_tokens": 8},  # the end of a completion is kept from its 9th token on
    "top_k": {"top_k": 20, "allowed_token_ids": list(range(1, 28))},
    "min_p": {"min_p": 0.05},
}
SAMPLING = {name: json.dumps({"generator.sampling": options}) for name, options in OPTIONS.items()}


@pytest.mark.parametrize(
    "layout, option",
    [
        ("1 rank", "top_p"),
        pytest.param("FSDP 2", "top_k", marks=pytest.mark.slow),
        pytest.param("TP 2", "min_p", marks=pytest.mark.slow),
    ],
)
def test_all_roles_agree_on_the_ids_that_were_kept(tmp_path, layout, option):
    agree(tmp_path, "qwen3-copied", *TRAINERS[layout], 1, 1, SAMPLING[option])


@pytest.mark.slow
@pytest.mark.parametrize("generator_tp", [1, 2])
@pytest.mark.parametrize("layout", TRAINERS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"qwen2-yarn", *WITH_STATES}])
def test_every_model_agrees_in_every_layout(tmp_path, kind, layout, generator_tp):
    agree(tmp_path, kind, *TRAINERS[layout], generator_tp, generator_tp)


def agree(folder, kind, trainers, trainer_tp, generators, generator_tp, *fields):
    arguments = (make_tiny(folder, kind), trainers, trainer_tp, generators, generator_tp, *fields)
    nproc = trainers + 1 + generators
    print(torchrun("tests/dist/programs/agreement.py", *arguments, nproc=nproc))
