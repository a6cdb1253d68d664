"""Losses against numbers worked out by hand: values, gradients, metrics, and what must not break them."""

import dataclasses
import functools
import itertools
import math
import random
import types

import pytest
import torch

from grpo.algorithm.aggregation import UpdateTotals, named_aggregation
from grpo.algorithm.importance import (
    importance_weights,
    kl,
    mismatch,
    sequence_kl,
    token_kl,
    with_effective_sample_size,
)
from grpo.algorithm.inputs import LossInputs, clamped
from grpo.config import PAPER_DEFAULTS, AlgorithmConfig, GRPOConfig
from grpo.data.batches import build_micro_batch, make_batch
from grpo.data.packing import pack
from grpo.run.trial import check_loss_output, try_algorithm
from grpo.types import Sample
from train_grpo import grpo_objective, policy_loss

torch.set_num_threads(1)
LOG2, LOG3 = math.log(2), math.log(3)
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_k2_gradient")
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_horizon")
DUAL_CLIP = "configs/examples/dual_clip.py:dual_clip"
LOSSES = (*PAPER_DEFAULTS, DUAL_CLIP)
CORRECTIONS = ("none", "truncate", "mask_tokens", "mask_sequences")
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28)

approx = functools.partial(pytest.approx, rel=1e-9, abs=1e-12)


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def make_inputs(**fields):
    """LossInputs as a run makes them; the generator's log-probs are the old ones, without a reference, unless given."""
    given = {"generator_logprobs_BT": fields["old_logprobs_BT"], "ref_logprobs_BT": None} | fields
    logprobs_BT = given.pop("logprobs_BT")
    return LossInputs.of(types.SimpleNamespace(**given), logprobs_BT, torch.zeros_like(logprobs_BT))


def inputs_of(ratios, advantages, mask=None, sequences=None, logprob=-1.0):
    """One row of tokens whose policy log-prob is `logprob`; by default one sequence, all counted."""
    mask = mask or [True] * len(ratios)
    sequences = sequences or [0] * len(ratios)
    counted = [s for s, m in zip(sequences, mask, strict=True) if m]
    lengths = [counted.count(s) if m else 1 for s, m in zip(sequences, mask, strict=True)]
    logprobs_BT = torch.full((1, len(ratios)), logprob, dtype=torch.float64)
    return make_inputs(
        logprobs_BT=logprobs_BT.clone().requires_grad_(),
        old_logprobs_BT=logprobs_BT - row(ratios).log(),
        advantages_BT=row(advantages),
        loss_mask_BT=row(mask, torch.bool),
        sequence_BT=row(sequences, torch.int64),
        num_loss_tokens_BT=row(lengths, torch.int64),
        num_sequences=max(sequences) + 1,
    )


def loss_of(name, inputs, config=CONFIG, **options):
    return policy_loss(inputs, dataclasses.replace(config, loss=name, loss_options=options))


def run(name, inputs, config=CONFIG, **options):
    """Loss, gradient by the log-probs and metrics of the first row where the mask is True, else 0, as lists."""
    loss_BT, metrics = loss_of(name, inputs, config, **options)
    check_loss_output((loss_BT, metrics), inputs, name)
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), inputs.logprobs_BT)
    metrics = {
        key.removeprefix("loss/"): value_BT & inputs.loss_mask_BT
        if value_BT.dtype == torch.bool
        else value_BT.where(inputs.loss_mask_BT, 0)
        for key, value_BT in metrics.items()
    }
    return loss_BT[0].tolist(), gradient_BT[0].tolist(), {key: value[0].tolist() for key, value in metrics.items()}


# --- each loss by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_clipped_by_hand(name):
    # advantage above 0: 1.5 is cut at 1.28, 0.5 is not; below 0: 1.5 is not, 0.5 is cut at 0.8
    ratios = [1.5, 0.5, 1.5, 0.5, 1.0, 0.5]
    loss, gradient, metrics = run(name, inputs_of(ratios, [1.0, 1.0, -1.0, -1.0, 2.0, 0.5]))
    assert loss == approx([-1.28, -0.5, 1.5, 0.8, -2.0, -0.25])
    # d(-ratio * A)/d logprob = -ratio * A; nothing where it is cut
    assert gradient == approx([0.0, -0.5, 1.5, 0.0, -2.0, -0.25])
    assert metrics.pop("ratio_mean") == approx(ratios) and metrics.pop("ratio_max") == approx(ratios)
    assert metrics == {
        "clip_low_frac": [False, False, False, True, False, False],
        "clip_high_frac": [True, False, False, False, False, False],
        "clip_frac": [True, False, False, True, False, False],
        "active_frac": [False, True, True, False, True, True],
    }


def test_dual_clip_by_hand():
    # A = -2, bound 3: ratio 5 costs 3 x 2 = 6 instead of 10, ratio 2.5 still 5; 0.5 is cut at 0.8, as ever.
    # A = +2: cut at 1.28, the bound has no say. A = 0 is cut by nothing, and has no gradient all the same
    inputs = inputs_of([5.0, 2.5, 0.5, 5.0, 5.0], [-2.0, -2.0, -2.0, 2.0, 0.0])
    loss, gradient, metrics = run(DUAL_CLIP, inputs, bound=3.0)
    assert loss == approx([6.0, 5.0, 1.6, -2.56, 0.0])
    assert gradient == approx([0.0, 5.0, 0.0, 0.0, 0.0])
    assert metrics["dual_clip_frac"] == [True, False, False, False, False]
    assert metrics["clip_frac"] == [False, False, True, True, False]
    assert metrics["active_frac"] == [False, True, False, False, False]

    loss, gradient, metrics = run("grpo", inputs)
    assert loss[0] == approx(10.0) and gradient[0] == approx(10.0)
    assert "dual_clip_frac" not in metrics and metrics["active_frac"][0]


