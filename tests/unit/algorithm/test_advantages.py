"""Advantages against numbers worked out by hand."""

import itertools
import math

import pytest
import torch

from grpo.algorithm.groups import by_group, equal_rewards
from grpo.config import AlgorithmConfig, GRPOConfig, RewardConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from tests.rollouts import rewarded, sequence
from train_grpo import add_advantages

NONE = math.nan  # in this file: no reward, or no advantage; a number that would show if it were used
BATCH_STD, GDPO, MAXRL = (f"configs/examples/methods/{name}.py:{name}" for name in ("batch_std", "gdpo", "maxrl"))
COMPARING = ("group_std", "group_mean", "rloo", BATCH_STD, GDPO, MAXRL)


def compare(rewards_S, group_size, kind):
    """Advantages as a tensor, NONE where there is no reward: there it must be exactly 0."""
    has_reward_S = ~rewards_S.isnan()
    sample = sequence(torch.ones(1).long(), torch.ones(1).bool(), torch.zeros(1))
    reward, algorithm = RewardConfig(functions={"math_reward": 1.0}), AlgorithmConfig(advantages=kind)
    config = GRPOConfig(group_size=group_size, algorithm=algorithm.resolved, reward=reward)
    batch = rewarded(make_batch([sample] * len(rewards_S)), rewards_S)
    batch = add_advantages(config, batch, 0.0, StepMetrics(1))
    advantages_S = batch.advantages_N  # of sequences of one token
    assert (advantages_S[~has_reward_S] == 0).all() and torch.equal(batch.loss_mask_N, has_reward_S)
    return advantages_S.masked_fill(~has_reward_S, NONE)


def advantages(rewards, group_size, kind):
    return compare(torch.tensor(rewards), group_size, kind).tolist()


def same(rewards_S, group_size):
    return equal_rewards(*by_group(rewards_S, ~rewards_S.isnan(), group_size))


def test_group_std_by_hand():
    # mean 2, deviations -2 0 2, std with ddof=1: sqrt(8 / 2) = 2; mean 0.5, std sqrt(0.5 / 2) = 0.5
    rewards_S = torch.tensor([0.0, 2.0, 4.0, 0.0, 0.5, 1.0])
    advantages_S = compare(rewards_S, 3, "group_std")
    expected = [-2 / 2.0001, 0, 2 / 2.0001, -0.5 / 0.5001, 0, 0.5 / 0.5001]
    assert advantages_S.tolist() == pytest.approx(expected, abs=1e-7)
    assert advantages_S.dtype == torch.float32


def test_group_mean_by_hand():
    assert advantages([0.0, 2.0, 4.0, 1.0, 1.0, 4.0], 3, "group_mean") == [-2.0, 0.0, 2.0, -1.0, -1.0, 2.0]


def test_batch_std_by_hand():
    # group means 1 and 6; all rewards 0 2 4 8: mean 3.5, deviations squared 12.25 + 2.25 + 0.25 + 20.25 = 35, over 3
    std = math.sqrt(35 / 3) + 1e-4
    expected = [-1 / std, 1 / std, -2 / std, 2 / std]
    assert advantages([0.0, 2.0, 4.0, 8.0], 2, BATCH_STD) == pytest.approx(expected, abs=1e-7)


def test_rloo_by_hand():
    # the means of the others: 3, 2, 1
    assert advantages([0.0, 2.0, 4.0], 3, "rloo") == [-3.0, 0.0, 3.0]
    # 8 - 1 and 1 - 8: with two, the other one
    assert advantages([8.0, 1.0], 2, "rloo") == [7.0, -7.0]


def test_maxrl_by_hand():
    # mean 1/4: 0.75 / 0.25 = 3 and -1; all solved and none solved teach nothing
    assert advantages([1.0, 0.0, 0.0, 0.0, *[1.0] * 4, *[0.0] * 4], 4, MAXRL) == [3.0, -1.0, -1.0, -1.0, *[0.0] * 8]
    # mean 1/2 of the two rewards that there are
    found = advantages([1.0, 0.0, NONE], 3, MAXRL)
    assert found[:2] == [1.0, -1.0] and math.isnan(found[2])
    with pytest.raises(ValueError, match="maxrl divides by a group's mean .* a reward is -0.5; leave out .*group_mean"):
        advantages([1.0, -0.5], 2, MAXRL)


