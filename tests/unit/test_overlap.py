"""Sampling ahead without ranks: what is planned, what a checkpoint keeps of it, seconds that two spans share."""

import json
import pathlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo.config import GRPOConfig
from grpo.data.streams import PromptStream
from grpo.folder.pending import pending_state, pending_tensors, read_pending, without_pending
from grpo.roles.ahead import PROBE_PROMPTS, shared_seconds
from grpo.run.carried import CarryOver
from grpo.run.driver import Driver
from grpo.run.past_lengths import PastLengths
from grpo.run.session import Session
from grpo.types import Completion, Pending, Plan, Prompt
from grpo.watch import stopping


class Stream:
    """Prompts 0, 1, 2, ... as `PromptStream` draws them."""

    def __init__(self):
        self.num_drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        self.num_drawn += count
        first = self.num_drawn - count
        return [Prompt(index, [5, index], {"answer": index}, 7, "a") for index in range(first, self.num_drawn)]

    def state_dict(self) -> dict:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict) -> None:
        self.num_drawn = state["num_drawn"]

    draw_again = PromptStream.draw_again


def fake_driver(config: GRPOConfig, stream: Stream) -> SimpleNamespace:
    """What `Driver.plan` and `Driver.state` read of a driver whose run begins."""
    carried = CarryOver(config.prompts_per_step, config.sampling.carry_over, config.group_size)
    parts = {"lengths": PastLengths(keeps_rows=True), "carried": carried}
    session = Session(config, "train_grpo.py", None)
    session.first_step = 0
    return SimpleNamespace(config=config, stream=stream, session=session, _draw=stream.draw, **parts)


def plans(config: GRPOConfig, num_steps: int) -> list[Plan]:
    """What the driver decides for the steps of a new run."""
    stream = Stream()
    driver = fake_driver(config, stream)
    found, pending = [], None
    for step in range(num_steps):
        plan = Driver.plan.__wrapped__(driver, step, pending)
        pending = Pending(plan.next_prompts, [], plan.generator_version, plan.next_place) if plan.next_prompts else None
        found.append(plan)
    return found


def indices(prompts: list[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_taking_turns_draws_each_steps_own_prompts():
    first, second = plans(GRPOConfig(prompts_per_step=2, num_steps=9), 2)
    assert (indices(first.prompts), indices(second.prompts)) == ([0, 1], [2, 3])
    assert not first.next_prompts + second.next_prompts + first.probe + second.probe
    assert first.sync_check and second.sync_check  # at the start, and after the first sync


def test_overlap_draws_the_next_steps_prompts_and_probes_for_the_sync_check():
    """Steps 0, 1, 2 of 10 prompts: the first draws for two steps and compares its own batch, which is of version 0."""
    config = GRPOConfig(prompts_per_step=10, num_steps=3, overlap_steps=1, sync_check_interval=20)
    first, second, last = plans(config, 3)
    assert indices(first.prompts) == list(range(10)) and indices(first.next_prompts) == list(range(10, 20))
    assert first.sync_check and not first.probe
    # those of the second are sampled already; with the weights of version 0, so a probe takes the batch's place
    assert not second.prompts and indices(second.next_prompts) == list(range(20, 30))
    assert not second.sync_check and indices(second.probe) == list(range(10, 10 + PROBE_PROMPTS))
    assert [plan.generator_version for plan in (first, second, last)] == [0, 1, 2]
    assert not last.probe and not last.sync_check  # not due before step 20
    assert indices(last.next_prompts) == list(range(30, 40))  # for a run that is made longer


def test_a_stop_leaves_what_was_pending_to_the_checkpoint(tmp_path, monkeypatch):
    """After step 0 of a run that saves at its end alone: nothing more is drawn, so the place in the data fits it."""
    stream, config = Stream(), GRPOConfig(run_dir=str(tmp_path), prompts_per_step=2, num_steps=9, overlap_steps=1)
    driver = fake_driver(config, stream)
    driver.roles = SimpleNamespace(is_driver=True)
    plan = Driver.plan.__wrapped__(driver, 0, None)
    pending = Pending(plan.next_prompts, PENDING.completions, 0, plan.next_place)
    (tmp_path / "stop").touch()
    monkeypatch.setattr(stopping, "_asked", [])
    plan = Driver.plan.__wrapped__(driver, 1, pending)
    assert plan.stop and not plan.prompts + plan.next_prompts
    state, tensors = Driver.state(driver, 1, pending)
    assert state["data"] == {"num_drawn": 4} and state["pending"]["place"] == {"num_drawn": 2}
    assert tensors["ids"].tolist() == [3, 1, 2, 9, 9, 9]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((1, 4), (2, 9), 2), ((2, 9), (1, 4), 2), ((1, 9), (3, 4), 1), ((1, 2), (2, 3), 0), ((5, 6), (1, 2), 0)],
)
def test_shared_seconds(first, second, expected):
    assert shared_seconds(first, second) == expected


PENDING = Pending(
    prompts=[Prompt(8, [5, 8], {"answer": 8}, 7, "a"), Prompt(9, [5, 9], {"answer": 9}, 7, "a", expected_tokens=2.5)],
    completions=[
        Completion.of(torch.tensor([3, 1]), torch.tensor([-0.25, -torch.inf]), False, version=4, temperature=0.7),
        Completion.of(torch.tensor([2]), torch.tensor([-1e-9]), True, version=4),
        Completion.of(torch.tensor([], dtype=torch.int64), torch.tensor([]), False, version=4),
        Completion.of(torch.tensor([9, 9, 9]), torch.tensor([-0.1, -0.2, -0.3]), True, version=4, temperature=0.7),
    ],
    version=4,
    place={"num_drawn": 8},
)


def saved(folder: pathlib.Path) -> dict:
    dcp.save({"driver": pending_tensors(PENDING)}, checkpoint_id=folder, no_dist=True)
    return json.loads(json.dumps(pending_state(PENDING)))


def test_a_checkpoint_gives_back_what_was_pending(tmp_path):
    stream = Stream()
    stream.draw(25)  # further rounds, and the next step's
    read = read_pending(tmp_path, saved(tmp_path), stream)
    assert read.prompts == PENDING.prompts and (read.version, read.place) == (4, {"num_drawn": 8})
    assert indices(stream.draw(1)) == [25]  # as if nothing had been read
    for before, after in zip(PENDING.completions, read.completions, strict=True):
        assert torch.equal(before.ids_T, after.ids_T) and torch.equal(before.logprobs_T, after.logprobs_T)
        assert (before.truncated, before.version, before.temperature) == (
            after.truncated,
            after.version,
            after.temperature,
        )


def test_other_values_forget_what_was_pending():
    """The data go on where its prompts were drawn."""
    state = {"step": 5, "data": {"num_drawn": 10}, "pending": pending_state(PENDING)}
    assert without_pending(state) == {"step": 5, "data": {"num_drawn": 8}}
    assert "pending" in state
    assert without_pending({"step": 5, "data": {"num_drawn": 10}}) == {"step": 5, "data": {"num_drawn": 10}}


def test_a_broken_file_of_pending_completions_is_refused(tmp_path):
    state = saved(tmp_path)
    with pytest.raises(ValueError, match="has 4 completions sampled ahead and driver.json says 8"):
        read_pending(tmp_path, state | {"completions": 8}, Stream())