def test_gspo_by_hand():
    # Three sequences in one row, with a token that does not count (ratio 100) and padding.
    # 0: ratios 4 and 1, geometric mean 2, A = -1: not cut from above
    # 1: ratios 1/2, 1/2 and 2, mean log -log(2) / 3, A = +1: not cut from below
    # 2: ratio 2 alone, A = +1: cut at 1.28
    ratios = [4.0, 1.0, 100.0, 0.5, 0.5, 2.0, 2.0, 1.0]
    inputs = inputs_of(
        ratios,
        advantages=[-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        mask=[True, True, False, True, True, True, True, False],
        sequences=[0, 0, 0, 1, 1, 1, 2, -1],
    )
    loss, gradient, metrics = run("gspo", inputs)
    second = 2 ** (-1 / 3)
    assert loss == approx([2.0, 2.0, 0.0, -second, -second, -second, -1.28, 0.0])
    assert gradient == approx([2.0, 2.0, 0.0, -second, -second, -second, 0.0, 0.0])
    assert metrics["ratio_mean"] == approx([2.0, 2.0, 0.0, second, second, second, 2.0, 0.0])
    assert metrics["clip_high_frac"] == [False] * 6 + [True, False]
    assert metrics["active_frac"] == [True, True, False, True, True, True, False, False]


def test_gspo_cuts_whole_sequences():
    # ratios 0.1 and 1, geometric mean 0.316 < 0.8, A = -1: both tokens lose their gradient, also the one at ratio 1
    loss, gradient, metrics = run("gspo", inputs_of([0.1, 1.0], [-1.0, -1.0]))
    assert loss == approx([0.8, 0.8]) and gradient == [0.0, 0.0] and metrics["clip_low_frac"] == [True, True]


def test_gspo_token_form_has_the_gradient_of_the_sequence_ratio():
    """With sequence_mean, -A * exp(mean(logp - old)) differentiated as it is."""
    inputs = inputs_of([2.0, 0.7, 1.1], [-1.5] * 3)
    loss_BT, _ = loss_of("gspo", inputs)
    total = loss_BT.mean()
    direct = 1.5 * (inputs.logprobs_BT - inputs.old_logprobs_BT).mean().exp()
    assert total.item() == approx(direct.item())
    # a token's loss has its gradient at that token alone, so a weight per token weighs that token
    (of_first_BT,) = torch.autograd.grad(loss_BT[0, 0], inputs.logprobs_BT, retain_graph=True)
    assert of_first_BT[0].tolist() == approx([1.5 * 1.54 ** (1 / 3), 0.0, 0.0])
    gradients = [torch.autograd.grad(x, inputs.logprobs_BT)[0] for x in (total, direct)]
    # 1.5 * 1.54^(1/3) / 3
    assert gradients[0][0].tolist() == approx([0.5 * 1.54 ** (1 / 3)] * 3)
    torch.testing.assert_close(*gradients)


def test_cispo_by_hand():
    # weights held in [0.8, 5]: 10 and 5.5 -> 5, 0.5 -> 0.8, for either sign of A; logp = -1, so -w * A * logp = w * A
    config = AlgorithmConfig(clip_low=0.2, clip_high=4.0)
    ratios = [5.5, 0.5, 10.0, 0.5, 3.0, 0.9, 10.0]
    inputs = inputs_of(ratios, [1.0, 1.0, -1.0, -1.0, 2.0, 1.0, 0.0])
    loss, gradient, metrics = run("cispo", inputs, config)
    assert loss == approx([5.0, 0.8, -5.0, -0.8, 6.0, 0.9, 0.0])
    assert gradient == approx([-5.0, -0.8, 5.0, 0.8, -6.0, -0.9, 0.0])
    assert metrics.pop("ratio_mean") == approx(ratios) and metrics.pop("ratio_max") == approx(ratios)
    assert metrics == {
        "clip_low_frac": [False, True, False, True, False, False, False],
        "clip_high_frac": [True, False, True, False, False, False, True],
        "clip_frac": [True, True, True, True, False, False, True],
        "active_frac": [True] * 6 + [False],
    }


def test_sapo_by_hand():
    # tau = 2 where A > 0. ratio 1: p = 1/2, f = 4/2 * 1/2 = 1. ratio 1 + log(3)/2: p = 3/4, f = 3/2
    # tau = 4 where A < 0. ratio 1 - log(3)/4: p = 1/4, f = 1/4
    above, below = 1 + LOG3 / 2, 1 - LOG3 / 4
    inputs = inputs_of([1.0, above, below, 1e4], [1.0, 1.0, -2.0, 1.0])
    loss, gradient, metrics = run("sapo", inputs, temperature_positive=2.0, temperature_negative=4.0)
    assert loss == approx([-1.0, -1.5, 0.5, -2.0])
    # -4 p (1 - p) * ratio * A; at ratio 10000 the gate is shut
    assert gradient == approx([-1.0, -0.75 * above, 0.75 * below * 2, 0.0])
    assert metrics["gate_mean"] == approx([1.0, 0.75, 0.75, 0.0])
    assert metrics["ratio_mean"] == approx([1.0, above, below, 1e4])
    assert metrics["active_frac"] == [True, True, True, False]


def test_papers_own_options():
    """Without options SAPO has the temperatures 1 and 1.05, and the dual clip the bound 3, as in their papers."""
    inputs = inputs_of([4.0, 4.0], [1.0, -1.0])
    for name, options in (
        ("sapo", {"temperature_positive": 1.0, "temperature_negative": 1.05}),
        (DUAL_CLIP, {"bound": 3.0}),
    ):
        assert run(name, inputs) == run(name, inputs, **options)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_by_hand(divergence):
    # sampler -> policy  ratio  |p - q|  KL      A     leaves the region?
    # 0.5  -> 0.8            1.6    0.3      0.2231  +1    yes
    # 0.5  -> 0.8                                    -1    no: it comes back
    # 0.5  -> 0.6            1.2    0.1      0.0204  +1    no: near
    # 0.5  -> 0.2            0.4    0.3      0.2231  -1    yes
    # 0.5  -> 0.2                                    +1    no: it comes back
    # 1e-5 -> 1e-3           100    0.001    0.0009  +1    no: rare, whatever the ratio
    # 0.99 -> 0.8            0.81   0.19     0.1810  -1    yes, where a ratio above 0.8 is not clipped
    old, new = [0.5] * 5 + [1e-5, 0.99], [0.8, 0.8, 0.6, 0.2, 0.2, 1e-3, 0.8]
    inputs = inputs_of([1.0] * 7, [1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
    logprobs = {"logprobs_BT": row(new).log().requires_grad_(), "old_logprobs_BT": row(old).log()}
    loss, gradient, metrics = run("dppo", dataclasses.replace(inputs, **logprobs), divergence=divergence)
    assert loss == approx([0.0, 1.6, -1.2, 0.0, -0.4, -100.0, 0.0])
    assert gradient == approx([0.0, 1.6, -1.2, 0.0, -0.4, -100.0, 0.0])  # -ratio * A where it is in the loss
    assert metrics["clip_high_frac"] == [True] + [False] * 6
    assert metrics["clip_low_frac"] == [False, False, False, True, False, False, True]
    expected = [0.3, 0.3, 0.1, 0.3, 0.3, 0.00099, 0.19]
    if divergence == "kl":
        bernoulli = [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for q, p in zip(old, new, strict=True)]
        expected = bernoulli
    assert metrics["divergence_mean"] == approx(expected)
    # another threshold: 0.6 leaves it too
    loss, _, _ = run("dppo", dataclasses.replace(inputs, **logprobs), divergence=divergence, threshold=0.02)
    assert loss[2] == 0 and loss[5] == approx(-100.0)


def test_reinforce_by_hand():
    # logp = -3: -A * logp = 3 A, gradient -A, whatever the ratio
    inputs = inputs_of([1.0, 5.0, 0.5, 3.0, 5.0], [2.0, -1.0, 1.0, 1.0, 0.0], logprob=-3.0)
    loss, gradient, metrics = run("reinforce", inputs)
    assert loss == approx([6.0, -3.0, 3.0, 3.0, 0.0]) and gradient == approx([-2.0, 1.0, -1.0, -1.0, 0.0])
    assert metrics.keys() == {"ratio_mean", "ratio_max", "active_frac"}
    # weights 1, 4 (cut off from 5), 0.5, 3
    loss, gradient, metrics = run("reinforce", inputs, max_importance_weight=4.0)
    assert loss == approx([6.0, -12.0, 1.5, 9.0, 0.0]) and gradient == approx([-2.0, 4.0, -0.5, -3.0, 0.0])
    assert metrics["weight_cut_frac"] == [False, True, False, False, True]
    assert metrics["ratio_max"] == approx([1.0, 5.0, 0.5, 3.0, 5.0])
    assert metrics["active_frac"] == [True, True, True, True, False]


# --- what holds for every loss ---------------------------------------------------------------------------------------

EVERYTHING_ON = {name: {} for name in LOSSES} | {"reinforce": {"max_importance_weight": 2.0}}
EVERYTHING_ON |= {"dppo": {"divergence": "kl"}}


@pytest.mark.parametrize("everything_on", [False, True], ids=["plain", "everything_on"])
@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_gradient_is_the_policy_gradient(name, everything_on):
    # the advantages of two sequences and of one without any
    advantages = [3.0, 3.0, -0.5, 0.0]
    _, gradient, metrics = run(
        name, inputs_of([1.0] * 4, advantages, sequences=[0, 0, 1, 2]), **EVERYTHING_ON[name] if everything_on else {}
    )
    assert gradient == approx([-3.0, -3.0, 0.5, 0.0])
    assert metrics["active_frac"] == [True, True, True, False]
    assert metrics["ratio_mean"] == [1.0] * 4


@pytest.mark.parametrize("everything_on", [False, True], ids=["plain", "everything_on"])
@pytest.mark.parametrize("name", LOSSES)
def test_active_frac_is_where_the_gradient_is_not_zero(name, everything_on):
    ratios = [math.exp(x) for x in (-30.0, -3.0, -0.3, 0.0, 0.1, 0.3, 2.0, 5.0, 30.0)]
    for advantage in (1.0, -1.0, 0.0):
        inputs = inputs_of(ratios, [advantage] * 9, sequences=list(range(9)))
        _, gradient, metrics = run(name, inputs, **EVERYTHING_ON[name] if everything_on else {})
        assert metrics["active_frac"] == [value != 0 for value in gradient]


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_has_exactly_no_loss_and_no_gradient(name):
    loss, gradient, metrics = run(name, inputs_of([0.1, 1.0, 10.0, 1e6], [0.0] * 4), **EVERYTHING_ON[name])
    assert loss == [0.0] * 4 and gradient == [0.0] * 4
    assert metrics["active_frac"] == [False] * 4


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_may_hold_anything(name, junk):
    """A loss token next to junk has the loss, gradient and metrics that it has alone."""
    alone = run(name, inputs_of([1.2], [-1.0]), **EVERYTHING_ON[name])
    old = -1 - math.log(1.2)
    mask, sequences = [True, False, False, False], [0, 0, 1, -1]
    fields = vars(inputs_of([1.0] * 4, [0.0] * 4, mask, sequences))
    fields |= {"logprobs_BT": row([-1.0, junk, junk, junk]).requires_grad_()}
    fields |= dict.fromkeys(("old_logprobs_BT", "generator_logprobs_BT"), row([old, junk, -1.0, junk]))
    inputs = make_inputs(**fields | {"advantages_BT": row([-1.0, junk, junk, 1.0])})
    loss, gradient, metrics = run(name, inputs, **EVERYTHING_ON[name])
    assert loss == approx([*alone[0], 0.0, 0.0, 0.0]) and loss[1:] == [0.0] * 3
    assert gradient == approx([*alone[1], 0.0, 0.0, 0.0]) and gradient[1:] == [0.0] * 3
    assert metrics == {key: approx([*value, 0.0, 0.0, 0.0]) for key, value in alone[2].items()}


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_gives_zero_and_no_gradient(name):
    junk_BT = torch.full((2, 3), math.nan)
    inputs = make_inputs(
        logprobs_BT=junk_BT.clone().requires_grad_(),
        old_logprobs_BT=junk_BT,
        advantages_BT=junk_BT,
        loss_mask_BT=torch.zeros(2, 3, dtype=torch.bool),
        sequence_BT=torch.full((2, 3), -1),
        num_loss_tokens_BT=torch.ones(2, 3, dtype=torch.int64),
        num_sequences=0,
    )
    loss_BT, metrics = loss_of(name, inputs, **EVERYTHING_ON[name])
    for estimator in KL_ESTIMATORS:
        loss_BT = loss_BT + kl(inputs.logprobs_BT - inputs.old_logprobs_BT, estimator)
    metrics |= mismatch(inputs, CONFIG)
    for kind in CORRECTIONS:
        weights_BT, corrected_BT = importance_weights(inputs, correction(kind, 0.5, 2.0))
        assert (weights_BT == 1).all() and not corrected_BT.any()
    assert (loss_BT == 0).all() and all(value_BT.isfinite().all() for value_BT in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e4, -1e4, 60.0, -60.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite(name, gap, dtype):
    """One token far off, next to another sequence's ordinary token, which keeps its gradient -A."""
    for advantage, options in itertools.product([1.0, -1.0], [{}, EVERYTHING_ON[name]]):
        inputs = dataclasses.replace(
            inputs_of([1.0] * 2, [0.0] * 2, sequences=[0, 1]),
            logprobs_BT=row([gap, -1.0], dtype).requires_grad_(),
            old_logprobs_BT=row([0.0, -1.0], dtype),
            advantages_BT=row([advantage] * 2, dtype),
        )
        loss, gradient, metrics = run(name, inputs, **options)
        assert all(math.isfinite(x) for x in itertools.chain(loss, gradient, *metrics.values()))
        assert gradient[1] == pytest.approx(-advantage, rel=1e-6)
        # held at exp(+-20) before anything else
        assert metrics["ratio_max"][0] == pytest.approx(math.exp(math.copysign(20, gap)), rel=1e-5)
        if name not in ("cispo", "reinforce"):  # their weight has no gradient to lose
            assert gradient[0] == 0 and not metrics["active_frac"][0]


def test_ratio_is_held_beyond_the_clamp():
    # A = -1, ratio exp(30): nothing but the clamp bounds the loss
    loss, gradient, _ = run("grpo", inputs_of([math.exp(30), math.exp(19)], [-1.0, -1.0]))
    assert loss == approx([math.exp(20), math.exp(19)]) and gradient == approx([0.0, math.exp(19)])


@pytest.mark.parametrize("name", LOSSES)
def test_nan_inside_the_mask_is_not_hidden(name):
    for broken in ("logprobs_BT", "advantages_BT"):
        inputs = dataclasses.replace(inputs_of([1.0], [1.0]), **{broken: row([math.nan]).requires_grad_()})
        assert loss_of(name, inputs, **EVERYTHING_ON[name])[0].isnan().all()


# --- KL to the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # x = log policy - log reference = 0, log 2, -log 2
        ("k1", [0.0, LOG2, -LOG2], [1.0, 1.0, 1.0]),
        ("k2", [0.0, LOG2**2 / 2, LOG2**2 / 2], [0.0, LOG2, -LOG2]),
        # exp(-x) - 1 + x: 1/2 - 1 + log 2 and 2 - 1 - log 2; its derivative 1 - exp(-x)
        ("k3", [0.0, LOG2 - 0.5, 1 - LOG2], [0.0, 0.5, -1.0]),
        ("k3_k2_gradient", [0.0, LOG2 - 0.5, 1 - LOG2], [0.0, LOG2, -LOG2]),
    ],
)
def test_kl_by_hand(estimator, value, gradient):
    logprobs_BT = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    kl_BT = kl(logprobs_BT - row([-1.0, -1.0 - LOG2, -1.0 + LOG2]), estimator)
    assert kl_BT[0].tolist() == approx(value)
    assert torch.autograd.grad(kl_BT.sum(), logprobs_BT)[0][0].tolist() == approx(gradient)


def test_kl_estimators_in_expectation():
    """Over all three tokens with their probabilities: who is unbiased, and who has the gradient of the true KL."""
    logits_V = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    ref_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logprobs_V = logits_V.log_softmax(0)
    true = (logprobs_V.exp() * (logprobs_V - ref_V.log())).sum()
    (true_gradient_V,) = torch.autograd.grad(true, logits_V, retain_graph=True)
    assert true.item() > 0.1 and true_gradient_V.abs().max() > 0.1

    values, gradients = {}, {}
    for estimator in KL_ESTIMATORS:
        mean = (logprobs_V.detach().exp() * kl(logprobs_V - ref_V.log(), estimator)).sum()
        values[estimator] = mean.item()
        (gradients[estimator],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    for estimator in ("k1", "k3", "k3_k2_gradient"):
        assert values[estimator] == approx(true.item())
    assert abs(values["k2"] - true.item()) > 1e-3
    for estimator in ("k2", "k3_k2_gradient"):
        torch.testing.assert_close(gradients[estimator], true_gradient_V)
    assert gradients["k1"].abs().max() < 1e-12
    assert (gradients["k3"] - true_gradient_V).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("old_logprobs", "correction"), [("policy", "truncate"), ("generator", "none"), ("generator", "truncate")]
)
def test_the_weighted_kl_has_value_and_gradient_of_the_kl_whoever_sampled(old_logprobs, correction):
    """Over all five tokens by the generator's probabilities, after updates: policy, old policy and generator differ.

    With old log-probs of the policy the correction makes up for the generator, else the ratio does; with both, as
    `reinforce` allows, the generator must not be counted twice. Plain k3 is off.
    """
    rng = torch.Generator().manual_seed(0)
    generator_V, old_V, ref_V = torch.randn(3, 5, dtype=torch.float64, generator=rng).log_softmax(1)
    logits_V = torch.randn(5, dtype=torch.float64, generator=rng, requires_grad=True)
    logprobs_V = logits_V.log_softmax(0)
    true = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    (true_gradient_V,) = torch.autograd.grad(true, logits_V, retain_graph=True)
    inputs = make_inputs(
        logprobs_BT=logprobs_V[None],
        old_logprobs_BT=(old_V if old_logprobs == "policy" else generator_V)[None],
        generator_logprobs_BT=generator_V[None],
        ref_logprobs_BT=ref_V[None],
        advantages_BT=row([1.0] * 5),
        loss_mask_BT=row([True] * 5, torch.bool),
        sequence_BT=row([0] * 5, torch.int64),
        num_loss_tokens_BT=row([5] * 5, torch.int64),
        num_sequences=1,
    )
    means, gradients = {}, {}
    for estimator in ("k3", "k3_weighted"):
        config = AlgorithmConfig(
            old_logprobs=old_logprobs,
            importance_correction=correction,
            importance_correction_high=1e9,
            kl_estimator=estimator,
        )
        mean = (generator_V.exp() * token_kl(inputs, config)).sum()
        means[estimator] = mean.item()
        (gradients[estimator],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    assert means["k3_weighted"] == approx(true.item())
    torch.testing.assert_close(gradients["k3_weighted"], true_gradient_V)
    assert abs(means["k3"] - true.item()) > 1e-2 and (gradients["k3"] - true_gradient_V).abs().max() > 1e-2


@pytest.mark.parametrize("estimator", ["k3", "k3_k2_gradient"])
def test_k3_keeps_its_digits_near_zero(estimator):
    # x^2 / 2 for a small x; exp(x) - x - 1 in float32 gives 0 or 1e-7 here
    kl_BT = kl(row([1e-3, -1e-3], torch.float32), estimator)
    assert kl_BT[0].tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)
    assert (kl_BT >= 0).all()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_kl_of_extreme_log_ratios_is_that_at_the_clamp(estimator, gap):
    logprobs_BT = row([gap], torch.float32).requires_grad_()
    kl_BT = kl(clamped(logprobs_BT), estimator)
    x = math.copysign(20, gap)
    expected = {"k1": x, "k2": 200.0}.get(estimator, math.exp(-x) - 1 + x)
    assert kl_BT.item() == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.grad(kl_BT.sum(), logprobs_BT)[0].item() == 0.0


# --- mismatch and its correction -------------------------------------------------------------------------------------


def sampled_by(policy_BT, generator_BT, mask):
    """Tokens with these log-probs at the start of the step, for the functions that look at nothing else."""
    fields = vars(inputs_of([1.0] * len(mask), [0.0] * len(mask), mask))
    fields |= {"logprobs_BT": torch.zeros_like(policy_BT), "old_logprobs_BT": policy_BT}
    return make_inputs(**fields | {"generator_logprobs_BT": generator_BT})


def correction(kind, low, high):
    return AlgorithmConfig(importance_correction=kind, importance_correction_low=low, importance_correction_high=high)


def effective_sample_size(mean_weight, mean_squared_weight):
    weights = {"mismatch/weight": mean_weight, "mismatch/weight_squared": mean_squared_weight}
    return with_effective_sample_size(weights)["mismatch/ess"]


def test_mismatch_and_effective_sample_size_by_hand():
    # policy over generator: 2, 1/2, 1; the last token does not count
    policy_BT = row([-1.0 + LOG2, -1.0 - LOG2, -1.0, math.nan])
    generator_BT = row([-1.0, -1.0, -1.0, math.inf])
    metrics = mismatch(sampled_by(policy_BT, generator_BT, [True, True, True, False]), CONFIG)
    assert {key: value_BT[0, :3].tolist() for key, value_BT in metrics.items()} == {
        "mismatch/mean": approx([LOG2, LOG2, 0.0]),
        "mismatch/max": approx([LOG2, LOG2, 0.0]),
        "mismatch/kl": approx([1 - LOG2, LOG2 - 0.5, 0.0]),
        "mismatch/weight": approx([2.0, 0.5, 1.0]),
        "mismatch/weight_squared": approx([4.0, 0.25, 1.0]),
    }
    # mean(w) = 7/6, mean(w^2) = 7/4: (49/36) / (7/4) = 7/9
    assert effective_sample_size(7 / 6, 7 / 4) == approx(7 / 9)


def test_effective_sample_size_at_its_ends():
    assert with_effective_sample_size({"a": 1.0}) == {"a": 1.0}
    assert effective_sample_size(1.0, 1.0) == 1.0 and effective_sample_size(0.5, 0.25) == 1.0
    # one of n tokens has all the weight: (1/n)^2 / (1/n)
    assert effective_sample_size(0.01, 0.01) == approx(0.01)
    assert effective_sample_size(0.0, 0.0) == 1.0
    assert effective_sample_size(0.1, 0.01 - 1e-12) == 1.0


def test_mismatch_kl_is_that_of_generator_and_policy():
    generator_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    policy_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    metrics = mismatch(sampled_by(policy_V.log()[None], generator_V.log()[None], [True] * 3), CONFIG)
    expected = (generator_V * (generator_V / policy_V).log()).sum().item()
    assert (generator_V * metrics["mismatch/kl"][0]).sum().item() == approx(expected)
    # weights average to 1 where the generator's samples can be reweighted to the policy's
    assert (generator_V * metrics["mismatch/weight"][0]).sum().item() == approx(1.0)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_mismatch_of_extreme_log_ratios(gap):
    metrics = mismatch(sampled_by(row([gap], torch.float32), torch.zeros(1, 1), [True]), CONFIG)
    assert metrics["mismatch/max"].item() == 1e4  # as it is: nothing is multiplied by it
    assert metrics["mismatch/weight"].item() == pytest.approx(math.exp(math.copysign(20, gap)), rel=1e-5)
    assert all(value_BT.isfinite().all() for value_BT in metrics.values())


def corrected(ratios, kind, low=0.5, high=2.0, mask=None, sequences=None):
    """Weights and what was changed, of tokens with these ratios of policy and generator."""
    inputs = inputs_of([1.0] * len(ratios), [1.0] * len(ratios), mask, sequences)  # policy and old: -1
    generator_BT = -1.0 - row(ratios).log()
    inputs = make_inputs(**vars(inputs) | {"generator_logprobs_BT": generator_BT})
    weights_BT, corrected_BT = importance_weights(inputs, correction(kind, low, high))
    assert not weights_BT.requires_grad and corrected_BT.dtype == torch.bool
    return weights_BT[0].tolist(), corrected_BT[0].tolist()


def test_corrections_of_tokens_by_hand():
    ratios, mask = [4.0, 1.0, 0.25, 1.5, 9.0], [True, True, True, True, False]
    assert corrected(ratios, "none", mask=mask) == ([1.0] * 5, [False] * 5)
    weights, changed = corrected(ratios, "truncate", mask=mask)
    assert weights == approx([2.0, 1.0, 0.25, 1.5, 1.0]) and changed == [True, False, False, False, False]
    weights, changed = corrected(ratios, "mask_tokens", mask=mask)
    assert weights == approx([0.0, 1.0, 0.0, 1.5, 1.0]) and changed == [True, False, True, False, False]


def test_correction_of_sequences_by_hand():
    # one row. 0: 4 and 1/2, geometric mean 1.41: kept, though 4 alone is out. 1: 1/4 and 0.9, mean 0.474: out,
    # except for the third token, which does not count. 2: 3 alone: out. 3: 1.5 alone: kept. Then padding.
    weights, changed = corrected(
        [4.0, 0.5, 0.25, 0.9, 50.0, 3.0, 1.5, 70.0],
        "mask_sequences",
        mask=[True, True, True, True, False, True, True, False],
        sequences=[0, 0, 1, 1, 1, 2, 3, -1],
    )
    assert weights == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert changed == [False, False, True, True, False, True, False, False]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_corrections_ignore_masked_positions_and_survive_extremes(kind, junk):
    inputs = inputs_of([1.0] * 4, [1.0] * 4, mask=[True, True, True, False], sequences=[0, 1, 2, -1])
    policy_BT, generator_BT = row([1e4, -1e4, 0.0, junk], torch.float32), row([0.0, 0.0, 0.0, junk], torch.float32)
    fields = {"logprobs_BT": policy_BT, "old_logprobs_BT": policy_BT, "generator_logprobs_BT": generator_BT}
    weights_BT, corrected_BT = importance_weights(make_inputs(**vars(inputs) | fields), correction(kind, 0.5, 2.0))
    expected = {"none": [1.0, 1.0], "truncate": [2.0, math.exp(-20)]}.get(kind, [0.0, 0.0])
    assert weights_BT[0].tolist() == pytest.approx([*expected, 1.0, 1.0], rel=1e-5)
    changed = {"none": [False, False], "truncate": [True, False]}.get(kind, [True, True])
    assert corrected_BT[0].tolist() == [*changed, False, False]


# --- aggregation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"),
    # two completions of 1 and 3 tokens, losses 4 and 1, 2, 3, and one that does not count; at most 8 tokens
    [("token_mean", 10 / 4), ("sequence_mean", (4 + 6 / 3) / 2), ("fixed_horizon", 10 / (2 * 8))],
)
def test_aggregations_by_hand(kind, value):
    mask = [False, True, False, True, True, True, False, True]
    lengths, counts = [2, 4, 2], [True, True, False]
    samples = [
        Sample(torch.ones(n).long(), torch.tensor(m) & c, -torch.ones(n))
        for n, m, c in zip(lengths, (mask[:2], mask[2:6], mask[6:]), counts, strict=True)
    ]
    batch = make_batch(samples)
    # reinforce: the loss is -A * logp, and logp is -1
    losses_N = torch.tensor([0.0, 4.0, 0.0, 1.0, 2.0, 3.0, math.nan, math.nan])
    batch = dataclasses.replace(batch, advantages_N=losses_N)
    algorithm = AlgorithmConfig(loss="reinforce", advantages="none", aggregation=kind)
    config = GRPOConfig(algorithm=algorithm)
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, max_completion_tokens=8))
    total = 0.0
    for rows in ([[0, 2]], [[1]]):  # two micro-batches, whose parts add up
        micro = build_micro_batch(batch, rows, 8)
        objective = grpo_objective(config, batch, 0.0, first_update=True)
        total += objective(micro, -torch.ones(1, 8, requires_grad=True), torch.zeros(1, 8))[0].item()
    assert total == approx(value)


