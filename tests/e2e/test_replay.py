"""A recorded run trained on again, without an engine and in two parts, takes the same steps to the last digit."""

import json
import pathlib

import pytest

from tests.e2e.runs import assert_same_run, run_tiny, split
from tests.tiny_models import make_tiny
from tests.torchrun import torchrun

# Three updates' worth of clipping: two mini-batches, and a reference whose log-probs are recorded too
UPDATES = f"--algorithm.loss dapo --algorithm.num-mini-batches 2 --num-steps 3 {split(2, 0, 1)}"
SAMPLING = "--generator.sampling top_p 0.8 --generator.stop-token-ids 7"


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> pathlib.Path:
    """Folder of a run of 2 trainers that hold the reference, and 1 generator, recorded: of a mixture of experts.

    Its batches have the ids that top_p kept.
    """
    run_dir = tmp_path_factory.mktemp("live") / "run"
    model = make_tiny(run_dir.parent, "moe")
    run_tiny(model, run_dir, UPDATES, SAMPLING, "--record", nproc=3)
    return run_dir


def test_a_replay_repeats_the_run_to_the_last_digit(live, tmp_path):
    """In two parts: 2 steps, and 1 after a resume."""
    again = tmp_path / "again"
    flags = f"--run-dir {again} --checkpoint.interval 2"
    output = torchrun("grpo.replay", live, flags, "--num-steps 2", nproc=2)
    assert "replay of" in output and "on 2 trainer ranks" in output
    output = torchrun("grpo.replay", live, flags, "--resume", nproc=2)
    assert "starting at step 2" in output
    assert_same_run(live, again)
    ends = [json.loads((run_dir / "model" / "generation_config.json").read_text()) for run_dir in (live, again)]
    assert ends[0] == ends[1] and 7 in ends[0]["eos_token_id"]
