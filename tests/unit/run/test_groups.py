"""Groups in flight: whatever ends when, and wherever a run is interrupted, each group is trained on once, whole."""

import io
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from grpo.algorithm.groups import are_informative
from grpo.config import GRPOConfig, SamplingConfig
from grpo.rewards.builtin import math_reward, overlong_penalty
from grpo.roles import comm
from grpo.run.groups import Group, GroupBuffer, Life, saved_groups
from grpo.run.saved import Saved, begin_to_read, resume_data
from grpo.run.scorer import Scorer
from grpo.types import Prompt, Request, Requests, Rollout
from tests.rollouts import counting_up, hands, logprobs_of

NUM_STEPS, PROMPTS, GROUP_SIZE = 10, 4, 2


def prompt_of(index: int) -> Prompt:
    return Prompt(index, [5, index], row=index % 7)


def completions(indices: Iterable[int]) -> list[Rollout]:
    """Rollouts of three tokens with these indices."""
    return [counting_up(Request(prompt_of(index // GROUP_SIZE), index), 3) for index in indices]


class Stream:
    """Prompts 0, 1, 2, ... as `PromptStream` draws them."""

    def __init__(self):
        self.num_drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        self.num_drawn += count
        first = self.num_drawn - count
        return [prompt_of(index) for index in range(first, self.num_drawn)]

    def state_dict(self) -> dict:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict) -> None:
        self.num_drawn = state["num_drawn"]


class Run:
    """A run of the loop's steps, in which a made-up engine ends completions in an order of its own."""

    def __init__(self, sampling: SamplingConfig, overlap: bool = False, seed: int = 0):
        self.sampling, self.overlap, self.seed = sampling, overlap, seed
        self.stream, self.buffer, self.version, self.dropped = Stream(), self.new_buffer(), 0, set()
        self.metrics: list[dict[str, float]] = []
        self.finished: list[int] = []

    def new_buffer(self, groups: Sequence[Group] = ()) -> GroupBuffer:
        return GroupBuffer(self.sampling, PROMPTS, GROUP_SIZE, groups)

    def steps(self, interrupted_after: tuple[int, ...] = ()) -> Iterator[list[Rollout]]:
        """What each step trains on."""
        for self.version in range(NUM_STEPS):
            buffer = self.buffer
            buffer.begin_step()
            while requests := self.fill():
                self.sample(requests)
            trained = buffer.rollouts()
            if not self.sampling.dynamic:  # the oldest complete groups
                complete = indices(group.prompt for group in buffer.groups if group.life is Life.COMPLETE)
                assert max(indices(r.prompt for r in trained)) < min(complete, default=math.inf)
            finished = indices(group.prompt for group in buffer.taken)
            for group in buffer.taken:
                assert indices(r.prompt for r in group.rollouts) == [group.prompt.index] * GROUP_SIZE
            self.finished += finished
            in_flight = {group.prompt.index for group in buffer.groups} | {r.prompt.index for r in trained}
            self.dropped |= {group.prompt.index for group in buffer.taken} - in_flight
            if self.overlap and (requests := buffer.ask(PROMPTS, self.stream.draw)):
                self.sample(requests)
            assert indices(group.prompt for group in buffer.taken) == finished  # the log asks for them only now
            self.metrics.append(buffer.metrics())
            yield trained
            if self.version in interrupted_after:
                torch.save({"flight": buffer.state(), "data": self.stream.state_dict()}, file := io.BytesIO())
                file.seek(0)
                state = torch.load(file, weights_only=True)
                self.stream, self.buffer = Stream(), self.new_buffer(saved_groups(state["flight"]))
                self.stream.load_state_dict(state["data"])

    def fill(self) -> Requests | None:
        return self.buffer.fill(self.stream.draw, self.score)

    def score(self, rollouts: list[Rollout]) -> list[Rollout]:
        return [replace(rollout, reward=reward_of(rollout.index)) for rollout in rollouts]

    def sample(self, requests: Requests) -> None:
        """Enough groups are completed, perhaps more; of the others some tokens, or none."""
        asked = indices(requests.prompts)
        num_missing = len(asked) - requests.num_left
        draw = random.Random(f"{self.seed} {self.version} {asked}")
        completed = draw.sample(asked, len(asked))[: draw.randint(num_missing, len(asked))]
        found = []
        for request in requests.requests:
            left = length_of(request.index) - len(request.begun)
            ended = request.prompt.index in completed
            count = left if ended else draw.randint(0, left - 1)
            if count or ended or draw.random() < 0.5:  # an engine tells nothing of what it was not asked for
                found.append(counting_up(request, count, self.version, ended_by="stop" if ended else ""))
        self.buffer.add(draw.sample(found, len(found)))


def length_of(index: int) -> int:
    return 1 + index * 7 % 11


def reward_of(index: int) -> float:
    """Groups 0, 3, 6, ... have equal rewards."""
    return 0.0 if index // GROUP_SIZE % 3 == 0 else float(index)


RULES = {
    f"{'dynamic' if dynamic else 'all'}, {carry_over} carried over, {'ahead' if overlap else 'in turns'}": (
        SamplingConfig(dynamic=dynamic, carry_over=carry_over),
        overlap,
    )
    for dynamic in (False, True)
    for carry_over in (0, 1, 3)
    for overlap in (False, True)
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rules", RULES)
def test_each_group_is_trained_on_once_with_all_of_its_tokens(rules, seed):
    sampling, overlap = RULES[rules]
    run = Run(sampling, overlap, seed)
    trained = [list(step) for step in run.steps()]
    for step, rollouts in enumerate(trained):
        assert len(rollouts) == PROMPTS * GROUP_SIZE
        for rollout in rollouts:
            versions = [version for version, _ in hands(rollout)]
            assert rollout.ended_by and rollout.ids_T.tolist() == list(range(length_of(rollout.index)))
            assert torch.equal(logprobs_of(rollout), -torch.arange(length_of(rollout.index)) / 100)
            assert versions == sorted(set(versions)) and versions[-1] <= step
            assert rollout.index // GROUP_SIZE == rollout.prompt.index
            assert rollout.prompt_ids_T.tolist() == rollout.prompt.ids
    indices = [rollout.index for step in trained for rollout in step]
    assert len(set(indices)) == len(indices)
    # what was drawn was trained on, was dropped, or is in flight
    in_flight = {group.prompt.index for group in run.buffer.groups}
    groups = {index // GROUP_SIZE for index in indices}
    assert groups | run.dropped | in_flight == set(range(run.stream.num_drawn))
    assert sorted(run.finished) == sorted(groups | run.dropped)  # each once, for its pass rate
    assert not groups & in_flight and not groups & run.dropped and not in_flight & run.dropped
    if sampling.dynamic:  # those that differ
        assert all(group % 3 for group in groups)
    if not sampling.dynamic or sampling.carry_over:  # nothing is lost besides
        assert all(sampling.dynamic and group % 3 == 0 for group in run.dropped)
    if not sampling.dynamic:
        assert len(in_flight) == sampling.carry_over + PROMPTS * overlap
    lags = {step - version for step, rollouts in enumerate(trained) for r in rollouts for version, _ in hands(r)}
    assert (max(lags) > 0) == (overlap or sampling.carry_over > 0)


@pytest.mark.parametrize("rules", RULES)
def test_a_run_that_is_interrupted_goes_on_as_without(rules):
    """After every step, and after some."""
    for interrupted_after in (tuple(range(NUM_STEPS)), (0,), (4, 7)):
        runs = Run(*RULES[rules], seed=1), Run(*RULES[rules], seed=1)
        whole = [list(map(facts, step)) for step in runs[0].steps()]
        assert [list(map(facts, step)) for step in runs[1].steps(interrupted_after)] == whole
        states = [repr([run.buffer.state(), run.stream.state_dict()]) for run in runs]
        assert states[0] == states[1] and runs[0].metrics == runs[1].metrics


def facts(rollout: Rollout) -> tuple:
    tokens = (rollout.ids_T.tolist(), logprobs_of(rollout).tolist(), hands(rollout))
    return rollout.index, *tokens, rollout.temperature, rollout.ended_by, rollout.prompt


def indices(prompts: Iterable[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_rounds_of_dynamic_sampling_by_hand():
    """Of groups 0 to 3 two have rewards that differ: half, so that two more need four, of which (5, 7) do: enough."""
    run = Run(SamplingConfig(dynamic=True))
    buffer = run.buffer
    for expected, num_informative in (([0, 1, 2, 3], 2), ([4, 5, 6, 7], 5)):
        requests = run.fill()
        assert indices(requests.prompts) == expected and requests.num_left == 0
        buffer.add(completions(request.index for request in requests.requests))
        buffer.take(4, run.score)
        assert len(buffer.informative) == num_informative
    assert run.fill() is None
    assert trained_prompts(buffer) == [1, 2, 4, 5] and not buffer.groups
    expected = {"sampling/rounds": 2, "sampling/informative_frac": 5 / 8, "sampling/full_frac": 1}
    assert buffer.metrics().items() >= expected.items()


def trained_prompts(buffer: GroupBuffer) -> list[int]:
    return indices(rollout.prompt for rollout in buffer.rollouts()[::GROUP_SIZE])


def brevity(completions: list[str], **columns: list) -> list[float]:
    """Stand for a function in a user's file that says of itself what it measures."""
    return [-float(len(text)) for text in completions]


brevity.measures_length = True


@pytest.mark.parametrize("length_name", ["overlong_penalty", "mine.py:brevity"])
@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (1.0, [2, 3]),
        (0.0, [1, 3]),  # length is the only part that counts
    ],
)
def test_groups_that_differ_by_length_alone_are_dropped(weight, length_name, expected):
    """Groups 0 and 1 are all wrong; groups 1 and 3 have a long completion. Groups 2 and 3 have a right one.

    A part of weight 0 measures each completion, and changes nothing.
    """
    functions = {"math_reward": math_reward, "overlong_penalty": partial(overlong_penalty, tokens=8)}
    functions |= {"mine.py:brevity": brevity, "measure": math_reward}
    weights = {"math_reward": weight, length_name: 1.0, "measure": 0.0}
    scorer = SimpleNamespace(config=SimpleNamespace(reward_weights=weights), pool=SimpleNamespace(functions=functions))
    right = [0.0, 0.0, 0.0, 0.0, 1.0, None, 1.0, 0.0]
    length = [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, -0.5]
    scored = []
    for rollout, *values in zip(completions(range(8)), right, length, range(8), strict=True):
        rewards = dict(zip(weights, values, strict=True))
        reward = sum(weights[name] * (value or 0.0) for name, value in rewards.items())
        scored.append(replace(rollout, rewards=rewards, reward=reward))
    informative_P = are_informative(scored, GROUP_SIZE, Scorer.judging_parts.fget(scorer))
    assert informative_P.nonzero().flatten().tolist() == expected


def test_groups_in_flight_of_another_run_are_left_out(capsys):
    """It has another seed, which is allowed, so that prompts are drawn in another order."""
    run = Run(SamplingConfig(carry_over=1))
    buffer = run.buffer
    run.fill()
    for seed, num_left in ((0, 5), (1, 0)):
        before = begin_to_read(GRPOConfig(), {}).facts | {"rows": {}}
        state = {"step": 1, "read": before, "data": run.stream.state_dict(), "flight": buffer.state()}
        read = begin_to_read(GRPOConfig(seed=seed, allow_changes=True), state)
        stream = SimpleNamespace(orders={}, load_state_dict=lambda _: None)
        assert len(resume_data(Saved(None, state, read), stream)) == num_left
    assert "5 groups in flight are left out: they are of the old config or data\n" in capsys.readouterr().out


def test_a_round_expects_an_eighth_of_its_groups_to_differ_at_least():
    """One group is lacking: 8 are asked for, although 15 of 200 would call for 14."""
    buffer = GroupBuffer(SamplingConfig(dynamic=True), prompts_per_step=16, group_size=GROUP_SIZE)
    buffer.num_taken = 200
    buffer.num_informative = 15
    assert buffer.num_groups_to_take == 8


def test_a_step_without_enough_groups_goes_on_after_the_last_round():
    """With two of four, or with all four if none has rewards that differ."""
    run = Run(SamplingConfig(dynamic=True, max_rounds=1))
    buffer = run.buffer
    for expected, full_frac in (([1, 2], 0.5), ([4, 5, 6, 7], 0)):
        buffer.begin_step()
        requests = run.fill()
        buffer.add(completions(request.index for request in requests.requests))
        assert run.fill() is None
        assert trained_prompts(buffer) == expected and buffer.metrics()["sampling/full_frac"] == full_frac
        run.score = list  # without any reward


def test_groups_of_another_version_are_refused_by_name(monkeypatch):
    """Whatever a saved part has less or more, the message names it and the way out."""
    run = Run(SamplingConfig(carry_over=1))
    run.fill()
    run.buffer.add(completions(range(10)))
    state = run.buffer.state()
    assert len(saved_groups(state)) == 5

    def refuse(state: dict, message: str) -> None:
        with pytest.raises(ValueError, match=f"{message}.*another version.*run.json"):
            saved_groups(state)

    for part in (state, state["prompts"][1], state["rollouts"]):
        name, value = part.popitem()
        refuse(state, f"{name} lacking")
        part |= {name: value, "of_tomorrow": value}
        refuse(state, "of_tomorrow unknown")
        del part["of_tomorrow"]
    for facts in ("ROLLOUT_FACTS", "PIECE_FACTS"):
        first, *others = getattr(comm, facts)
        monkeypatch.setattr(comm, facts, (*others, "of_tomorrow"))
        refuse(state, f"of_tomorrow lacking, {first} unknown")
        monkeypatch.undo()
    group = run.buffer.groups[0]
    group.rollouts[0] = replace(group.rollouts[0], episode={"of_tomorrow": 1})
    refuse(run.buffer.state(), "an episode .* turns, .* of_tomorrow unknown")
