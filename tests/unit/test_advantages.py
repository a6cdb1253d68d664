"""Advantages against numbers worked out by hand."""

import math

import pytest
import torch

from grpo.advantages import group_advantages, zero_variance_groups

NAN = math.nan


def test_group_by_hand():
    # mean 2, deviations -2 0 2, std with ddof=1: sqrt(8 / 2) = 2; mean 0.5, std sqrt(0.5 / 2) = 0.5
    rewards_S = torch.tensor([0.0, 2.0, 4.0, 0.0, 0.5, 1.0])
    advantages_S = group_advantages(rewards_S, 3, "group")
    expected = [-2 / 2.0001, 0, 2 / 2.0001, -0.5 / 0.5001, 0, 0.5 / 0.5001]
    assert advantages_S.tolist() == pytest.approx(expected, abs=1e-7)
    assert advantages_S.dtype == torch.float32


def test_group_mean_by_hand():
    advantages_S = group_advantages(torch.tensor([0.0, 2.0, 4.0, 1.0, 1.0, 4.0]), 3, "group_mean")
    assert advantages_S.tolist() == [-2.0, 0.0, 2.0, -1.0, -1.0, 2.0]


def test_no_reward_is_left_out_of_its_group():
    # the group is 1 and 3: mean 2, std sqrt((1 + 1) / 1); with the NaN counted as 0 the mean would be 4/3
    rewards_S = torch.tensor([1.0, NAN, 3.0])
    by_mean = group_advantages(rewards_S, 3, "group_mean").tolist()
    by_group = group_advantages(rewards_S, 3, "group").tolist()
    assert by_mean[0] == -1 and math.isnan(by_mean[1]) and by_mean[2] == 1
    assert by_group[0] == pytest.approx(-1 / (math.sqrt(2) + 1e-4), abs=1e-7) and math.isnan(by_group[1])


@pytest.mark.parametrize("kind", ["group", "group_mean"])
def test_single_reward_and_no_reward(kind):
    advantages_S = group_advantages(torch.tensor([NAN, 5.0, NAN, NAN]), 2, kind).tolist()
    assert advantages_S[1] == 0.0
    assert [math.isnan(a) for a in advantages_S] == [True, False, True, True]


@pytest.mark.parametrize("kind", ["group", "group_mean"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e-3, 1e6, 0.7 + 0.2])
def test_equal_rewards_give_exactly_zero(kind, reward):
    # a mean one rounding error away from the reward, over a std of 1e-4, would be a visible advantage
    assert group_advantages(torch.full((7,), reward), 7, kind).tolist() == [0.0] * 7


def test_group_of_one():
    assert group_advantages(torch.tensor([3.0, 4.0]), 1, "group").tolist() == [0.0, 0.0]


def test_groups_do_not_see_each_other_and_arguments_stay():
    rewards_S = torch.tensor([0.0, 1.0, 100.0, 300.0])
    kept = rewards_S.clone()
    alone = [group_advantages(rewards_S[:2], 2, "group"), group_advantages(rewards_S[2:], 2, "group")]
    assert torch.equal(group_advantages(rewards_S, 2, "group"), torch.cat(alone))
    assert torch.equal(rewards_S, kept)


def test_zero_variance_groups():
    # equal; different; a single reward; equal; no reward at all, which is not counted
    rewards_S = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 2.0, 0.5, 0.5, NAN, NAN])
    assert zero_variance_groups(rewards_S, 2) == 3
    assert zero_variance_groups(torch.tensor([0.5, NAN, 0.5]), 3) == 1


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="5 rewards do not split into groups of group_size=2"):
        group_advantages(torch.zeros(5), 2, "group")
    with pytest.raises(ValueError, match="sequence 1 is infinite"):
        group_advantages(torch.tensor([0.0, -math.inf]), 2, "group")
    with pytest.raises(ValueError, match="'median' is unknown"):
        group_advantages(torch.zeros(2), 2, "median")
