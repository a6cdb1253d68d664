"""Fixtures that the end-to-end tests share: a tiny model, and a finished run of it."""

import pathlib

import pytest

from configs.examples import toys
from tests import write_lines
from tests.e2e.runs import REWARDS, run_tiny, split
from tests.tiny_models import SMALL

BY_CHANCE = f"{REWARDS}:passes_by_chance"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> pathlib.Path:
    """Folder of a random model; its weights are large enough for peaked, non-uniform log-probs."""
    return toys.make_model(
        tmp_path_factory.mktemp("tiny") / "model",
        toys.addition_tokenizer(),
        seed=0,
        changes=SMALL | {"max_position_embeddings": 128},
    )


@pytest.fixture(scope="session")
def finished_run(model, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """Folder and flags of a run of 6 steps with checkpoints at 3 and 6.

    2 trainer ranks that also hold the reference, 1 generator. Everything on that has a state or an order to resume:
    warm-up and a cosine, two updates per batch, dynamic sampling, and so few rows of two
    sources that epochs end. `--resume` with nothing to resume from starts fresh.
    """
    run_dir = tmp_path_factory.mktemp("run") / "a"
    rows = toys.addition("train")[:12]
    a = write_lines(run_dir.parent / "a.jsonl", rows[:8])
    b = write_lines(run_dir.parent / "b.jsonl", rows[8:])
    schedule = "--trainer.schedule cosine --trainer.warmup-steps 2 --num-steps 6 --algorithm.num-mini-batches 2"
    sampling = f"--sampling.dynamic --reward.functions {BY_CHANCE} 1 --data.path a {a} b {b} --data.weights a 2"
    flags = f"{split(2, 0, 1)} {schedule} {sampling} --checkpoint.interval 3 --resume"
    output = run_tiny(model, run_dir, flags, nproc=3)
    assert "starting at step 0" in output
    return run_dir, flags