def test_maxrl_has_in_expectation_the_gradient_of_the_expansion_of_log_p():
    """The mean over all outcomes of three completions, each right with probability p = sigmoid(t) = 1/4.

    With q = 1 - p, log p = -(q + q^2 / 2 + q^3 / 3 + ...), of which three completions have the first two terms; by hand
    d/dt -(q + q^2 / 2) = p q (1 + q) = 3/16 * 7/4 = 21/64.
    """
    expected, p = 0.0, 1 / 4
    for outcome in itertools.product([1.0, 0.0], repeat=3):
        chance = math.prod(p if right else 1 - p for right in outcome)
        scores = [1 - p if right else -p for right in outcome]  # d/dt of the log-probability
        gradient = sum(a * score for a, score in zip(advantages(list(outcome), 3, MAXRL), scores, strict=True)) / 3
        expected += chance * gradient
    assert expected == pytest.approx(21 / 64, rel=1e-6)


def decoupled(parts, group_size, has=None):
    """GDPO's advantages of two reward functions with the weights 1 and 0.5; NONE in `parts` is None."""
    reward, algorithm = RewardConfig(functions={"a": 1.0, "b": 0.5}), AlgorithmConfig(advantages=GDPO)
    config = GRPOConfig(group_size=group_size, algorithm=algorithm.resolved, reward=reward)
    parts_FR = torch.tensor(parts)
    rewards_R = torch.tensor([1.0, 0.5]) @ parts_FR.nan_to_num(0.0)
    has_R = torch.tensor(has or [True] * parts_FR.shape[1])
    batch = make_batch([sequence(torch.ones(1).long(), torch.ones(1).bool(), torch.zeros(1))] * len(rewards_R))
    batch = rewarded(batch, rewards_R, parts_FR, has_R)
    return add_advantages(config, batch, 0.0, StepMetrics(1)).advantages_N.tolist()


def test_gdpo_by_hand():
    # first group: a = 1 0 -> +-0.5 / std 0.7071 = +-0.7071; b = 0 4 -> -+0.7071, weighs half: sums +-0.3536.
    # second group: equal values, nothing. Over the step sqrt(2 * 0.125 / 3) = 0.2887; 0.3536 / 0.2887 = 1.2247
    found = decoupled([[1.0, 0.0, 1.0, 1.0], [0.0, 4.0, 2.0, 2.0]], 2)
    assert found[:2] == pytest.approx([1.2247, -1.2247], abs=2e-3) and found[2:] == [0.0, 0.0]
    # the scale of a function changes nothing, where the sum of rewards would be all b
    assert decoupled([[1.0, 0.0, 1.0, 1.0], [0.0, 4e3, 2e3, 2e3]], 2) == pytest.approx(found, abs=2e-3)


def test_in_gdpo_a_none_counts_in_no_statistic_and_adds_nothing():
    # a: mean 1/3, std 0.57735 -> 1.1547 -0.57735 -0.57735. b = 4 None 0: mean 2, std 2.8284 -> +-0.70711, weighs half
    # sums 1.50825 -0.57735 -0.93090: sqrt(3.47473 / 2) = 1.31809
    expected = [1.50825 / 1.31809, -0.57735 / 1.31809, -0.93090 / 1.31809]
    assert decoupled([[1.0, 0.0, 0.0], [4.0, NONE, 0.0]], 3) == pytest.approx(expected, abs=1e-3)
    # a completion without a reward, since b failed, counts nowhere with the value that a gave
    alone = decoupled([[1.0, 0.0, 7.0], [0.0, 3.0, NONE]], 3, [True, True, False])
    assert alone == pytest.approx([math.sqrt(1 / 2), -math.sqrt(1 / 2), 0], abs=1e-3)  # as a step of two


@pytest.mark.parametrize(("kind", "message"), [(GDPO, "no penalty of algorithm.kl_in"), (MAXRL, "a reward is -1")])
def test_a_kl_in_the_reward_is_refused_before_the_run_by_what_cannot_take_it(kind, message):
    try_algorithm = pytest.importorskip("grpo.features.trial.formulas").try_algorithm
    try_algorithm(AlgorithmConfig(advantages=kind, kl_coef=0.1))
    with pytest.raises(ValueError, match=message):
        try_algorithm(AlgorithmConfig(advantages=kind, kl_coef=0.1, kl_in="reward"))


