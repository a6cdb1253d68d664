"""Methods whole, from rewards to gradients: three sequences, against plain autograd written down token by token.

And the table of methods, whose rows say what follows from their flags.
"""

import dataclasses
import math

import pytest
import torch

from grpo.algorithm.advantages import AdvantageInputs
from grpo.config import PAPER_DEFAULTS, AlgorithmConfig, GeneratorConfig, GRPOConfig, RewardConfig
from grpo.config.fields import ADVANTAGES
from grpo.config.user_files import load_function
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from tests.methods import methods
from tests.rollouts import rewarded, sequence
from tests.rows import rows_of
from train_grpo import add_advantages, grpo_objective

# Three completions of a prompt: log-probs by the sampler and by the policy
SAMPLER = [[-0.7], [-1.2, -0.3], [-2.0, -0.1, -0.9]]
POLICY = [[-0.2], [-0.4, -1.5], [-2.5, -0.1, -0.3]]
LONGEST = 8
FILES = "configs/examples/methods"


def gradients(algorithm, rewards):
    """What the project takes as gradient, of each sequence's log-probs."""
    config = GRPOConfig(
        group_size=3,
        algorithm=dataclasses.replace(algorithm, old_logprobs="generator").resolved,
        reward=RewardConfig(functions={"a": 1.0}),
        generator=GeneratorConfig(max_completion_tokens=LONGEST),
    )
    samples = []
    for sampled in SAMPLER:  # behind a prompt of one token
        mask_T = torch.arange(len(sampled) + 1) > 0
        samples.append(sequence(mask_T.long(), mask_T, torch.tensor([0.0, *sampled])))
    batch = rewarded(make_batch(samples), torch.tensor(rewards))
    batch = add_advantages(config, batch, 0.0, StepMetrics(3))
    batch = dataclasses.replace(batch, old_logprobs_N=batch.generator_logprobs_N)
    policy_N = torch.tensor([x for sequence in POLICY for x in (0.0, *sequence)]).double().requires_grad_()
    objective = grpo_objective(config, batch, 0.0, first_update=True)
    for micro in rows_of(batch, 2):
        logprobs_BT = policy_N[micro.token_BT.clamp(min=0)].where(micro.loss_mask_BT, 0)
        objective(micro, logprobs_BT, torch.zeros_like(logprobs_BT))[0].backward()
    return policy_N.grad[batch.loss_mask_N].tolist()


def plain(loss_of_token, average):
    """The gradient of the average of a loss of each token, a function of (sequence, token, policy, all policies)."""
    leaves = [torch.tensor(sequence).double().requires_grad_() for sequence in POLICY]
    losses = [[loss_of_token(s, t, leaf[t], leaf) for t in range(len(leaf))] for s, leaf in enumerate(leaves)]
    average(losses).backward()
    return [x for leaf in leaves for x in leaf.grad.tolist()]


def by_sequence(losses):
    return sum(sum(of_tokens) / len(of_tokens) for of_tokens in losses) / len(losses)


def by_token(losses):
    return sum(sum(of_tokens) for of_tokens in losses) / 6


def by_horizon(losses):
    return sum(sum(of_tokens) for of_tokens in losses) / (3 * LONGEST)


def surrogate(advantages, low=0.2, high=0.2):
    def loss(s, t, policy, _):
        ratio = (policy - SAMPLER[s][t]).exp()
        return -torch.minimum(ratio * advantages[s], ratio.clamp(1 - low, 1 + high) * advantages[s])

    return loss


def cispo(ratio, advantage, policy):
    return -ratio.detach().clamp(0.5, 2.0) * advantage * policy


def sapo(ratio, advantage, policy):
    tau = 3.0 if advantage > 0 else 2.0
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


def reinforce(ratio, advantage, policy):
    return -advantage * policy


def dual_clip(ratio, advantage, policy):
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(clipped if advantage > 0 else clipped.clamp(min=2 * advantage))


def clipped(ratio, advantage, policy):
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