def test_an_update_in_which_nothing_counts_divides_by_one():
    empty = make_batch([Sample(torch.ones(2).long(), torch.zeros(2).bool(), torch.zeros(2))])
    assert UpdateTotals.of(empty, 8) == UpdateTotals(num_tokens=1, num_sequences=1, max_completion_tokens=8)


OWN_SLOTS = """
import torch

def square_root(loss_BT, x, totals):  # a sequence of n tokens weighs sqrt(n)
    return (loss_BT / x.num_loss_tokens_BT.sqrt()).sum() / totals.num_sequences

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


# --- a user's own loss -----------------------------------------------------------------------------------------------

OWN_LOSS = """
import dataclasses

@dataclasses.dataclass
class Weight:
    value: float = 1.0

def scaled(inputs, config, *, scale=Weight().value):
    return -scale * inputs.logprobs_BT * inputs.advantages_BT, {"scale": inputs.advantages_BT * 0 + scale}

def of_one(inputs): pass

def of_three(inputs, config, more): pass
"""


@pytest.fixture
def own_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)
    return tmp_path / "own.py"


def test_own_loss_errors_name_the_way_out(own_file):
    for name in ("of_one", "of_three"):
        with pytest.raises(ValueError, match=rf"{name}\(\) .*argument.*; it is called as loss\(x, config"):
            try_algorithm(complete_of(loss=f"{own_file}:{name}"))


def test_options_reach_the_loss_and_its_metrics_are_named_after_it(own_file):
    inputs = inputs_of([5.0], [-2.0])
    loss_BT, metrics = loss_of(DUAL_CLIP, inputs, bound=3.0)
    assert loss_BT.item() == approx(6.0) and metrics["loss/dual_clip_frac"].tolist() == [[True]]
    loss_BT, metrics = loss_of(f"{own_file}:scaled", inputs, scale=3.0)
    assert loss_BT.item() == -6.0 and metrics.keys() == {"loss/scale"}  # logp = -1
    try_algorithm(complete_of(loss=f"{own_file}:scaled", loss_options={"scale": 3.0}))


def complete_of(**fields):
    return AlgorithmConfig(**fields).resolved


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("grpo", {"bound": 3}, "loss grpo has no options"),
        (DUAL_CLIP, {"bond": 3}, r"no option 'bond' \(did you mean bound\?\); its options .* are: bound"),
        ("cispo", {"bound": 3}, "loss cispo has no option 'bound'; its options .* are: none"),
        (DUAL_CLIP, {"bound": 0.5}, "bound=0.5 must be above 1"),
        ("sapo", {"temperature_negative": 0}, "temperature_negative=0 must be above 0"),
        ("dppo", {"divergence": "js"}, "divergence='js' is unknown; use tv or kl"),
        ("dppo", {"threshold": 0}, "threshold=0 must be above 0"),
        ("reinforce", {"max_importance_weight": -1}, "max_importance_weight=-1 must not be negative"),
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


def test_sequence_kl_by_hand():
    # generator over reference: 2 and 1/2 in the first sequence, 2 in the second, whose second token does not count
    mask_N = torch.tensor([False, True, True, False, True, False])
    samples = [Sample(torch.ones(3).long(), mask_N[:3], torch.tensor([9.0, -1.0, -1.0]))]
    samples += [Sample(torch.ones(3).long(), mask_N[3:], torch.tensor([9.0, -1.0, math.nan]))]
    batch = make_batch(samples)
    batch = dataclasses.replace(batch, ref_logprobs_N=torch.tensor([0, -1 - LOG2, -1 + LOG2, 0, -1 - LOG2, 0]))
    assert sequence_kl(batch, "k1").tolist() == pytest.approx([0.0, LOG2], abs=1e-6)


def test_loss_output_is_checked():
    inputs = inputs_of([1.0, 1.0], [1.0, 1.0])
    good_BT, metric_BT = -inputs.logprobs_BT, torch.ones(1, 2)
    check_loss_output((good_BT, {"a": metric_BT, "b": metric_BT > 0}), inputs, "own")
    for output, message in [
        (good_BT, r"returned a tensor of shape \(1, 2\).*; return \(loss_BT, dict"),
        ((good_BT, [metric_BT]), "returned a tuple; return"),
        ((good_BT.mean(), {}), r"a loss that is a tensor of shape \(\).*shape \(1, 2\), and leave mask and mean"),
        ((good_BT.long(), {}), "torch.int64; return one floating number per position"),
        ((1.0, {}), "a loss that is a float"),
        ((good_BT.detach(), {}), "without gradient; compute it from x.logprobs_BT"),
        ((good_BT, {"a": metric_BT.sum()}), r"metric 'a' of loss own is a tensor of shape \(\)"),
        ((good_BT, {"a": 1.0}), "metric 'a' of loss own is a float"),
        ((good_BT, {"a": good_BT}), "metric 'a' of loss own carries a gradient; detach it"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_loss_output(output, inputs, "own")


# --- the same step, however it is packed, split, sharded or permuted -------------------------------------------------


def random_step(seed=0):
    """Nine sequences: prompt ids, completion ids, advantage, old log-probs, policy log-probs (a leaf with gradient).

    One has no reward. The generator has no log-prob for one token of each long one.
    """
    generator = random.Random(seed)
    step = []
    for index, length in enumerate([1, 3, 7, 1, 3, 7, 3, 1, 7]):
        prompt, completion = [1] * generator.randint(1, 6), [2] * length
        old = [generator.uniform(-4, -1) for _ in completion]
        if length == 7:
            old[3] = -math.inf
        policy = torch.tensor([max(x, -4) + generator.uniform(-0.6, 0.6) for x in old], dtype=torch.float64)
        advantage = math.nan if index == 4 else generator.gauss(0, 1)
        step.append((prompt, completion, advantage, old, policy.requires_grad_()))
    return step


def loss_and_gradients(step, loss_name, kind, layout=None, kind_of_correction="none"):
    """Sum the step's loss over ranks and micro-batches; the gradient at each sequence's log-probs.

    layout: what `pack` takes; None is one micro-batch with a row for each sequence.
    """
    samples, policy_N = [], []
    for prompt, completion, advantage, old, policy in step:
        old_T, no_prompt = torch.tensor([*[0.0] * len(prompt), *old]), torch.zeros(len(prompt))
        sampled_T = torch.tensor([*[False] * len(prompt), *[True] * len(completion)])
        mask_T = sampled_T & old_T.isfinite() & (not math.isnan(advantage))
        samples.append(Sample(torch.tensor([*prompt, *completion]), mask_T, old_T))
        policy_N += [no_prompt.double(), policy]
    batch, policy_N = make_batch(samples), torch.cat(policy_N)
    advantages_S = torch.tensor([advantage for _, _, advantage, _, _ in step])
    batch = dataclasses.replace(batch, advantages_N=advantages_S[batch.owner_N])
    batch = dataclasses.replace(batch, old_logprobs_N=batch.generator_logprobs_N)
    totals = UpdateTotals.of(batch, 8)
    config = dataclasses.replace(CONFIG, loss=loss_name, loss_options=EVERYTHING_ON[loss_name])
    if layout is None:
        rows = [[index] for index in range(batch.num_sequences)]
        micros = [build_micro_batch(batch, rows, int(batch.lengths_S.max()))]
    else:
        packing = pack(batch, *layout)
        micros = [micro for rank in range(layout[0]) for micro in packing.micro_batches(rank)]
    total = 0.0
    for micro in micros:
        logprobs_BT = policy_N[micro.token_BT.clamp(min=0)].where(micro.token_BT >= 0, 0).float()
        inputs = LossInputs.of(micro, logprobs_BT, torch.zeros_like(logprobs_BT))
        loss_BT, _ = policy_loss(inputs, config)
        from_start = dataclasses.replace(inputs, old_logprobs_BT=inputs.logprobs_BT.detach())
        weights_BT, _ = importance_weights(from_start, correction(kind_of_correction, 0.8, 1.25))
        loss_BT = loss_BT * weights_BT + 0.1 * kl(inputs.logprobs_BT - inputs.old_logprobs_BT, "k3")
        if kind == "sequence_mean":
            part = (loss_BT / inputs.num_loss_tokens_BT).sum() / totals.num_sequences
        else:
            part = named_aggregation(kind)(loss_BT, inputs, totals)
        part.backward()
        total += part.item()
    leaves = [policy for *_, policy in step]
    gradients = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    return total, gradients, len(micros)


# ranks, tokens per micro-batch, rows rounded up to
LAYOUTS = [(1, 1000, 1), (1, 45, 8), (2, 14, 1), (4, 30, 1), (1, 14, 1), (2, 30, 8)]


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("loss_name", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_layout(loss_name, kind):
    step = random_step()
    order = [3, 8, 1, 0, 7, 5, 2, 6, 4]
    permuted = [step[i] for i in order]
    expected, expected_gradients, _ = loss_and_gradients(step, loss_name, kind)
    assert max(g.abs().max() for g in expected_gradients) > 1e-3
    assert not expected_gradients[4].any()  # no reward
    counts = set()
    for layout in LAYOUTS:
        total, gradients, count = loss_and_gradients(step, loss_name, kind, layout)
        other_total, other_gradients, _ = loss_and_gradients(permuted, loss_name, kind, layout)
        counts.add(count)
        assert total == pytest.approx(expected, abs=1e-6) and other_total == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=0)
        torch.testing.assert_close(other_gradients, [expected_gradients[i] for i in order], atol=1e-6, rtol=0)
    assert {1, 2} < counts and len(counts) > 3  # among them all in one packed row, and two micro-batches


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_corrections_do_not_depend_on_the_layout(kind):
    step = random_step()
    arguments = (step, "grpo", "token_mean")
    expected, expected_gradients, _ = loss_and_gradients(*arguments, kind_of_correction=kind)
    uncorrected, _, _ = loss_and_gradients(*arguments)
    assert (abs(expected - uncorrected) > 1e-3) == (kind != "none")
    for layout in LAYOUTS:
        total, gradients, _ = loss_and_gradients(*arguments, layout, kind_of_correction=kind)
        assert total == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss_name", ["grpo", "gspo"])
def test_layouts_agree_with_a_loop_over_sequences(loss_name):
    """The same loss written down sequence by sequence: the mean over sequences of their tokens' mean."""
    step = random_step()
    means = []
    for _, _, advantage, old, policy in step:
        log_ratios = [x - y for x, y in zip(policy.tolist(), old, strict=True) if math.isfinite(y)]
        if math.isnan(advantage):
            continue
        losses = []
        for x in log_ratios:
            ratio = math.exp(sum(log_ratios) / len(log_ratios) if loss_name == "gspo" else x)
            objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            losses.append(-objective + 0.1 * (math.exp(-x) - 1 + x))
        means.append(sum(losses) / len(losses))
    assert len(means) == 8
    total, _, _ = loss_and_gradients(step, loss_name, "sequence_mean", (2, 30))
    assert total == pytest.approx(sum(means) / 8, abs=1e-6)
