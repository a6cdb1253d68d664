"""What a user's loss, advantages and aggregation do wrong is said before a run, in one line with the way out."""

import pytest
import torch

from grpo.config import AlgorithmConfig
from grpo.features.trial.formulas import check_loss_output, try_algorithm
from tests.unit.algorithm.test_losses import DPPO, DUAL_CLIP, inputs_of

OWN_SLOTS = """
import torch

def square_root(loss_BT, x, totals):  # a rollout of n tokens weighs sqrt(n)
    return (loss_BT / x.num_rollout_tokens_BT.sqrt()).sum() / totals.num_rollouts

def of_this_call(loss_BT, x, totals):
    return loss_BT.sum() / (loss_BT != 0).sum()

def ranks(x):
    return x.rewards_PG.argsort(1).argsort(1).double()

def by_the_mean(x):
    return x.rewards_PG / x.rewards_PG.mean(1)

def of_two(rewards_PG, has_PG):
    return rewards_PG
"""


def test_advantages_and_aggregation_of_ones_own_are_tried_before_the_run(tmp_path):
    (tmp_path / "own.py").write_text(OWN_SLOTS)

    def attempt(**slots):
        named = {slot: f"{tmp_path}/own.py:{name}" for slot, name in slots.items()}
        try_algorithm(AlgorithmConfig(**named).resolved)

    attempt(advantages="ranks", aggregation="square_root")
    with pytest.raises(ValueError, match="of_this_call gives .* divided only by what `totals` counts"):
        attempt(aggregation="of_this_call")
    with pytest.raises((ValueError, RuntimeError)):
        attempt(advantages="by_the_mean")
    with pytest.raises(ValueError, match=r"of_two\(\) missing 1 .*; it is called as advantages\(x\)"):
        attempt(advantages="of_two")
    with pytest.raises(ValueError, match="algorithm.advantages='grup_std' is unknown; use group_std"):
        assert AlgorithmConfig(advantages="grup_std").resolved


OWN_LOSS = """
def of_one(inputs): pass

def of_three(inputs, config, more): pass
"""


def test_own_loss_errors_name_the_way_out(tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)
    for name in ("of_one", "of_three"):
        with pytest.raises(ValueError, match=rf"{name}\(\) .*argument.*; it is called as loss\(x, config"):
            try_algorithm(complete_of(loss=f"{tmp_path}/own.py:{name}"))


def complete_of(**fields):
    return AlgorithmConfig(**fields).resolved


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("grpo", {"bound": 3}, "loss grpo has no options"),
        (DUAL_CLIP, {"bond": 3}, r"no option 'bond' \(did you mean bound\?\); its options .* are: bound"),
        ("sapo", {"temperature_negative": 0}, "temperature_negative=0 must be above 0"),
        (DPPO, {"divergence": "js"}, "divergence='js' is unknown; use tv or kl"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_start(loss, options, message):
    with pytest.raises(ValueError, match=message):
        try_algorithm(complete_of(loss=loss, loss_options=options))


def test_a_loss_may_use_the_reference(tmp_path):
    """The KL inside a loss of one's own, in a run with a reference."""
    (tmp_path / "own.py").write_text(
        "def with_kl(inputs, config):\n    return inputs.logprobs_BT - inputs.ref_logprobs_BT, {}\n"
    )
    try_algorithm(complete_of(loss=f"{tmp_path}/own.py:with_kl", kl_coef=0.1))
    with pytest.raises(ValueError, match="line 2: TypeError: .*NoneType"):
        try_algorithm(complete_of(loss=f"{tmp_path}/own.py:with_kl"))


def test_loss_output_is_checked():
    inputs = inputs_of([1.0, 1.0], [1.0, 1.0])
    good_BT, metric_BT = -inputs.logprobs_BT, torch.ones(1, 2)
    check_loss_output((good_BT, {"a": metric_BT, "b": metric_BT > 0}), inputs, "own")
    for output, message in [
        (good_BT, r"returned a Tensor; return \(loss_BT, dict"),
        ((good_BT.mean(), {}), r"its loss is a Tensor of shape \(\).*shape \(1, 2\), and leave mask and mean"),
        ((good_BT, {"a": 1.0}), "a is a float"),
        ((good_BT.long(), {}), "no gradient; compute it from x.logprobs_BT"),
        ((good_BT, {"a": metric_BT.sum()}), r"own: a is a Tensor of shape \(\)"),
        ((good_BT, {"a": good_BT}), "a carries a gradient; detach it"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_loss_output(output, inputs, "own")