SAPO = {"temperature_positive": 3, "temperature_negative": 2}
LOSSES = {  # the fields of the algorithm, the loss of a token, and how tokens are averaged
    "grpo": ({}, clipped, by_sequence),
    "dr_grpo": ({}, clipped, by_horizon),
    "dapo": ({"clip_high": 0.2}, clipped, by_token),
    "cispo": ({"clip_low": 0.5, "clip_high": 1.0}, cispo, by_token),
    "sapo": ({"loss_options": SAPO}, sapo, by_sequence),
    "reinforce": ({}, reinforce, by_token),
    "configs/examples/dual_clip.py:dual_clip": ({"loss_options": {"bound": 2}}, dual_clip, by_sequence),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_averages_are_their_formulas(name):
    """Ratios from 0.3 to 2.2 with advantages of either sign, of which clips cut some and leave some."""
    fields, formula, average = LOSSES[name]
    algorithm = AlgorithmConfig(loss=name, advantages="none", **fields)
    for rewards in ([2.0, -1.0, 0.5], [-4.0, 2.0, -1.0]):

        def loss(s, t, policy, _, rewards=rewards):
            return formula((policy - SAMPLER[s][t]).exp(), rewards[s], policy)

        assert gradients(algorithm, rewards) == pytest.approx(plain(loss, average), abs=1e-7)


@pytest.mark.parametrize("divergence, threshold", [("tv", 0.15), ("kl", 0.05)])
def test_dppo(divergence, threshold):
    kept = []

    def loss(s, t, policy, _):
        p, q = math.exp(policy.item()), math.exp(SAMPLER[s][t])
        far = {"tv": abs(p - q), "kl": q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))}[divergence]
        advantage = [2 / 3, -1 / 3, -1 / 3][s]  # rewards 1 0 0 less their mean 1/3
        leaves = far > threshold and (p > q if advantage > 0 else p < q)
        kept.append(not leaves)
        return -(policy - SAMPLER[s][t]).exp() * advantage * (not leaves)

    algorithm = AlgorithmConfig(loss=f"{FILES}/dppo.py:dppo", loss_options={"divergence": divergence})
    algorithm = dataclasses.replace(algorithm, advantages="group_mean", aggregation="fixed_horizon")
    found = gradients(algorithm, [1.0, 0, 0])
    assert found == pytest.approx(plain(loss, by_horizon), abs=1e-7)
    # probabilities 0.50 -> 0.82 up, 0.74 -> 0.22 down, as their advantages say; 0.30 -> 0.67 against its own
    assert kept == [False, True, False, True, True, True]


ADVANTAGES_OF_1_0_0 = torch.tensor([2 / 3, -1 / 3, -1 / 3]) / (math.sqrt(1 / 3) + 1e-4)


def log_ratios(s, policies):
    return policies - torch.tensor(SAMPLER[s]).double()


def test_vespo():
    """Ratios of the sequences: exp(0.5), exp(-0.4) and exp(0.1)."""

    def loss(s, t, policy, policies):
        w = log_ratios(s, policies).sum().exp().detach()
        k, rate = (2.0, 3.0) if s == 0 else (3.0, 2.0)
        return -(w**k) * (rate * (1 - w)).exp() * ADVANTAGES_OF_1_0_0[s].item() * policy

    algorithm = AlgorithmConfig(loss=f"{FILES}/vespo.py:vespo", aggregation="token_mean")
    found = gradients(algorithm, [1.0, 0, 0])
    assert found == pytest.approx(plain(loss, by_token), abs=1e-7)


@pytest.mark.parametrize("log_clip", [0.4, 9.0])
def test_gmpo(log_clip):
    """The product of a sequence's clipped ratios to the power of 1 / its length. Logs: 0.5; 0.8 -1.2; -0.5 0 0.6."""

    def loss(s, t, policy, policies):
        ratios = log_ratios(s, policies).exp()
        advantage = ADVANTAGES_OF_1_0_0[s].item()
        bounded = ratios.clamp(math.exp(-log_clip), math.exp(log_clip))
        worse = torch.minimum(ratios * advantage, bounded * advantage)
        sign = math.copysign(1.0, advantage)
        return -sign * worse.abs().prod() ** (1 / len(ratios))  # of the whole sequence, at each of its tokens

    found = gradients(AlgorithmConfig(loss=f"{FILES}/gmpo.py:gmpo", loss_options={"log_clip": log_clip}), [1.0, 0, 0])
    assert found == pytest.approx(plain(loss, by_sequence), abs=1e-7)
    assert sum(x == 0 for x in found) == (3 if log_clip == 0.4 else 0)


