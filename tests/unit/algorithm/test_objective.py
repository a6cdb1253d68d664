"""The advantages and the objective as train_grpo.py puts them together, and what several updates do to them."""

import dataclasses
import math

import pytest
import torch

from grpo.config import AlgorithmConfig, GRPOConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.types import Rollout, TrainBatch
from tests.rollouts import rewarded, sequence
from tests.rows import one_row
from train_grpo import add_advantages, grpo_objective

# one prompt token and two completion tokens; the generator gave the second a probability 10 times too small
LOGPROBS = [-1.0, -2.0]
GENERATOR = [-1.0, -2.0 - math.log(10)]


def samples(number: int, **facts) -> list[Rollout]:
    """The same sequence several times."""
    mask_T = torch.tensor([False, True, True])
    return [sequence(torch.tensor([5, 6, 7]), mask_T, torch.tensor([0.0, *GENERATOR]), **facts)] * number


def step(
    algorithm: AlgorithmConfig, logprobs=LOGPROBS, first=True, entropy=0.0, **fields
) -> tuple[float, dict, list[float]]:
    """Loss, metrics of the two tokens, and the gradient by their log-probs; advantages are 1."""
    batch = dataclasses.replace(make_batch(samples(1)), advantages_N=torch.ones(3), **fields)
    micro = one_row(batch, multiple=4)
    logprobs_BT = torch.tensor([[*logprobs, 0.0, 0.0]], requires_grad=True)
    config = GRPOConfig(algorithm=algorithm.resolved)
    objective = grpo_objective(config, batch, algorithm.kl_coef, first)
    loss, metrics = objective(micro, logprobs_BT, torch.full((1, 4), entropy))
    loss.backward()
    assert not any(values_BT.requires_grad for values_BT in metrics.values())
    return loss.item(), {name: x[0, :2].tolist() for name, x in metrics.items()}, logprobs_BT.grad[0, :2].tolist()


@pytest.mark.parametrize(
    ("correction", "weights", "active"),
    [
        ("none", [1, 1], [1, 1]),
        ("truncate", [1, 2], [1, 1]),  # policy over generator is 10, cut off at 2
        ("mask_tokens", [1, 0], [1, 0]),
        ("mask_sequences", [0, 0], [0, 0]),  # geometric mean of 1 and 10: 3.16, above 2
    ],
)
def test_corrections_weigh_the_gradient(correction, weights, active):
    # ratio 1, advantage 1, mean of two tokens: each has the gradient -weight / 2
    loss, metrics, gradient = step(AlgorithmConfig(importance_correction=correction))
    assert gradient == pytest.approx([-weight / 2 for weight in weights])
    assert loss == pytest.approx(-sum(weights) / 2)
    assert metrics["loss/active_frac"] == active
    assert metrics["mismatch/corrected_frac"] == [weight != 1 for weight in weights]
    assert metrics["mismatch/mean"] == pytest.approx([0, math.log(10)])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),  # at log ratio log 2; all are 0 at log ratio 0, and so is every slope but k1's
    [
        ("k1", math.log(2), 1),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 1 / 2, 1 / 2),  # exp(-x) - 1 + x, whose slope is 1 - exp(-x)
        ("k3_k2_gradient", math.log(2) - 1 / 2, math.log(2)),
        ("k3_weighted", math.log(2) - 1 / 2, math.log(2)),  # at ratio 1
    ],
)
def test_the_kl_joins_the_loss(estimator, value, slope):
    # policy over reference is 2 for the first token and 1 for the second; each token weighs 1/2
    reference = torch.tensor([0.0, -1.0 - math.log(2), -2.0])
    kl = {"kl_coef": 0.1, "kl_estimator": estimator, "importance_correction": "none"}
    loss, metrics, gradient = step(AlgorithmConfig(**kl), ref_logprobs_N=reference)
    assert metrics["kl"] == pytest.approx([value, 0], abs=1e-6)
    assert loss == pytest.approx(-1 + 0.1 * value / 2)
    assert gradient == pytest.approx([(-1 + 0.1 * slope) / 2, (-1 + 0.1 * (estimator == "k1")) / 2])
    # in the reward, it is measured here and nothing more
    loss, metrics, _ = step(AlgorithmConfig(**kl, kl_in="reward"), ref_logprobs_N=reference)
    assert loss == -1 and metrics["kl"] == pytest.approx([value, 0], abs=1e-6)


