"""Losses against numbers worked out by hand: values, gradients, and what must not break them."""

import itertools
import math
import random

import pytest
import torch

from grpo.losses import aggregate, clipped_policy_loss, kl_k3, step_denominator
from grpo.packing import build_micro_batch, per_sequence, plan_micro_batches, row_length, scatter_completions
from grpo.types import TrainBatch

torch.set_num_threads(1)
LOG2 = math.log(2)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def policy_loss(ratios, advantages, clip_low=0.2, clip_high=0.28, mask=None):
    """Loss, metrics and the gradient by the log-probs, for one row of given ratios."""
    logprobs_BT = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    mask_BT = ones(1, len(ratios)) if mask is None else torch.tensor([mask])
    loss_BT, metrics = clipped_policy_loss(
        logprobs_BT,
        torch.zeros_like(logprobs_BT),
        torch.tensor([advantages], dtype=torch.float64),
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    loss_BT.sum().backward()
    return loss_BT[0].tolist(), {name: value.item() for name, value in metrics.items()}, logprobs_BT.grad[0].tolist()


def test_clipped_surrogate_by_hand():
    # advantage +1: 1.5 is cut at 1.28, 0.5 is not; advantage -1: 1.5 is not, 0.5 is cut at 0.8
    loss, metrics, gradient = policy_loss([1.5, 0.5, 1.5, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0, 2.0])
    assert loss == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.0])
    # d(-ratio * A)/d logprob = -ratio * A; nothing where it is cut
    assert gradient == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.0])
    assert metrics == pytest.approx(
        {"clip_low_share": 1, "clip_high_share": 1, "clip_share": 2, "ratio_mean": 5.0, "ratio_max": 1.5}
    )


def test_zero_advantage_has_no_loss_gradient_or_clipping():
    loss, metrics, gradient = policy_loss([0.1, 1.0, 10.0], [0.0, 0.0, 0.0])
    assert loss == [0.0] * 3 and gradient == [0.0] * 3 and metrics["clip_share"] == 0


def test_gradient_at_ratio_one_is_the_policy_gradient():
    assert policy_loss([1.0, 1.0], [3.0, -0.5])[2] == [-3.0, 0.5]


