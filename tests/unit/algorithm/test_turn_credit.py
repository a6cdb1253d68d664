"""Credit for each turn of an episode, against sums over plain lists, true gradients, and batches without the lost."""

import dataclasses
import math
import random

import pytest
import torch

from grpo.config import AlgorithmConfig, EnvironmentConfig, GeneratorConfig, GRPOConfig
from grpo.data.batches import make_batch
from grpo.metrics import StepMetrics
from grpo.types import Piece, Prompt, Rollout, TrainBatch
from tests.rollouts import conversation, over_the_wire, rewarded
from tests.rows import one_row
from train_grpo import add_advantages, grpo_objective

WEIGHT = 0.5
WRITTEN = 3  # tokens of each answer


@dataclasses.dataclass
class Played:
    """An episode: what `get_reward` said after each turn, and the reward functions' sum."""

    said: list[float | None]
    functions: float = 0.0
    lost: bool = False

    @property
    def reward(self) -> float | None:
        """The rollout's: weighted, with the functions'; None excludes it."""
        if self.lost or not self.said:
            return None
        return self.functions + (0.0 if self.said[-1] is None else WEIGHT * self.said[-1])

    def rollout(self, draw: random.Random) -> Rollout:
        """Of turns of 1 to 4 tokens with an answer between; it went over the wire."""
        pieces, turns = [], []
        for number, said in enumerate(self.said, 1):
            ids_T = torch.tensor(draw.choices(range(100), k=draw.randint(1, 4)))
            pieces.append(Piece.sampled(ids_T, -ids_T / 100))
            turns.append({"text": "", "answers": []} | ({"earned": said} if number < len(self.said) else {}))
            if number < len(self.said):
                pieces.append(Piece.written(range(WRITTEN)))
        note = {"turns": turns, "reward": self.said[-1] if self.reward is not None else None, "counts": {}}
        pieces = pieces or [Piece.sampled([], [])]
        rollout = conversation(pieces, Prompt(0, [1, 2]), episode=note)
        return dataclasses.replace(over_the_wire([rollout])[0], reward=self.reward)

    def returns(self) -> list[float]:
        """What it earned from each turn on, by adding up the rewards of turns."""
        earned = [0.0 if self.said[-1] is None else WEIGHT * said for said in self.said]
        rewards = [after - before for before, after in zip([0.0, *earned], earned, strict=False)]
        rewards[-1] += self.functions
        return [sum(rewards[turn:]) for turn in range(len(rewards))]


def batch_of(group_size: int, episodes: list[Played], kind: str, loss: str = "grpo") -> tuple[GRPOConfig, TrainBatch]:
    """The config, and a step's batch as the driver lays it out, with its advantages."""
    algorithm = AlgorithmConfig(loss=loss, advantages=kind)
    environment = EnvironmentConfig(name="made.py:Up", weight=WEIGHT)
    generator = GeneratorConfig(max_completion_tokens=40)
    config = GRPOConfig(
        group_size=group_size, algorithm=algorithm.resolved, environment=environment, generator=generator
    )
    weight = WEIGHT if config.turns_earn else None
    rollouts = [episode.rollout(random.Random(repr(episode))) for episode in episodes]
    rewards = [math.nan if episode.reward is None else episode.reward for episode in episodes]
    rewards_R = torch.tensor(rewards)
    parts_FR = rewards_R.expand(3, -1)  # of the environment and two functions; nobody reads them
    batch = rewarded(make_batch(rollouts, weight), rewards_R, parts_FR)
    return config, add_advantages(config, batch, 0.0, StepMetrics(len(rollouts)))


def by_turn(batch: TrainBatch) -> list[list[float]]:
    """Each sequence's advantages turn by turn; the tokens of a turn have the same one, others 0 and no loss."""
    found = []
    assert (batch.advantages_N[batch.turn_N == 0] == 0).all() and not batch.loss_mask_N[batch.turn_N == 0].any()
    for sequence in range(batch.num_sequences):
        mine_N = batch.owner_N == sequence
        turns = range(1, int(batch.turn_N.where(mine_N, 0).max()) + 1)
        values = [set(batch.advantages_N[mine_N & (batch.turn_N == turn)].tolist()) for turn in turns]
        assert all(len(of_turn) == 1 for of_turn in values)
        found.append([value for of_turn in values for value in of_turn])
    return found


