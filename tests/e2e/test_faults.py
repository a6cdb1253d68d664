"""What a run survives, end to end: a NaN of the reference, a damaged checkpoint, a full disk."""

import os
import shutil

from configs.examples import toys
from tests import write_lines
from tests.e2e.runs import read_metrics, run_tiny, split
from tests.torchrun import run_torchrun, torchrun

NAN_IN_STEP_2 = """
import torch

from grpo.config import change
from grpo.roles import reference
from tests.e2e import tiny

config = change(tiny.config, {"algorithm.kl_in": "reward", "num_steps": 3, "checkpoint.interval": 1})
logprobs = reference.Reference.logprobs
calls = []


def broken(self, batch):
    calls.append(0)
    values_N = logprobs(self, batch)
    return values_N.masked_fill(batch.loss_mask_N, torch.nan) if len(calls) == 2 else values_N


reference.Reference.logprobs = broken
"""


MINE = """
def share_of_digits(completions, **columns):
    return [sum(map(str.isdigit, text)) / (len(text) + 1) + len(text) / 100 for text in completions]
"""


def test_nan_then_a_damaged_checkpoint_then_another_config(model, tmp_path):
    recipe, run_dir, reward = tmp_path / "recipe.py", tmp_path / "run", tmp_path / "mine.py"
    recipe.write_text(NAN_IN_STEP_2)
    reward.write_text(MINE)
    flags = f"--checkpoint.no-export --reward.functions {reward}:share_of_digits 1 {split(2, 0, 1)}"
    output = run_tiny(model, run_dir, flags, nproc=3, recipe=recipe)
    assert output.count("warning: step 2 skipped 100% of its update, because not finite: reference") == 1
    first, second, third = read_metrics(run_dir)
    assert second["skipped_frac"] == second["skipped/reference"] == 1 and second["kl"] is None
    assert first["skipped_frac"] == third["skipped_frac"] == 0 and third["grad_norm"] > 0

    # the newest is cut short, and removed; without the NaN, which the reference has in its second call of a process
    for shard in (run_dir / "checkpoints/step-00000003").glob("*.distcp"):
        os.truncate(shard, shard.stat().st_size - 1)
    flags += f" --model.path {model} --run-dir {run_dir} --resume --metrics.samples-interval 5"
    output = run_torchrun("train_grpo.py", recipe, flags, nproc=3).stdout
    assert "error: the checkpoint of step 3 cannot be used" in output and "to continue after step 2" in output
    shutil.rmtree(run_dir / "checkpoints/step-00000003")
    reward.write_text(f"{MINE}# edited")
    output = torchrun("train_grpo.py", recipe, flags, nproc=3)
    assert "starting at step 2" in output
    assert "resumed with a change: metrics.samples_interval: 1 -> 5\n" in output
    assert "resumed with a change: mine.py differs from the one of step 2\n" in output
    assert (run_dir / "files/mine.py").read_text() == reward.read_text()
    again = read_metrics(run_dir)
    for name in ("loss", "kl", "grad_norm", "reward/mean", "learning_rate", "entropy"):
        assert again[2][name] == third[name], name
    names = {path.name for path in run_dir.iterdir()} | {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert {"step-00000002", "step-00000003"} <= names


SMALL_FILES = """
import resource

from configs.toy_sft import config

resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
"""


def test_no_room_for_a_checkpoint_is_one_line_of_one_rank(model, tmp_path):
    """By the largest size of a file, which holds for all that the ranks write."""
    rows = write_lines(tmp_path / "rows.jsonl", toys.addition("test")[:50])
    (tmp_path / "recipe.py").write_text(SMALL_FILES)
    flags = f"--model.path {model} --run-dir {tmp_path}/run --num-steps 1 --sequences-per-step 4 --checkpoint.no-export"
    flags += f" --data.path {rows}"  # few, since what they are as tokens is kept in a file too
    flags += " --metrics.no-tensorboard --checkpoint.interval 100"
    result = run_torchrun("train_sft.py", tmp_path / "recipe.py", flags, nproc=2)
    errors = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert result.returncode and len(errors) == 1, result.stdout[-3000:]
    assert "the checkpoint of step 1 could not be saved in" in errors[0] and "File too large" in errors[0]
    assert "CheckpointException" not in result.stdout
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