def test_mask_hides_tokens_from_loss_gradient_and_metrics():
    loss, metrics, gradient = policy_loss([1.5, 7.0, 0.5], [1.0, 1.0, 1.0], mask=[True, False, False])
    assert loss == pytest.approx([-1.28, 0.0, 0.0]) and gradient[1:] == [0.0, 0.0]
    assert metrics["ratio_mean"] == pytest.approx(1.5) and metrics["ratio_max"] == pytest.approx(1.5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_positions_may_hold_anything(junk):
    logprobs_BT = torch.tensor([[-1.0, junk]], requires_grad=True)
    other_BT = torch.tensor([[-1.0 - LOG2, junk]])
    advantages_BT, mask_BT = torch.tensor([[-1.0, junk]]), torch.tensor([[True, False]])
    loss_BT, metrics = clipped_policy_loss(logprobs_BT, other_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.2)
    kl_BT = kl_k3(logprobs_BT, other_BT, mask_BT)
    # ratio 2, advantage -1; ref - lp = -log 2: 1/2 + log 2 - 1
    assert loss_BT[0].tolist() == pytest.approx([2.0, 0.0])
    assert kl_BT[0].tolist() == pytest.approx([0.5 + LOG2 - 1, 0.0])
    total = aggregate(loss_BT + kl_BT, mask_BT, torch.tensor([[1, 1]]), "sequence_mean", 1.0)
    total.backward()
    # d ratio = 2, d kl = 1 - exp(ref - lp) = 1/2
    assert logprobs_BT.grad[0].tolist() == pytest.approx([2.5, 0.0])
    assert metrics["ratio_mean"].item() == pytest.approx(2.0) and metrics["ratio_max"].item() == pytest.approx(2.0)


def test_aggregate_ignores_what_a_users_loss_left_outside_the_mask():
    loss_BT = torch.tensor([[1.0, math.nan]], requires_grad=True)
    total = aggregate(loss_BT, torch.tensor([[True, False]]), torch.tensor([[4, 1]]), "sequence_mean", 0.5)
    total.backward()
    assert total.item() == 0.5 and loss_BT.grad.tolist() == [[0.5, 0.0]]


def test_all_masked_gives_zero_and_no_gradient():
    logprobs_BT = torch.full((2, 3), math.nan, requires_grad=True)
    mask_BT = ~ones(2, 3)
    loss_BT, metrics = clipped_policy_loss(logprobs_BT, logprobs_BT, logprobs_BT, mask_BT, clip_low=0.2, clip_high=0.2)
    loss_BT = loss_BT + kl_k3(logprobs_BT, logprobs_BT.detach(), mask_BT)
    denominator = step_denominator(torch.tensor([2, 3]), torch.tensor([False, False]), "token_mean", 8)
    total = aggregate(loss_BT, mask_BT, torch.ones(2, 3), "token_mean", denominator)
    total.backward()
    assert total.item() == 0.0 and logprobs_BT.grad.tolist() == [[0.0] * 3] * 2
    assert all(value.item() == 0 for value in metrics.values())


@pytest.mark.parametrize("gap", [1e4, -1e4, 60.0, -60.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(gap, advantage):
    logprobs_BT = torch.tensor([[gap, -1.0]], requires_grad=True)
    old_BT = torch.tensor([[0.0, -1.0]])
    advantages_BT = torch.full((1, 2), advantage)
    loss_BT, metrics = clipped_policy_loss(logprobs_BT, old_BT, advantages_BT, ones(1, 2), clip_low=0.2, clip_high=0.2)
    kl_BT = kl_k3(logprobs_BT, old_BT, ones(1, 2))
    # the unclipped side at the clamp: exp(+-20)
    ratio = math.exp(math.copysign(20, gap))
    assert loss_BT[0, 0].item() == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    assert kl_BT[0, 0].item() == pytest.approx(math.exp(-math.copysign(20, gap)) + math.copysign(20, gap) - 1)
    (loss_BT + kl_BT).sum().backward()
    # beyond the clamp no gradient; the ordinary token beside it keeps its own
    assert logprobs_BT.grad[0].tolist() == [0.0, -advantage]
    assert all(value.isfinite() for value in metrics.values())


def test_nan_inside_the_mask_is_not_hidden():
    nan_BT, one_BT = torch.tensor([[math.nan]]), torch.ones(1, 1)
    assert clipped_policy_loss(nan_BT, one_BT, one_BT, ones(1, 1), clip_low=0.2, clip_high=0.2)[0].isnan().all()
    assert clipped_policy_loss(one_BT, one_BT, nan_BT, ones(1, 1), clip_low=0.2, clip_high=0.2)[0].isnan().all()
    assert kl_k3(one_BT, nan_BT, ones(1, 1)).isnan().all()


def test_kl_k3_by_hand():
    logprobs_BT = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref_BT = torch.tensor([[-1.0, -1.0 + LOG2, -1.0 - LOG2]], dtype=torch.float64)
    kl_BT = kl_k3(logprobs_BT, ref_BT, ones(1, 3))
    # 0; 2 - log 2 - 1; 1/2 + log 2 - 1
    assert kl_BT[0].tolist() == pytest.approx([0.0, 1 - LOG2, LOG2 - 0.5])
    kl_BT.sum().backward()
    assert logprobs_BT.grad[0].tolist() == pytest.approx([0.0, -1.0, 0.5])  # 1 - exp(ref - lp)


def test_kl_k3_keeps_its_digits_near_zero():
    # x^2 / 2 for a small x; exp(x) - x - 1 in float32 gives 0 or 1e-7 here
    kl_BT = kl_k3(torch.zeros(1, 2), torch.tensor([[1e-3, -1e-3]]), ones(1, 2))
    assert kl_BT[0].tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)
    assert (kl_BT >= 0).all()


def test_kl_k3_is_unbiased():
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (policy_V * kl_k3(policy_V.log()[None], ref_V.log()[None], ones(1, 3))[0]).sum()
    assert expected.item() == pytest.approx((policy_V * (policy_V / ref_V).log()).sum().item())


def test_aggregate_by_hand():
    # completions of 1 and 3 tokens; the position in between is a prompt
    loss_BT = torch.tensor([[4.0, 100.0, 1.0, 2.0, 3.0]])
    mask_BT = torch.tensor([[True, False, True, True, True]])
    lengths_BT = torch.tensor([[1, 1, 3, 3, 3]])
    assert aggregate(loss_BT, mask_BT, lengths_BT, "token_mean", 4.0).item() == pytest.approx(10 / 4)
    assert aggregate(loss_BT, mask_BT, lengths_BT, "sequence_mean", 2.0).item() == pytest.approx((4 + 2) / 2)
    assert aggregate(loss_BT, mask_BT, lengths_BT, "fixed_horizon", 2 * 8.0).item() == pytest.approx(10 / 16)
    with pytest.raises(ValueError, match="'mean' is unknown"):
        aggregate(loss_BT, mask_BT, lengths_BT, "mean", 1.0)
    with pytest.raises(ValueError, match="denominator=0"):
        aggregate(loss_BT, mask_BT, lengths_BT, "token_mean", 0)


def test_step_denominator_counts_sequences_with_a_reward():
    lengths_S, has_reward_S = torch.tensor([1, 3, 5]), torch.tensor([True, True, False])
    assert step_denominator(lengths_S, has_reward_S, "token_mean", 8) == 4.0
    assert step_denominator(lengths_S, has_reward_S, "sequence_mean", 8) == 2.0
    assert step_denominator(lengths_S, has_reward_S, "fixed_horizon", 8) == 16.0
    for kind in ("token_mean", "sequence_mean", "fixed_horizon"):
        assert step_denominator(lengths_S, torch.zeros(3, dtype=torch.bool), kind, 8) == 1.0
    with pytest.raises(ValueError, match="'mean' is unknown"):
        step_denominator(lengths_S, has_reward_S, "mean", 8)


# --- the same step, however it is packed, split, sharded or permuted -------------------------------------------------

VOCAB = 11


def random_step(seed=0):
    """Nine sequences, completions of 1 to 7 tokens, one of them without a reward."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(VOCAB) for _ in range(generator.randint(1, 6))] for _ in range(9)]
    completions = [[generator.randrange(VOCAB) for _ in range(generator.choice([1, 1, 3, 7]))] for _ in range(9)]
    advantages = [generator.gauss(0, 1) for _ in range(9)]
    advantages[4] = math.nan
    logprobs = [[generator.uniform(-4, -1) for _ in completion] for completion in completions]
    return list(zip(prompts, completions, advantages, logprobs, strict=True))


def as_batch(step):
    return TrainBatch(
        ids_N=torch.tensor([token for prompt, completion, *_ in step for token in prompt + completion]),
        prompt_lengths_S=torch.tensor([len(prompt) for prompt, *_ in step]),
        completion_lengths_S=torch.tensor([len(completion) for _, completion, *_ in step]),
        generator_logprobs_C=torch.tensor([value for *_, logprobs in step for value in logprobs]),
        advantages_S=torch.tensor([advantage for _, _, advantage, _ in step]),
    )


def loss_and_gradient(step, kind, num_ranks, max_tokens, packing, multiple=1):
    """Sum the step's loss over ranks and micro-batches, with a table of logits [V, V] as the language model."""
    batch = as_batch(step)
    table_VV = torch.randn(
        VOCAB, VOCAB, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    ).requires_grad_()
    denominator = step_denominator(batch.completion_lengths_S, ~batch.advantages_S.isnan(), kind, 8)
    lengths = batch.lengths_S.tolist()
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, packing, multiple)
    total, num_micro_batches = 0.0, 0
    for rows in itertools.chain.from_iterable(plan):
        micro = build_micro_batch(batch, rows, row_length(plan, lengths, multiple))
        logprobs_BTV = table_VV[micro.tokens_BT].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, micro.targets_BT[..., None])[..., 0]
        advantages_BT = per_sequence(batch.advantages_S, micro)
        mask_BT = micro.completion_mask_BT & ~advantages_BT.isnan()
        old_BT = scatter_completions(batch.generator_logprobs_C, batch, micro)
        loss_BT, _ = clipped_policy_loss(logprobs_BT, old_BT, advantages_BT, mask_BT, clip_low=0.2, clip_high=0.28)
        loss_BT = loss_BT + 0.1 * kl_k3(logprobs_BT, old_BT, mask_BT)
        loss = aggregate(loss_BT, mask_BT, micro.completion_lengths_BT, kind, denominator)
        loss.backward()
        total += loss.item()
        num_micro_batches += 1
    return total, table_VV.grad, num_micro_batches


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "fixed_horizon"])
def test_loss_and_gradient_do_not_depend_on_the_layout(kind):
    step = random_step()
    permuted = [step[i] for i in [3, 8, 1, 0, 7, 5, 2, 6, 4]]
    expected, expected_gradient, num_micro_batches = loss_and_gradient(step, kind, 1, 1000, packing=False)
    assert num_micro_batches == 1 and expected_gradient.abs().max() > 1e-3
    counts = set()
    for order, num_ranks, max_tokens, packing, multiple in itertools.product(
        [step, permuted], [1, 2, 4], [14, 30, 1000], [True, False], [1, 8]
    ):
        total, gradient, count = loss_and_gradient(order, kind, num_ranks, max_tokens, packing, multiple)
        counts.add(count)
        assert total == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=0)
    assert len(counts) > 3


def test_layouts_agree_with_a_loop_over_sequences():
    """The same loss written down sequence by sequence: the mean over sequences of their tokens' mean."""
    step = random_step()
    table_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    means = []
    for prompt, completion, advantage, old in step:
        if math.isnan(advantage):
            continue
        tokens = prompt + completion
        losses = []
        for i, token in enumerate(completion):
            logprob = table_VV[tokens[len(prompt) + i - 1]].log_softmax(-1)[token].item()
            ratio = math.exp(logprob - old[i])
            kl = math.exp(old[i] - logprob) - (old[i] - logprob) - 1
            losses.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage) + 0.1 * kl)
        means.append(sum(losses) / len(losses))
    assert len(means) == 8
    total, _, _ = loss_and_gradient(step, "sequence_mean", 2, 30, packing=True)
    assert total == pytest.approx(sum(means) / 8, abs=1e-6)
