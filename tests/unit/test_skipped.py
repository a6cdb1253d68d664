"""Steps whose update was skipped: told once each, kept to be looked at, and after some in a row the end."""

import dataclasses
import math

import pytest
import torch
from safetensors import safe_open

from grpo.data.batches import make_batch
from grpo.roles.trainer import MUST_BE_FINITE
from grpo.roles.weight_sync import check_distance
from grpo.run.skipped import CAUSES, SkippedSteps
from grpo.types import Sample
from grpo.watch.failures import BadInput

GOOD = {"skipped_frac": 0.0}
BAD = {"skipped_frac": 1.0, "skipped/loss": 1.0}
BATCH = make_batch([Sample(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))])


def test_every_cause_has_words():
    assert tuple(CAUSES) == MUST_BE_FINITE


def test_three_in_a_row_end_the_run(tmp_path, capsys):
    skipped = SkippedSteps(str(tmp_path))
    for step, metrics in enumerate((BAD, BAD, GOOD, BAD, BAD), start=1):
        skipped.look(step, metrics, BATCH)
    told = capsys.readouterr().out.splitlines()
    assert [line.split(" skipped")[0] for line in told] == [f"warning: step {n}" for n in (1, 2, 4, 5)]
    assert "parts of the loss are not finite" in told[0]
    with pytest.raises(BadInput, match="^3 steps in a row .* the last one, 6, because parts of the loss .*--resume"):
        skipped.look(6, BAD, BATCH)


def test_the_batch_is_kept_with_its_nan(tmp_path):
    nan_N = torch.tensor([0.0, math.nan, -1.0])
    batch = dataclasses.replace(BATCH, ref_logprobs_N=nan_N)
    skipped = SkippedSteps(str(tmp_path))
    for step in range(1, 8):
        skipped.look(step, {"skipped_frac": 0.5, "skipped/reference": 1.0}, batch)
        skipped.look(step, GOOD, batch)
    files = sorted((tmp_path / "batches").iterdir())  # the newest five
    assert [path.name for path in files] == [f"skipped-step-{n:08d}.safetensors" for n in range(3, 8)]
    with safe_open(files[0], "pt") as file:
        assert file.metadata()["reason"] == "log-probs of the reference"
        assert file.get_tensor("ids_N").tolist() == [5, 6, 7]
        assert file.get_tensor("ref_logprobs_N").isnan().tolist() == [False, True, False]
        assert "old_logprobs_N" not in file.keys()  # noqa: SIM118 it is no dict


@pytest.mark.parametrize("mean", [math.nan, math.inf, 0.5])
def test_the_sync_is_blamed_for_finite_differences_only(mean):
    if math.isfinite(mean):
        with pytest.raises(RuntimeError, match="does not hold the policy's weights"):
            check_distance(mean, mean, 0.1)
    else:
        check_distance(mean, mean, 0.1)
