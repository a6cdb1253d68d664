"""Fixtures that the end-to-end tests share: a tiny model, and a finished run of it."""

import json
import pathlib

import pytest

from configs.examples import toys
from tests.e2e.runs import TINY
from tests.tiny_models import SMALL
from tests.torchrun import torchrun

BY_CHANCE = f"{pathlib.Path(__file__).parent}/tiny_rewards.py:passes_by_chance"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a random model; its weights are large enough for peaked, non-uniform log-probs."""
    return toys.make_model(
        tmp_path_factory.mktemp("tiny") / "model",
        toys.addition_tokenizer(),
        seed=0,
        changes=SMALL | {"max_position_embeddings": 128},
    )


@pytest.fixture(scope="session")
def finished_run(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    """Folder and arguments of a run of 6 steps with checkpoints at 3 and 6.

    2 trainer ranks that also hold the reference, 1 generator. Everything on that has a state or an order to resume:
    warm-up and a cosine, two updates per batch, dynamic sampling, and so few rows of two
    sources that epochs end. `--resume` with nothing to resume from starts fresh.
    """
    run_dir = tmp_path_factory.mktemp("run") / "a"
    rows = [json.dumps(row) for row in toys.addition("train")[:12]]
    for name, part in (("a", rows[:8]), ("b", rows[8:])):
        (run_dir.parent / f"{name}.jsonl").write_text("\n".join(part))
    sources = [word for name in "ab" for word in (name, run_dir.parent / f"{name}.jsonl")]
    layout = ["--roles.num-trainers", 2, "--roles.num-references", 0, "--roles.num-generators", 1]
    schedule = ["--trainer.schedule", "cosine", "--trainer.warmup-steps", 2, "--num-steps", 6]
    updates = ["--algorithm.num-mini-batches", 2]
    sampling = ["--sampling.dynamic", "--reward.functions", BY_CHANCE, 1]
    arguments = [TINY, "--model.path", model, *layout, *schedule, *updates, *sampling]
    arguments += ["--data.path", *sources, "--data.weights", "a", 2]
    arguments += ["--checkpoint.interval", 3, "--resume"]
    output = torchrun("train_grpo.py", *arguments, "--run-dir", run_dir, nproc=3)
    assert "starting at step 0" in output
    return run_dir, [str(argument) for argument in arguments]