def test_a_token_that_the_reference_gives_no_chance_costs_a_bounded_kl():
    # log ratio held at 20: exp(-20) - 1 + 20 = 19
    algorithm = AlgorithmConfig(kl_coef=0.1, importance_correction="none")
    loss, metrics, _ = step(algorithm, ref_logprobs_N=torch.tensor([0.0, -1.0, -1e4]))
    assert metrics["kl"] == pytest.approx([0, 19]) and loss == pytest.approx(-1 + 0.1 * 19 / 2)


def test_entropy_above_makes_the_loss_smaller():
    # ratio 1 and advantage 1: -1 for each token, and 0.1 x 2 nats taken off
    loss, _, _ = step(AlgorithmConfig(entropy_coef=0.1, importance_correction="none"), entropy=2.0)
    assert loss == pytest.approx(-1.2)


@pytest.mark.parametrize(
    ("old_logprobs", "old", "factor"),
    [
        ("policy", math.log(1.5), 1.5 * 1.1),  # policy at the start over generator, policy now over that at the start
        ("generator", 0.0, 1.65 * 1.65),  # the start is not known: policy now over generator, twice
    ],
)
def test_the_correction_weighs_the_policy_against_the_generator(old_logprobs, old, factor):
    """Whatever the ratio's denominator is; each token's gradient is -weight * ratio / 2, as long as nothing is cut."""
    generator = [-1.0, -2.0]
    now = [logprob + math.log(1.65) for logprob in generator]
    old_N = torch.tensor([0.0, *(logprob + old for logprob in generator)])
    algorithm = AlgorithmConfig(
        old_logprobs=old_logprobs, importance_correction="truncate", clip_low=0.9, clip_high=0.9
    )
    fields = {"old_logprobs_N": old_N, "generator_logprobs_N": torch.tensor([0.0, *generator])}
    _, _, gradient = step(algorithm, logprobs=now, **fields)
    assert gradient == pytest.approx([-factor / 2] * 2, rel=1e-5)


def test_a_loss_of_ones_own_may_log_active_frac_as_numbers(tmp_path):
    (tmp_path / "loss.py").write_text(
        "def f(x, config):\n    loss = -x.logprobs_BT\n    return loss, {'active_frac': loss.detach() * 0 + 0.5}\n"
    )
    _, metrics, _ = step(AlgorithmConfig(loss=f"{tmp_path}/loss.py:f", importance_correction="mask_tokens"))
    assert metrics["loss/active_frac"] == [0.5, 0]


def test_what_a_loss_says_of_other_positions_does_not_count(tmp_path):
    (tmp_path / "loss.py").write_text("def f(x, config):\n    return 1 - x.logprobs_BT, {}\n")
    loss, _, _ = step(AlgorithmConfig(loss=f"{tmp_path}/loss.py:f", importance_correction="none"))
    assert loss == ((1 + 1) + (1 + 2)) / 2


def test_a_later_update_does_not_take_training_for_a_mismatch():
    """With the generator's old log-probs, the policy of the step's start is known in the first update only."""
    generator = AlgorithmConfig(old_logprobs="generator")
    _, first, _ = step(generator)
    _, later, _ = step(generator, first=False)
    measured = ("mean", "max", "kl", "weight", "weight_squared")
    assert first.keys() - later.keys() == {f"mismatch/{name}" for name in measured}
    # with a recomputed start it is known in every update
    old = torch.tensor([0.0, *GENERATOR])
    _, metrics, _ = step(AlgorithmConfig(), logprobs=[-3.0, -3.0], first=False, old_logprobs_N=old)
    assert metrics["mismatch/mean"] == [0, 0]  # start and generator agree, however far it moved
    assert metrics["loss/ratio_mean"][0] == pytest.approx(math.exp(-2))


# ---- Advantages

REWARDS = torch.tensor([1.0, 0.0, 3.0, 5.0])
HAS_REWARD = torch.tensor([True, True, True, False])


