"""The recipe that runs GSM8K on a laptop, for two steps."""

import pathlib

import pytest

from tests.e2e.runs import read_metrics
from tests.torchrun import ROOT, torchrun

RECIPE = ROOT / "configs" / "toy_gsm8k.py"
DATA = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.skipif(not RECIPE.is_file(), reason=f"{RECIPE} does not exist")
@pytest.mark.skipif(not DATA.is_file(), reason=f"{DATA} does not exist; it is GSM8K's train split as JSON lines")
def test_two_steps_of_toy_gsm8k(tmp_path: pathlib.Path):
    arguments = (RECIPE, "--data.path", DATA, "--run-dir", tmp_path / "run", "--num-steps", 2)
    torchrun("train_grpo.py", *arguments, "--sync-check-interval", 1, nproc=4, deadline=240)
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["mismatch/mean"] < 1e-5 for m in metrics)
    assert all(m["prompt/length_mean"] > 20 for m in metrics)  # real questions
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
