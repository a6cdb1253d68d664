"""Losses against numbers worked out by hand: values, gradients, metrics, and what must not break them."""

import dataclasses
import functools
import itertools
import math
import types

import pytest
import torch

from grpo.algorithm.importance import (
    importance_factors,
    kl,
    mismatch,
    token_kl,
    with_effective_sample_size,
)
from grpo.algorithm.inputs import LossInputs
from grpo.config import PAPER_DEFAULTS, AlgorithmConfig, GeneratorConfig, GRPOConfig
from grpo.data.layout import plan
from grpo.types import MicroBatch
from tests.rows import rows_of, stacked
from train_grpo import grpo_objective, policy_loss

torch.set_num_threads(1)
LOG2, LOG3 = math.log(2), math.log(3)
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_k2_gradient")
DUAL_CLIP = "configs/examples/dual_clip.py:dual_clip"
DPPO = "configs/examples/methods/dppo.py:dppo"
LOSSES = (*PAPER_DEFAULTS, DUAL_CLIP, DPPO)
CORRECTIONS = ("none", "truncate", "mask_tokens", "mask_sequences")
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28)

approx = functools.partial(pytest.approx, rel=1e-9, abs=1e-12)


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def make_inputs(**fields):
    """LossInputs as a run makes them; the generator's log-probs are the old ones, without a reference, unless given."""
    given = {"generator_logprobs_BT": fields["old_logprobs_BT"], "ref_logprobs_BT": None} | fields
    given |= {"num_rollout_tokens_BT": fields["num_loss_tokens_BT"]}
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


def test_metrics_of_one_loss_alone_by_hand():
    # the gate's weight 4 p (1 - p) at ratio 1 and, with tau = 2, at 1 + log(3) / 2, where p = 3/4
    _, _, metrics = run("sapo", inputs_of([1.0, 1 + LOG3 / 2], [1.0, 1.0]), temperature_positive=2.0)
    assert metrics["gate_mean"] == approx([1.0, 0.75])
    _, _, metrics = run(DUAL_CLIP, inputs_of([5.0, 2.5, 5.0], [-2.0, -2.0, 2.0]), bound=3.0)
    assert metrics["dual_clip_frac"] == [True, False, False]
    inputs = inputs_of([1.6, 0.4], [1.0, -1.0], logprob=math.log(0.8))  # 0.5 -> 0.8, and 2 -> 0.8, which counts as 1
    assert run(DPPO, inputs)[2]["divergence_mean"] == approx([0.3, 0.2])


def test_options_by_default_are_the_papers():
    inputs = inputs_of([4.0, 4.0], [1.0, -1.0])
    sapo = {"temperature_positive": 1.0, "temperature_negative": 1.05}
    for name, options in (("sapo", sapo), (DUAL_CLIP, {"bound": 3.0}), (DPPO, {"divergence": "tv", "threshold": 0.15})):
        assert run(name, inputs) == run(name, inputs, **options)


# --- what holds for every loss ---------------------------------------------------------------------------------------

CASES = {name: (name, {}) for name in LOSSES} | {"dppo, kl": (DPPO, {"divergence": "kl"})}
CLIPPING = ("grpo", "dr_grpo", "dapo", "gspo", DPPO)
each_loss = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)


@each_loss
def test_on_policy_every_gradient_is_the_policy_gradient(name, options):
    # the advantages of two sequences and of one without any
    advantages = [3.0, 3.0, -0.5, 0.0]
    _, gradient, metrics = run(name, inputs_of([1.0] * 4, advantages, sequences=[0, 0, 1, 2]), **options)
    assert gradient == approx([-3.0, -3.0, 0.5, 0.0])
    assert metrics["active_frac"] == [True, True, True, False]
    assert metrics["ratio_mean"] == [1.0] * 4


@each_loss
def test_active_frac_is_where_the_gradient_is_not_zero(name, options):
    ratios = [math.exp(x) for x in (-30.0, -3.0, -0.3, 0.0, 0.1, 0.3, 2.0, 5.0, 30.0)]
    for advantage in (1.0, -1.0, 0.0):
        inputs = inputs_of(ratios, [advantage] * 9, sequences=list(range(9)))
        _, gradient, metrics = run(name, inputs, **options)
        assert metrics["active_frac"] == [value != 0 for value in gradient]
        if name in CLIPPING:  # what is cut has no gradient; on which side, the sign of the advantage says
            low, high = metrics["clip_low_frac"], metrics["clip_high_frac"]
            assert metrics["clip_frac"] == [a or b for a, b in zip(low, high, strict=True)]
            assert not any(low if advantage >= 0 else high)
            assert any(metrics["clip_frac"]) == (advantage != 0)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@each_loss