def advantages(algorithm: AlgorithmConfig, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
    """Two groups of two; the last completion has no reward."""
    metrics = StepMetrics(4)
    config = GRPOConfig(algorithm=algorithm.resolved, group_size=2)
    batch = rewarded(batch, REWARDS, torch.zeros(2, 4), HAS_REWARD)
    return add_advantages(config, batch, algorithm.kl_coef, metrics), metrics.means()


def test_truncated_completions_compare_but_do_not_count_if_so_configured():
    batch = make_batch([*samples(1, ended_by="tokens"), *samples(3)])
    masked, _ = advantages(AlgorithmConfig(advantages="group_mean", mask_truncated=True), batch)
    assert masked.num_loss_tokens_S.tolist() == [0, 2, 2, 0]
    assert masked.advantages_N[3].item() == -0.5  # compared with the truncated one
    kept, _ = advantages(AlgorithmConfig(advantages="group_mean"), batch)
    assert kept.num_loss_tokens_S.tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize(("gap", "penalty"), [(math.log(2), math.log(2)), (1000.0, 20.0)])
def test_the_kl_may_be_taken_from_the_reward(gap, penalty):
    """Half of the sum of both tokens' gaps in the first sequence; a token costs at most 20 nats."""
    ref_N = make_batch(samples(4)).generator_logprobs_N.clone()
    ref_N[1:3] -= gap
    batch = dataclasses.replace(make_batch(samples(4)), ref_logprobs_N=ref_N)
    algorithm = AlgorithmConfig(advantages="none", kl_in="reward", kl_coef=0.5, kl_estimator="k1")
    batch, metrics = advantages(algorithm, batch)
    assert batch.advantages_N.view(4, 3)[:, 0].tolist() == pytest.approx([1 - penalty, 0, 3, 0])
    assert metrics == {"reward/kl_penalty": pytest.approx(penalty / 3)}  # the mean over those that have a reward


def test_a_reference_that_is_not_finite_reaches_the_trainer_which_skips_the_update():
    """It excludes nothing and moves no reward; else the step would go on without those sequences, in silence."""
    batch = make_batch(samples(4))
    ref_N = batch.generator_logprobs_N.clone()
    ref_N[1] = math.nan
    batch = dataclasses.replace(batch, ref_logprobs_N=ref_N)
    algorithm = AlgorithmConfig(advantages="none", kl_in="reward", kl_coef=0.5, kl_estimator="k1")
    without = advantages(algorithm, dataclasses.replace(batch, ref_logprobs_N=None))[0]
    batch, metrics = advantages(algorithm, batch)
    assert torch.equal(batch.advantages_N, without.advantages_N) and torch.equal(batch.loss_mask_N, without.loss_mask_N)
    assert batch.loss_mask_N[1] and math.isnan(metrics["reward/kl_penalty"])


# ---- On-policy distillation


def distilled(algorithm: AlgorithmConfig, teacher: list[float], has_reward: list[bool]) -> tuple[TrainBatch, dict]:
    """Two completions of a prompt, rewards 1 and 0, whose two tokens have these log-probs by the teacher."""
    batch = make_batch(samples(2))
    batch = dataclasses.replace(batch, ref_logprobs_N=torch.tensor([math.nan, *teacher] * 2))
    config, metrics = GRPOConfig(algorithm=algorithm.resolved, group_size=2), StepMetrics(2)
    batch = rewarded(batch, torch.tensor([1.0, 0.0]), torch.zeros(2, 2), torch.tensor(has_reward))
    return add_advantages(config, batch, algorithm.kl_coef, metrics), metrics.means()


def test_a_teacher_judges_every_token_and_joins_the_rewards():
    # the teacher gives the tokens twice and half the generator's probability: log 2 and -log 2, weighted 0.5
    log2 = math.log(2)
    teacher = [GENERATOR[0] + log2, GENERATOR[1] - log2]
    algorithm = AlgorithmConfig(advantages="group_mean", distill_coef=0.5)
    batch, metrics = distilled(algorithm, teacher, [True, True])
    rewarded = [[0.5 + 0.5 * log2, 0.5 - 0.5 * log2], [-0.5 + 0.5 * log2, -0.5 - 0.5 * log2]]
    assert batch.advantages_N.view(2, 3)[:, 1:].flatten().tolist() == pytest.approx(sum(rewarded, []))
    assert metrics == {"distill/reverse_kl": pytest.approx(0, abs=1e-6)}
    # without any reward the teacher's part is left, and every completion counts
    batch, metrics = distilled(algorithm, [GENERATOR[0] - log2, GENERATOR[1] - 2 * log2], [False, False])
    assert batch.advantages_N.view(2, 3)[:, 1:].tolist() == [pytest.approx([-0.5 * log2, -log2])] * 2
    assert batch.num_loss_tokens_S.tolist() == [2, 2]
    assert metrics == {"distill/reverse_kl": pytest.approx(1.5 * log2)}
    # a teacher who gives a token no chance weighs 20 nats, not infinitely
    batch, _ = distilled(algorithm, [-math.inf, GENERATOR[1]], [False, False])
    assert batch.advantages_N.view(2, 3)[:, 1:].tolist() == [[-10, 0]] * 2
