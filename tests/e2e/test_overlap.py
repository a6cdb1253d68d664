"""`overlap_steps=1`: generators sample the next step while the others train; a step behind, resumed exactly."""

import pathlib
import shutil

import pytest

from grpo.folder.checkpoint import check_checkpoint
from tests.e2e.conftest import BY_CHANCE
from tests.e2e.runs import TINY, assert_same_run, read_completions, read_metrics, steps_of
from tests.torchrun import run_python, torchrun

SPLIT = ("--roles.num-trainers", 1, "--roles.num-references", 1, "--roles.num-generators", 1, "--overlap-steps", 1)
# what has a state or an order to resume: further rounds, evaluations, two updates per batch
SAMPLING = ("--sampling.dynamic", "--reward.functions", BY_CHANCE, 1)
EVALUATION = ("--evaluation.interval", 3, "--evaluation.num-prompts", 4, "--evaluation.num-samples", 2)
LENGTH = ("--num-steps", 6, "--algorithm.num-mini-batches", 2)
KEPT = ("--checkpoint.interval", 3, "--record")


@pytest.fixture(scope="module")
def run(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[object]]:
    """Folder and arguments of a run of 6 steps: 1 trainer, 1 reference, 1 generator; a sync check in every step."""
    run_dir = tmp_path_factory.mktemp("overlap") / "run"
    arguments = [TINY, *SPLIT, *SAMPLING, *EVALUATION, *LENGTH, *KEPT, "--model.path", model, "--resume"]
    torchrun("train_grpo.py", *arguments, "--run-dir", run_dir, nproc=3)
    return run_dir, arguments


def test_completions_are_one_step_behind(run: tuple[pathlib.Path, list[object]]):
    """Step 1 trains on completions of its own weights, step n on those after n - 2 steps, except for further rounds.

    Those are sampled once the step has begun, with the weights that it has.
    """
    steps = steps_of(run[0])
    versions = {step: [] for step in range(1, 7)}
    for line in read_completions(run[0]):
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
    assert [m["step"] for m in read_metrics(run[0]) if "eval/accuracy" in m] == [0, 3, 6]


def test_6_steps_equal_3_a_crash_and_3(run: tuple[pathlib.Path, list[object]], tmp_path: pathlib.Path):
    """What was sampled ahead is in the checkpoint: metrics and completions are the same to the last digit."""
    run_dir, arguments = run
    crashed = tmp_path / "run"
    shutil.copytree(run_dir, crashed)
    shutil.rmtree(crashed / "checkpoints/step-00000006")
    flight = check_checkpoint(crashed / "checkpoints/step-00000003")["flight"]
    assert (len(flight["prompts"]), flight["group_size"]) == (4, 4)

    output = torchrun("train_grpo.py", *arguments, "--run-dir", crashed, nproc=3)

    assert "starting at step 3" in output
    assert_same_run(run_dir, crashed)


def test_a_replay_repeats_it(run: tuple[pathlib.Path, list[object]], tmp_path: pathlib.Path):
    """What a step trained on was recorded with the versions that sampled it; one process is enough to train on it."""
    run_python("-m", "grpo.replay", run[0], "--run-dir", tmp_path / "again")
    assert_same_run(run[0], tmp_path / "again", only_steps=True)
    assert [m["lag/max"] for m in steps_of(tmp_path / "again")] == [0, 1, 1, 1, 1, 1]