def test_masked_positions_may_hold_anything(name, options, junk):
    """A loss token next to junk has the loss, gradient and metrics that it has alone."""
    alone = run(name, inputs_of([1.2], [-1.0]), **options)
    old = -1 - math.log(1.2)
    mask, sequences = [True, False, False, False], [0, 0, 1, -1]
    fields = vars(inputs_of([1.0] * 4, [0.0] * 4, mask, sequences))
    fields |= {"logprobs_BT": row([-1.0, junk, junk, junk]).requires_grad_()}
    fields |= dict.fromkeys(("old_logprobs_BT", "generator_logprobs_BT"), row([old, junk, -1.0, junk]))
    inputs = make_inputs(**fields | {"advantages_BT": row([-1.0, junk, junk, 1.0])})
    loss, gradient, metrics = run(name, inputs, **options)
    assert loss == approx([*alone[0], 0.0, 0.0, 0.0]) and loss[1:] == [0.0] * 3
    assert gradient == approx([*alone[1], 0.0, 0.0, 0.0]) and gradient[1:] == [0.0] * 3
    assert metrics == {key: approx([*value, 0.0, 0.0, 0.0]) for key, value in alone[2].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e4, -1e4, 60.0, -60.0])
@each_loss
def test_extreme_log_ratios_stay_finite(name, options, gap, dtype):
    """One token far off, next to another sequence's ordinary token, which keeps its gradient -A."""
    for advantage in (1.0, -1.0):
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


@each_loss
def test_nan_inside_the_mask_is_not_hidden(name, options):
    for broken in ("logprobs_BT", "advantages_BT"):
        inputs = dataclasses.replace(inputs_of([1.0], [1.0]), **{broken: row([math.nan]).requires_grad_()})
        assert loss_of(name, inputs, **options)[0].isnan().all()


# --- KL to the reference ---------------------------------------------------------------------------------------------


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
    ("old_logprobs", "correction"),
    [("policy", "truncate"), ("generator", "none"), ("generator", "truncate"), ("generator", "mask_tokens")],
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
            importance_correction_low=0.0,
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


def corrected(ratios, kind, low=0.5, high=2.0, mask=None, sequences=None):
    """Weights and what was changed, of tokens with these ratios of policy and generator."""
    inputs = inputs_of([1.0] * len(ratios), [1.0] * len(ratios), mask, sequences)  # policy and old: -1
    generator_BT = -1.0 - row(ratios).log()
    inputs = make_inputs(**vars(inputs) | {"generator_logprobs_BT": generator_BT})
    factors_BT, corrected_BT = importance_factors(inputs, correction(kind, low, high))
    assert not factors_BT.requires_grad and corrected_BT.dtype == torch.bool
    return factors_BT[0].tolist(), corrected_BT[0].tolist()


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
    factors_BT, corrected_BT = importance_factors(make_inputs(**vars(inputs) | fields), correction(kind, 0.5, 2.0))
    expected = {"none": [1.0, 1.0], "truncate": [2.0, math.exp(-20)]}.get(kind, [0.0, 0.0])
    assert factors_BT[0].tolist() == pytest.approx([*expected, 1.0, 1.0], rel=1e-5)
    changed = {"none": [False, False], "truncate": [True, False]}.get(kind, [True, True])
    assert corrected_BT[0].tolist() == [*changed, False, False]


# --- the same step, however it is packed, split, sharded or permuted -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [*((*case, "sequence_mean") for case in CASES.values()), ("grpo", {}, "token_mean"), ("grpo", {}, "fixed_horizon")],
)
def test_loss_and_gradient_do_not_depend_on_the_layout(name, options, kind):
    """The objective's sum over rows of one sequence in one call is that over ranks, micro-batches and packed rows.

    Nor on what stands outside the loss mask.
    """
    batch = pytest.importorskip("grpo.features.trial.formulas").trial_batch()
    algorithm = dataclasses.replace(
        correction("mask_sequences", 0.8, 1.25),
        **{"loss": name, "loss_options": options, "aggregation": kind, "kl_coef": 0.1},
    )
    config = GRPOConfig(algorithm=algorithm.resolved, generator=GeneratorConfig(max_completion_tokens=8))
    objective = grpo_objective(config, batch, 0.1, first_update=True)

    def total_and_gradient(micros: list[MicroBatch]) -> tuple[float, torch.Tensor]:
        policy_N = (batch.old_logprobs_N + batch.ids_N / 50 - 0.1).requires_grad_()
        total = 0.0
        for micro in micros:
            logprobs_BT = policy_N[micro.token_BT.clamp(min=0)].where(micro.token_BT >= 0, 0)
            part, _ = objective(micro, logprobs_BT, torch.zeros_like(logprobs_BT))
            part.backward()
            total += part.item()
        return total, policy_N.grad

    total, gradient_N = total_and_gradient([stacked(rows_of(batch, batch.num_sequences))])
    assert gradient_N.abs().max() > 1e-3
    fields = ("old_logprobs_N", "generator_logprobs_N", "ref_logprobs_N", "advantages_N")
    junk = {name: getattr(batch, name).where(batch.loss_mask_N, math.nan) for name in fields}
    spoiled = dataclasses.replace(batch, **junk)  # outside the loss mask, as in what an environment wrote
    counts = set()
    for num_ranks, max_tokens, multiple in [(1, 100, 1), (1, 16, 8), (2, 15, 1), (4, 10, 4), (1, 7, 1)]:
        layout = plan(spoiled, num_ranks, max_tokens, multiple)
        micros = [micro for rank in range(num_ranks) for micro in layout.micro_batches(rank)]
        counts.add(len(micros))
        found, found_N = total_and_gradient(micros)
        assert found == pytest.approx(total, abs=1e-6)
        torch.testing.assert_close(found_N, gradient_N, atol=1e-6, rtol=0)
    assert len(counts) > 2  # among them all in one packed row
