"""Typical mistakes in a loss of one's own, each found by its check and by no other; the losses that are right pass."""

import re

import pytest

from grpo.config import PAPER_DEFAULTS
from grpo.tools import check_loss
from grpo.watch.failures import BadInput
from tests import ROOT

MISTAKES = """
import torch

def ratios(inputs):
    return (inputs.logprobs_BT - inputs.old_logprobs_BT).clamp(-20, 20).exp()

def row_means(inputs, config):
    log_ratio = (inputs.logprobs_BT - inputs.old_logprobs_BT).clamp(-20, 20)
    mean = log_ratio.sum(1, keepdim=True) / inputs.loss_mask_BT.sum(1, keepdim=True)
    return -mean.exp() * inputs.advantages_BT, {}

def scaled_by_what_is_here(inputs, config):
    return -ratios(inputs) * inputs.advantages_BT / inputs.loss_mask_BT.sum(), {}

def no_clamp(inputs, config):
    ratio = (inputs.logprobs_BT - inputs.old_logprobs_BT).exp()
    return -ratio * inputs.advantages_BT, {}

def pulls_to_certainty(inputs, config):
    return 0.01 * inputs.logprobs_BT.square() - ratios(inputs) * inputs.advantages_BT, {}

def no_minus(inputs, config):
    return ratios(inputs) * inputs.advantages_BT, {}

def unpacks(inputs, config):
    logprobs, advantages = inputs
"""


def failing_checks(loss: str, capsys: pytest.CaptureFixture) -> list[int]:
    """Which of the four promises the loss breaks: 0 packing, 1 far ratios, 2 no advantage, 3 direction."""
    code = check_loss.main([loss])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("holds", "FAILS"))]
    failing = [number for number, line in enumerate(lines) if line.startswith("FAILS")]
    assert len(lines) == 4 and code == bool(failing)
    return failing


@pytest.mark.parametrize("loss", [*PAPER_DEFAULTS, str(ROOT / "configs/examples/my_method.py:gentle")])
def test_right_losses_pass(loss, capsys):
    assert failing_checks(loss, capsys) == []


BROKEN = {
    "row_means": [0],
    "scaled_by_what_is_here": [0],
    "no_clamp": [1],
    "pulls_to_certainty": [2],
    "no_minus": [3],
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_mistakes_are_found(mistake, tmp_path, capsys):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    assert failing_checks(f"{tmp_path}/mistakes.py:{mistake}", capsys) == BROKEN[mistake]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("unpacks", "mistakes.py:unpacks, line 26: TypeError: "),
        ("none", "has no function 'none'"),
    ],
)
def test_what_a_run_would_refuse_is_one_line(mistake, said, tmp_path):
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    with pytest.raises(BadInput, match=re.escape(said)) as refused:
        check_loss.main([f"{tmp_path}/mistakes.py:{mistake}"])
    assert "\n" not in str(refused.value)


DUAL_CLIP = "configs/examples/dual_clip.py:dual_clip"


def test_options_are_written_as_for_a_run():
    with pytest.raises(BadInput, match=r"bound=0\.5 must be above 1"):
        check_loss.main([DUAL_CLIP, "configs/toy_arithmetic.py", "--algorithm.loss-options", "bound", "0.5"])
    assert check_loss.main([DUAL_CLIP, "--algorithm.loss-options", "bound", "2"]) == 0


def test_help_is_no_error(capsys):
    with pytest.raises(SystemExit) as ended:
        check_loss.main(["--help"])
    assert ended.value.code == 0 and "python -m grpo.check_loss gspo" in capsys.readouterr().out
