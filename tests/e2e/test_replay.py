"""A recorded run trained on again, without an engine and in two parts, takes the same steps to the last digit."""

import json
import pathlib

import pytest

from tests.e2e.runs import TINY, assert_same_run
from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

# Three updates' worth of clipping: two mini-batches, and a reference whose log-probs are recorded too
FLAGS = ("--algorithm.loss", "dapo", "--algorithm.num-mini-batches", 2, "--num-steps", 3)
TRUNCATED = ("--generator.sampling", "top_p", 0.8)
SAVED = ("--checkpoint.interval", 2)
ENDS = ("--generator.stop-token-ids", 7)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a run of 2 trainers that hold the reference, and 1 generator, recorded: of a mixture of experts.

    Its batches have the ids that top_p kept.
    """
    run_dir = tmp_path_factory.mktemp("live") / "run"
    model = make_tiny(run_dir.parent, "moe")
    flags = (*FLAGS, *TRUNCATED, *ENDS, "--roles.num-references", 0, "--record")
    torchrun("train_grpo.py", TINY, "--model.path", model, "--run-dir", run_dir, *flags, nproc=3)
    return run_dir


def test_a_replay_repeats_the_run_to_the_last_digit(live: pathlib.Path, tmp_path: pathlib.Path):
    """In two parts: 2 steps, and 1 after a resume."""
    again = tmp_path / "again"
    output = torchrun("grpo.replay", live, "--run-dir", again, *SAVED, "--num-steps", 2, nproc=2)
    assert "replay of" in output and "on 2 trainer ranks" in output
    output = torchrun("grpo.replay", live, "--run-dir", again, *SAVED, "--resume", nproc=2)
    assert "starting at step 2" in output
    assert_same_run(live, again)
    ends = [json.loads((run_dir / "model" / "generation_config.json").read_text()) for run_dir in (live, again)]
    assert ends[0] == ends[1] and 7 in ends[0]["eos_token_id"]