def played(draw: random.Random) -> Played:
    """Rewards in 64ths, so that sums are exact; some are lost, before the first turn too, some give no reward."""
    said = [draw.randint(-64, 64) / 64 for _ in range(draw.randint(1, 5))]
    functions, kind = draw.choice([0.0, draw.randint(-64, 64) / 64]), draw.random()
    if kind < 0.1:
        said[-1] = None
    return Played([] if kind > 0.95 else said, functions, lost=kind > 0.8)


@pytest.mark.parametrize("seed", range(100))
def test_advantages_are_those_of_plain_sums(seed):
    draw = random.Random(seed)
    group_size = draw.randint(2, 6)
    groups = [[played(draw) for _ in range(group_size)] for _ in range(4)]
    _, batch = batch_of(group_size, [episode for group in groups for episode in group], "return_to_go")
    expected = []
    for group in groups:
        for episode in group:
            others = [one.returns() for one in group if one is not episode and one.reward is not None]
            expected.append([])
            for turn in range(len(episode.said)):
                alive = [returns[turn] for returns in others if len(returns) > turn]
                own = episode.returns()[turn] - sum(alive) / len(alive) if alive else 0.0
                expected[-1].append(0.0 if episode.reward is None else own)
    assert by_turn(batch) == [pytest.approx(values, abs=1e-6) for values in expected]
    has_S = torch.tensor([episode.reward is not None for group in groups for episode in group])
    assert torch.equal(batch.loss_mask_N, (batch.turn_N > 0) & has_S[batch.owner_N])


def test_a_good_turn_and_a_bad_one_by_hand():
    # `get_reward` x 0.5: the first earns 2 and loses 0.5; the second earns 0, then 0.5. Returns: 1.5 -0.5 and 0.5 0.5
    _, batch = batch_of(2, [Played([4.0, 3.0]), Played([0.0, 1.0])], "return_to_go")
    assert by_turn(batch) == [[1.0, -1.0], [-1.0, 1.0]]
    # with the whole reward for all turns, the bad turn would be paid as the good one is
    _, batch = batch_of(2, [Played([4.0, 3.0]), Played([0.0, 1.0])], "rloo")
    assert set(batch.advantages_N[batch.loss_mask_N].tolist()) == {1.0, -1.0} and batch.advantages_N[2] == 1.0
    # a turn that only one reached teaches nothing, the others do: returns 0.5 0.5 1 and -1 -1
    _, batch = batch_of(2, [Played([0.0, -1.0, 1.0]), Played([0.0, -2.0])], "return_to_go")
    assert by_turn(batch) == [[1.5, 1.5, 0.0], [-1.5, -1.5]]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("kind", ["return_to_go", "group_std", "rloo"])
def test_the_loss_with_lost_rollouts_is_that_of_a_batch_without_them(kind, loss):
    """Each of 4 groups of 6 loses 2, at other places; without them they are groups of 4."""
    draw = random.Random(0)
    groups = [[Played([draw.gauss(0, 1) for _ in range(draw.randint(1, 4))]) for _ in range(4)] for _ in range(4)]
    found = []
    for with_lost in (False, True):
        episodes = []
        for group in groups:
            lost = [Played([3.0, 50.0], lost=True), Played([])]
            episodes += draw.sample(group + lost, 6) if with_lost else group
        config, batch = batch_of(len(episodes) // 4, episodes, kind, loss)
        logprobs_N = (-batch.ids_N / 50).requires_grad_()
        micro = one_row(batch)
        logprobs_BT = logprobs_N[micro.token_BT.clamp(min=0)].where(micro.loss_mask_BT, 0)
        value, _ = grpo_objective(config, batch, 0.0, True)(micro, logprobs_BT, torch.zeros_like(logprobs_BT))
        value.backward()
        gradients = logprobs_N.grad[batch.loss_mask_N].tolist()
        assert not logprobs_N.grad[~batch.loss_mask_N].any()
        found.append((value.item(), sorted(gradients)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6) and abs(found[0][0]) > 1e-3
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-7)
