"""A rollout of several sequences, as of an agent that branches or edits its history, weighs as much as one of one."""

from dataclasses import replace

import pytest
import torch

from grpo.config import AlgorithmConfig, GeneratorConfig, GRPOConfig
from grpo.data.batches import make_batch
from grpo.data.layout import plan
from grpo.data.recorded import RecordedStep, save_step
from grpo.report.rollout_metrics import nonfinite_frac, rollout_advantages, rollout_metrics
from grpo.report.samples import completion_records
from grpo.tools.describe import describe
from grpo.tools.page import add_tokens
from grpo.tools.recorded import read_step
from grpo.tools.replay import take_step
from grpo.types import Piece, Prompt, Rollout
from tests.rollouts import branched, conversation, over_the_wire, rewarded
from tests.tiny_models import make_tiny
from tests.unit.algorithm.test_updates import trainer_of
from train_grpo import grpo_objective

pytestmark = pytest.mark.usefixtures("one_rank")
NUM_TURNS = 9
ENDS = {1: [18], 3: [4, 8, 18], 9: range(2, 20, 2)}
"""By the number of sequences: how many pieces each has, of a prompt and nine turns with what was written between."""


def episodes() -> list[Rollout]:
    """Two groups of three; the turns of the k-th have k + 1 tokens each, except for one without a finite log-prob."""
    draw = torch.Generator().manual_seed(3)
    rollouts = []
    for index in range(6):
        prompt = Prompt(index // 3, [5 + index // 3, 6, 7])
        pieces = []
        for turn in range(NUM_TURNS):
            length = index + 1
            logprobs_T = torch.randn(length, generator=draw) - 3
            if turn == 4 and index == 2:
                logprobs_T[0] = -torch.inf
            pieces.append(Piece.sampled(torch.randint(3, 32, (length,), generator=draw), logprobs_T))
            pieces.append(Piece.written([9 + turn, 8]))
        rollouts.append(conversation(pieces[:-1], prompt, index))
    return rollouts


def split(numbers: tuple[int, ...]) -> list[Rollout]:
    """The episodes, each in one of these numbers of sequences, in turns."""
    return [branched(rollout, ENDS[numbers[place % len(numbers)]]) for place, rollout in enumerate(episodes())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(aggregation="sequence_mean", num_mini_batches=2),
        AlgorithmConfig(aggregation="token_mean"),
        AlgorithmConfig(loss="dr_grpo", kl_coef=0.1, kl_in="reward"),  # fixed_horizon
        AlgorithmConfig(loss="reinforce", advantages="rloo", distill_coef=0.5),
    ],
    ids=["sequence_mean", "token_mean", "fixed_horizon", "distilled"],
)
def test_loss_and_gradient_do_not_depend_on_how_an_episode_is_split(folder, tmp_path, algorithm):
    """With a real model, through the recorded file: whatever train_grpo.py does with a step, from the advantages on."""
    config = GRPOConfig(algorithm=algorithm, group_size=3, generator=GeneratorConfig(max_completion_tokens=64))
    rewards_R = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, torch.nan])
    parts_FR = torch.stack([rewards_R, rewards_R])
    found = []
    for step, numbers in enumerate([(1,), (3,), (9,), (1, 3, 9), (9, 1)]):
        batch = make_batch(split(numbers))
        # each token's own, wherever it stands
        place_N = torch.cat([torch.arange(length) for length in batch.lengths_S])
        batch = replace(batch, ref_logprobs_N=-3 + torch.sin(place_N + batch.rollout_N * 7.0))
        save_step(tmp_path, step, RecordedStep(rewarded(batch, rewards_R, parts_FR), 3, {}))
        trainer = trainer_of(folder, learning_rate=0.0)
        found.append(take_step(read_step(tmp_path, step), config, trainer))
    (whole, gradient), *others = found
    assert gradient.abs().max() > 1e-3
    for measured, other in others:
        assert measured == pytest.approx(whole, rel=1e-5)
        torch.testing.assert_close(other, gradient, rtol=0, atol=2e-6 * gradient.abs().max().item())


@pytest.mark.parametrize(("loss", "is_exact"), [("reinforce", True), ("gspo", False)])
def test_every_episode_weighs_one(loss, is_exact):
    """In a group of 1, 3 and 9 sequences, whose tokens differ in number too. GSPO's ratio is that of a sequence."""
    batch = make_batch(split((1, 3, 9)))
    assert batch.rollout_S.bincount().tolist() == [1, 3, 9, 1, 3, 9]
    batch = replace(batch, advantages_N=torch.ones(batch.num_tokens))
    algorithm = AlgorithmConfig(loss=loss, aggregation="sequence_mean", importance_correction="none").resolved
    objective = grpo_objective(GRPOConfig(algorithm=algorithm, group_size=3), batch, 0.0, first_update=True)
    policy_N = (batch.generator_logprobs_N + batch.ids_N / 100).requires_grad_()
    batch = replace(batch, old_logprobs_N=batch.generator_logprobs_N)
    for micro in plan(batch, 1, max_tokens=400).micro_batches(0):
        logprobs_BT = policy_N[micro.token_BT.clamp(min=0)]
        part, _ = objective(micro, logprobs_BT, torch.zeros_like(logprobs_BT))
        part.backward()
    weights_R = torch.zeros(6).index_add(0, batch.rollout_N, -6 * policy_N.grad)
    assert (weights_R.tolist() == pytest.approx([1.0] * 6, rel=1e-5)) == is_exact


def test_what_is_told_of_an_episode_counts_a_repeated_turn_once():
    """As of one in one sequence, over the wire too; its record has each sequence."""
    (whole, *_), (parted, *_) = (over_the_wire(split((number,))[2:]) for number in (1, 3))
    assert parted.lengths == [4, 8, 18] and parted.num_tokens == whole.num_tokens == 27
    assert [piece.num_tokens for piece in parted.sampled] == [3] * NUM_TURNS
    assert parted.ids_T.equal(whole.ids_T)  # each sequence goes on where the one before it ended
    assert nonfinite_frac([parted]) == nonfinite_frac([whole]) == pytest.approx(1 / 27)
    metrics = [rollout_metrics([replace(rollout, reward=1.0)], 1) for rollout in (whole, parted)]
    assert metrics[0] == metrics[1]
    batch = make_batch([parted, whole])
    batch = replace(batch, advantages_N=torch.tensor([0.5, -2.0])[batch.rollout_N])
    assert rollout_advantages(batch) == [0.5, -2.0]
    batch = replace(batch, loss_mask_N=batch.loss_mask_N & (batch.rollout_N == 1))
    assert rollout_advantages(batch) == [None, -2.0]
    records = [{"advantage": None}, {"advantage": 0.5}]
    add_tokens(records, make_batch([parted, whole]), lambda ids: list(map(str, ids)))
    # what later sequences repeat of their prompt and of earlier turns is shown, and is not sampled
    assert [len(record["tokens"]["texts"]) for record in records] == [8 + 18 + 43 + 2 * 3, 43]
    assert [sum(record["tokens"]["sampled"]) for record in records] == [27, 27]
    assert [sum(record["tokens"]["in_loss"]) for record in records] == [0, 26]
    read = replace(parted, sequence_texts=["a b", "a c"])
    (record,) = completion_records([read], ["a"])
    assert record["sequences"] == ["a b", "a c"] and "sequence 2: a c" in describe(record)
    assert "sequences" not in completion_records([whole], ["a"])[0]