def test_luspo():
    """The sum over a sequence's tokens of GSPO's surrogate: its length times it."""

    def loss(s, t, policy, policies):
        ratio = log_ratios(s, policies).mean().exp()
        advantage = ADVANTAGES_OF_1_0_0[s].item()
        return -len(policies) * torch.minimum(ratio * advantage, ratio.clamp(0.1, 10) * advantage)

    options = {"clip_low": 0.9, "clip_high": 9.0}
    algorithm = AlgorithmConfig(loss=f"{FILES}/luspo.py:luspo", loss_options=options)
    found = gradients(algorithm, [1.0, 0, 0])
    assert found == pytest.approx(plain(loss, by_sequence), abs=1e-7)
    by_default = gradients(dataclasses.replace(algorithm, loss_options={}), [1.0, 0, 0])
    assert [x != 0 for x in by_default] == [False, False, False, True, True, True]  # exp(0.5) and exp(-0.2) are cut


def test_clip_cov(monkeypatch):
    """Rewards 1 and 0, so A = +-a with a = 0.5 / (sqrt(1/2) + 1e-4) = 0.707; log-probs of a mean of -4/3.

    A token's part a * (logp + 4/3) is 0.87, 0.24, -1.11 in the first sequence, and the opposite in the second.
    """
    clip_cov = load_function(f"{FILES}/clip_cov.py:clip_cov", "test")
    logprobs_T = torch.tensor([0.0, -0.1, -1.0, -2.9])
    batch = make_batch([sequence(torch.arange(4), torch.arange(4) > 0, logprobs_T)] * 2)
    config = GRPOConfig(group_size=2, reward=RewardConfig(functions={"a": 1.0}))
    x = AdvantageInputs.of(rewarded(batch, torch.tensor([1.0, 0.0])), config.group_size, config.reward_weights)
    for bounds, share, cut in (((0.5, 1.0), 0.0, {1}), ((0.5, 2.0), 0.5, {1, 7}), ((1.2, 2.0), 0.5, set())):
        monkeypatch.setitem(clip_cov.__globals__, "COVARIANCES", bounds)
        monkeypatch.setitem(clip_cov.__globals__, "CLIPPED_FRAC", share)  # of 6 tokens, at least one
        expected = [0 if n in cut else 0.70701 * (1 if n < 4 else -1) for n in range(8)]
        assert clip_cov(x).tolist() == pytest.approx(expected, abs=1e-4)
    monkeypatch.setitem(clip_cov.__globals__, "COVARIANCES", (0.5, 2.0))
    monkeypatch.setitem(clip_cov.__globals__, "CLIPPED_FRAC", 0.0)
    advantages_N = clip_cov(x)  # one of two, by chance, and the same again
    assert advantages_N[[1, 7]].eq(0).sum() == 1 and torch.equal(clip_cov(x), advantages_N)


def gspo_token(advantages, low, high):
    """Zheng et al. 2025, eq. 13 to 15: the ratio at a token is sg[s] * policy / sg[policy], s that of the sequence."""

    def loss(s, t, policy, policies):
        of_sequence = (policies - torch.tensor(SAMPLER[s]).double()).mean().exp().detach()
        ratio, advantage = of_sequence * (policy - policy.detach()).exp(), advantages[s][t]
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

    return loss


EACH_TOKEN = """
import torch

def by_place(x):
    return 1 - torch.arange(len(x.batch.owner_N)) % 3
"""


def test_gspo_with_an_advantage_for_each_token(tmp_path):
    (tmp_path / "own.py").write_text(EACH_TOKEN)
    advantages = [[0.0], [1.0, 0.0], [1.0, 0.0, -1.0]]  # of tokens 1, 3 and 4, 6 to 8 of the batch
    # ratios of the sequences: exp(0.5), exp(-0.2), exp(0.0333)
    for low, high in ((0.9, 9.0), (0.0003, 0.0004)):
        algorithm = AlgorithmConfig(loss="gspo", advantages=f"{tmp_path}/own.py:by_place", clip_low=low, clip_high=high)
        found = gradients(algorithm, [1.0, 0, 0])
        assert found == pytest.approx(plain(gspo_token(advantages, low, high), by_sequence), abs=1e-7)
        assert sum(x != 0 for x in found) == (3 if high > 1 else 2)  # that of the sixth token is cut


def test_every_method_is_listed_with_what_follows_from_its_flags():
    losses, advantages = set(), set()
    for algorithm, cells in methods().values():
        resolved = algorithm.resolved
        slots = resolved.advantages, resolved.aggregation
        assert ["its file" if ":" in name else name for name in slots] == cells[:2]
        assert cells[2] in ("-", f"{resolved.clip_low} / {resolved.clip_high}"), cells
        losses.add(resolved.loss)
        advantages.add(resolved.advantages)
    assert losses > set(PAPER_DEFAULTS) and advantages > set(ADVANTAGES) - {"none"}  # and those of one's own
