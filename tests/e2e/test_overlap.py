"""`overlap_steps=1`: generators sample the next step while the others train; a step behind, resumed exactly."""

import pathlib
import shutil

import pytest

from grpo.folder.checkpoint import check_checkpoint
from tests.e2e.conftest import BY_CHANCE
from tests.e2e.runs import assert_same_run, read_completions, read_metrics, run_tiny, split, steps_of

# what has a state or an order to resume: further rounds, evaluations, two updates per batch
SAMPLING = f"--sampling.dynamic --reward.functions {BY_CHANCE} 1"
EVALUATION = "--evaluation.interval 3 --evaluation.num-prompts 4 --evaluation.num-samples 2"
LENGTH = "--num-steps 6 --algorithm.num-mini-batches 2"
FLAGS = f"{split(1, 1, 1)} --overlap-steps 1 {SAMPLING} {EVALUATION} {LENGTH} --checkpoint.interval 3 --resume"


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of 6 steps: 1 trainer, 1 reference, 1 generator; a sync check in every step."""
    run_dir = tmp_path_factory.mktemp("overlap") / "run"
    run_tiny(model, run_dir, FLAGS, nproc=3)
    return run_dir


def test_completions_are_one_step_behind(run):
    """Step 1 trains on completions of its own weights, step n on those after n - 2 steps, except for further rounds.

    Those are sampled once the step has begun, with the weights that it has.
    """
    steps = steps_of(run)
    versions = {step: [] for step in range(1, 7)}
    for line in read_completions(run):
        versions[line["step"]].append(line["version"])
    for m in steps:
        step, of_step = m["step"], versions[m["step"]]
        first, later = max(step - 2, 0), step - 1
        assert set(of_step) <= {first, later} and (m["sampling/rounds"] > 1 or set(of_step) == {first})
        assert m["lag/mean"] == pytest.approx(sum(step - 1 - v for v in of_step) / len(of_step))
        assert m["lag/max"] == (0 if step == 1 else 1)
        # what was sampled by older weights differs from the policy, and is weighed
        assert (m["mismatch/mean"] > 1e-3) == (step > 1)
    assert max(m["sampling/rounds"] for m in steps) > 1
    assert [m["step"] for m in read_metrics(run) if "eval/accuracy" in m] == [0, 3, 6]


def test_6_steps_equal_3_a_crash_and_3(run, model, tmp_path):
    """What was sampled ahead is in the checkpoint: metrics and completions are the same to the last digit."""
    crashed = tmp_path / "run"
    shutil.copytree(run, crashed)
    shutil.rmtree(crashed / "checkpoints/step-00000006")
    flight = check_checkpoint(crashed / "checkpoints/step-00000003")["flight"]
    assert (len(flight["prompts"]), flight["group_size"]) == (4, 4)

    output = run_tiny(model, crashed, FLAGS, nproc=3)

    assert "starting at step 3" in output
    assert_same_run(run, crashed)
