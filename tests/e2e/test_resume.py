"""Exact resume: 6 steps equal 3 steps, a crash, and 3 more."""

import shutil

from tests.e2e.runs import assert_same_run, read_metrics, run_tiny


def test_6_steps_equal_3_resume_and_3(finished_run, model, tmp_path):
    """Every metric except the clocks is equal to the last digit, and so is every sampled completion.

    The resumed folder is the finished one as a crash in step 6, while its checkpoint was written, would have left it.
    """
    run_dir, flags = finished_run
    crashed = tmp_path / "run"
    shutil.copytree(run_dir, crashed)
    shutil.rmtree(crashed / "model")
    checkpoints = crashed / "checkpoints"
    (checkpoints / "step-00000006").rename(checkpoints / "step-00000006.partial")
    lines = (crashed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (crashed / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:40])

    output = run_tiny(model, crashed, flags, nproc=3)

    assert "starting at step 3" in output
    assert_same_run(run_dir, crashed)
    whole = read_metrics(run_dir)
    assert [m["step"] for m in whole] == [1, 2, 3, 4, 5, 6]
    # the comparison means something: these are there, differ from step to step, and the schedule moves
    for name in ("loss", "kl", "grad_norm", "entropy", "mismatch/mean"):
        assert len({m[name] for m in whole}) == 6, name
    assert max(m["sampling/rounds"] for m in whole[3:]) > 1
    assert len({m["completion/length_mean"] for m in whole[3:]}) > 1
    assert all(0.4 < m["prompt/source/a"] < 0.9 for m in whole)  # weights 2 and 1
    rates = [m["learning_rate"] for m in whole]
    assert rates[2] == max(rates) > rates[3] > rates[4] > rates[5] > 0

    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