def test_none_is_the_reward_itself():
    by_none = advantages([0.5, 0.5, NONE, -3.0], 2, "none")
    assert by_none[:2] == [0.5, 0.5] and math.isnan(by_none[2]) and by_none[3] == -3.0


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        # the rewards are 1 and 3, then 1 and 1; with the NaN counted as 0 the first mean would be 4/3
        ("group_std", 1 / (math.sqrt(2) + 1e-4)),
        ("group_mean", 1.0),
        # 1 3 1 1: mean 1.5, squared deviations 0.25 + 2.25 + 0.25 + 0.25 = 3, over 3
        (BATCH_STD, 1 / 1.0001),
        # the mean of the others is the other one: 1 - 3
        ("rloo", 2.0),
        # z = +-1 / (sqrt(2) + 1e-4), over sqrt(2 z^2 / 3) + 1e-4 of the four rewards
        (GDPO, 1 / (math.sqrt(2 / 3) + 1e-4 * (math.sqrt(2) + 1e-4))),
        # mean 2
        (MAXRL, 0.5),
    ],
)
def test_no_reward_is_left_out_of_every_statistic(kind, scale):
    found = advantages([1.0, NONE, 3.0, 1.0, 1.0, NONE], 3, kind)
    assert [math.isnan(a) for a in found] == [False, True, False, False, False, True]
    assert [found[0], *found[2:5]] == pytest.approx([-scale, scale, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("kind", COMPARING)
def test_single_reward_and_no_reward(kind):
    found = advantages([NONE, 5.0, NONE, NONE], 2, kind)
    assert found[1] == 0.0
    assert [math.isnan(a) for a in found] == [True, False, True, True]
    assert all(math.isnan(a) for a in advantages([NONE] * 4, 2, kind))
    assert advantages([3.0, 4.0], 1, kind) == [0.0, 0.0]  # groups of one


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e-3, 1e6, 0.7 + 0.2])
def test_equal_rewards_give_exactly_zero(kind, reward):
    # a mean one rounding error away from the reward, over a std of 1e-4, would be a visible advantage
    assert advantages([reward] * 7, 7, kind) == [0.0] * 7
    # and next to a group that does differ
    assert advantages([reward] * 3 + [0.0, 0.0, 1.0], 3, kind)[:3] == [0.0] * 3


def test_rewards_far_from_zero_keep_their_differences():
    # mean 1000000.0416..; float32 has nothing between 1000000 and 1000000.0625
    found = advantages([1e6, 1e6, 1e6 + 0.125], 3, "group_mean")
    assert found == pytest.approx([-0.125 / 3, -0.125 / 3, 0.25 / 3], rel=1e-6)


@pytest.mark.parametrize("kind", COMPARING)
def test_arguments_stay_and_only_batch_std_and_gdpo_look_at_other_groups(kind):
    rewards_S = torch.tensor([0.0, 1.0, 100.0, 300.0])
    kept = rewards_S.clone()
    alone = [compare(rewards_S[:2], 2, kind), compare(rewards_S[2:], 2, kind)]
    assert torch.equal(compare(rewards_S, 2, kind), torch.cat(alone)) == (kind not in (BATCH_STD, GDPO))
    assert torch.equal(rewards_S, kept)


def test_equal_rewards():
    # equal; different; a single reward; equal; no reward at all: all but the second teach nothing
    rewards_S = torch.tensor([1.0, 1.0, 0.0, 1.0, NONE, 2.0, 0.5, 0.5, NONE, NONE])
    assert same(rewards_S, 2).tolist() == [True, False, True, True, True]
    assert same(torch.tensor([0.5, NONE, 0.5, 0.5, NONE, 0.25]), 3).tolist() == [True, False]
    assert same(torch.tensor([-0.5, NONE, -0.5]), 3).tolist() == [True]  # the missing one is no 0


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("rewards_PG - 0.25", ""),
        ("rewards_PG / has_PG", ""),  # not a number where there is no reward: nobody looks there
        ("rewards_PG / rewards_PG", "finite"),  # 0 / 0 of one of three
        ("rewards_PG[:, :1]", "of shape"),
        ("None", "NoneType"),
        ("x.batch.rollout_N - 0.25", ""),  # of each token
        ("x.batch.rollout_N[1:]", r"\[3\]\); return finite numbers, of shape \(2, 2\) for completions or \(4,\) for"),
    ],
)
def test_advantages_of_ones_own(body, refused, tmp_path):
    (tmp_path / "mine.py").write_text(
        f"def f(x):\n    rewards_PG, has_PG = x.rewards_PG, x.has_PG\n    return {body}\n"
    )
    if refused:
        with pytest.raises(ValueError, match=refused):
            advantages([1.0, 0.0, 0.5, NONE], 2, f"{tmp_path}/mine.py:f")
    else:
        found = advantages([1.0, 0.0, 0.5, NONE], 2, f"{tmp_path}/mine.py:f")
        assert found[:3] == (
            [0.75, -0.25, 0.25] if "PG -" in body else [-0.25, 0.75, 1.75] if "rollout_N" in body else [1.0, 0.0, 0.5]
        )


def test_bad_input_is_refused():
    for broken in (-math.inf, math.nan):
        with pytest.raises(ValueError, match=f"rollout 1 is {broken}; rewards must be finite"):
            by_group(torch.tensor([0.0, broken]), torch.ones(2).bool(), 2)
        # a missing one may hold anything
        by_group(torch.tensor([0.0, broken]), torch.tensor([True, False]), 2)
