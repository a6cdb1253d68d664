"""Groups in flight: what goes on, what is trained, what a checkpoint keeps; past lengths."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from grpo.config import GRPOConfig, SamplingConfig
from grpo.folder.pending import without_pending
from grpo.report.sampling_work import stale_frac
from grpo.run.carried import CarryOver, join
from grpo.run.driver import Driver
from grpo.run.past_lengths import PastLengths
from grpo.types import Prompt
from grpo.watch import stopping
from tests.unit.completions import completion, hands
from tests.unit.test_overlap import Stream, fake_driver, indices


def begun(stream: Stream, prompts_per_step: int = 2, carry_over: int = 1, group_size: int = 2) -> CarryOver:
    carried = CarryOver(prompts_per_step, carry_over, group_size)
    place = stream.state_dict()
    carried.begin(stream.draw(carried.num_missing), place)
    return carried


def test_three_groups_in_flight_two_trained():
    """Prompts 0, 1, 2; completion 1 (of prompt 0) has 4 tokens when 1 and 2 are complete, and 6 in the end."""
    stream = Stream()
    carried = begun(stream)
    assert not carried.has_begun
    prompts, plan = carried.to_sample()
    assert indices(prompts) == [0, 1, 2] and plan.begun == {} and plan.num_groups == 2
    sampled = [completion(0, 3), completion(1, 4, ended=False), *(completion(i, 2) for i in (2, 3, 4, 5))]
    prompts, completions = carried.take(sampled)
    assert indices(prompts) == [1, 2] and [c.index for c in completions] == [2, 3, 4, 5]

    assert carried.has_begun and carried.num_missing == 2
    carried.begin(stream.draw(2), {"num_drawn": 3})
    prompts, plan = carried.to_sample()
    assert indices(prompts) == [0, 3, 4] and plan.begun == {0: None, 1: [0, 1, 2, 3]} and plan.num_groups == 2
    # 3 is complete, of 4 a completion did not even begin
    sampled = [completion(1, 2, version=1, first=4), *(completion(i, 5, version=1) for i in (6, 7, 8))]
    prompts, completions = carried.take(sampled)
    assert indices(prompts) == [0, 3] and [c.index for c in completions] == [0, 1, 6, 7]
    assert completions[1].ids_T.tolist() == [0, 1, 2, 3, 4, 5] and hands(completions[1]) == [(0, 4), (1, 2)]
    assert [hands(c) for c in completions[2:]] == [[(1, 5)]] * 2
    assert carried.to_sample()[1].begun == {8: None, 9: []}
    # 3 + 6 + 5 + 5 tokens, of which 3 + 4 are of version 0
    assert stale_frac(completions, 1) == pytest.approx(7 / 19) and stale_frac(completions, 0) == 0


def test_the_oldest_are_trained_first_and_what_is_complete_counts_for_the_next_step():
    carried = begun(Stream(), prompts_per_step=2, carry_over=2, group_size=1)
    prompts, _ = carried.take([completion(i, 3, ended=i != 1) for i in range(4)])  # three of four are complete
    assert indices(prompts) == [0, 2]
    prompts, plan = carried.to_sample()
    assert indices(prompts) == [1] and plan.num_groups == 1  # the other one is there already
    prompts, completions = carried.take([completion(1, 2, version=1, first=3)])
    assert indices(prompts) == [1, 3] and [c.version for c in completions] == [1, 0]


def test_too_few_complete_groups_are_a_bug():
    carried = begun(Stream())
    with pytest.raises(RuntimeError, match="only 1 of 2 groups are complete"):
        carried.take([completion(0, 1), completion(1, 1)])


def test_join():
    first, second = completion(5, 2, version=3, ended=False), completion(5, 1, version=4, ended=False, first=2)
    third = completion(5, 3, version=4, first=3, truncated=True, temperature=0.5)
    whole = join(join(first, second, 5), third, 5)
    assert whole.ids_T.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(whole.logprobs_T, -torch.arange(6) / 100)
    assert hands(whole) == [(3, 2), (4, 4)] and (whole.version, whole.oldest_version) == (4, 3)
    assert whole.truncated and whole.ended and whole.temperature == 0.5 and whole.index == 5
    assert join(first, None, 5) is first and join(first, completion(5, 0, version=9, ended=False), 5) is first
    assert join(None, second, 5) is second
    nothing = join(None, None, 5)
    assert not nothing.ended and nothing.num_tokens == 0 and join(nothing, second, 5) is second
    assert len(third.pieces) == 1 and first.num_tokens == 2  # nothing was written into


def test_a_checkpoint_gives_back_what_is_carried_over(tmp_path):
    stream = Stream()
    carried = begun(stream)
    carried.take([completion(0, 3), completion(1, 4, ended=False), *(completion(i, 2) for i in (2, 3, 4, 5))])
    place = stream.state_dict()
    carried.begin(stream.draw(2), place)
    carried.take([completion(6, 1, version=1), completion(7, 1, version=1), completion(1, 2, 1, first=4)])
    dcp.save({"driver": carried.tensors()}, checkpoint_id=tmp_path, no_dist=True)
    state = json.loads(json.dumps(carried.state()))
    assert state == {"draws": [{"place": {"num_drawn": 3}, "count": 2, "prompts": [4]}]}

    again = CarryOver(2, 1, 2)
    stream.draw(7)
    again.load(tmp_path, state, stream)
    assert indices(stream.draw(1)) == [12]  # as if nothing had been read
    assert again.to_sample() == carried.to_sample() and again.state() == carried.state()
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in carried.tensors().items())
    with pytest.raises(ValueError, match="has 2 completions carried over and driver.json says 4"):
        again.load(tmp_path, {"draws": [{"place": {"num_drawn": 3}, "count": 2, "prompts": [3, 4]}]}, stream)


def test_a_cut_group_survives_a_checkpoint_with_its_pieces(tmp_path):
    stream = Stream()
    carried = CarryOver(2, 1, 2)
    for version in (0, 1):
        place = stream.state_dict()
        carried.begin(stream.draw(carried.num_missing), place)
        pieces = [completion(1, 2, version, ended=False, first=2 * version)]
        carried.take([completion(0, 3), *pieces, *(completion(i, 2, version) for i in range(2, 12))])
    dcp.save({"driver": carried.tensors()}, checkpoint_id=tmp_path, no_dist=True)
    again = CarryOver(2, 1, 2)
    again.load(tmp_path, carried.state(), stream)
    [cut] = [c for group in again.groups for c in group.completions if not c.ended]
    assert hands(cut) == [(0, 2), (1, 2)] and cut.ids_T.tolist() == [0, 1, 2, 3] and cut.index == 1


def test_another_config_leaves_out_what_was_carried_over(capsys):
    state = {"step": 5, "data": {"num_drawn": 9}, "carried": {"draws": [{"prompts": [3, 4]}, {"prompts": [7]}]}}
    assert without_pending(state) == {"step": 5, "data": {"num_drawn": 9}}
    assert "3 groups that were carried over are left out" in capsys.readouterr().out


def test_plans_draw_what_is_missing_and_probe_for_the_sync_check():
    config = GRPOConfig(prompts_per_step=2, group_size=2, num_steps=9, sampling=SamplingConfig(carry_over=1))
    driver = fake_driver(config, Stream())
    plan = Driver.plan.__wrapped__(driver, 0, None)
    assert indices(plan.prompts) == [0, 1, 2] and plan.sync_check and not plan.probe
    driver.carried.take([completion(0, 3), completion(1, 4, ended=False), *(completion(i, 2) for i in (2, 3, 4, 5))])
    plan = Driver.plan.__wrapped__(driver, 1, None)
    assert indices(plan.prompts) == [0, 3, 4] and plan.carried.begun == {0: None, 1: [0, 1, 2, 3]}
    # a part of the batch is of older weights, so that others stand in for it
    assert not plan.sync_check and indices(plan.probe) == [0, 3, 4]


def test_a_stop_keeps_what_is_carried_over(tmp_path, monkeypatch):
    config = GRPOConfig(
        run_dir=str(tmp_path), prompts_per_step=2, group_size=2, num_steps=9, sampling=SamplingConfig(carry_over=1)
    )
    driver = fake_driver(config, Stream())
    driver.roles = SimpleNamespace(is_driver=True)
    Driver.plan.__wrapped__(driver, 0, None)
    driver.carried.take([completion(0, 3), completion(1, 4, ended=False), *(completion(i, 2) for i in (2, 3, 4, 5))])
    (tmp_path / "stop").touch()
    monkeypatch.setattr(stopping, "_asked", [])
    assert Driver.plan.__wrapped__(driver, 1, None).stop
    state, tensors = Driver.state(driver, 1, None)
    assert state["carried"]["draws"] == [{"place": {"num_drawn": 0}, "count": 3, "prompts": [0]}]
    assert state["data"] == {"num_drawn": 3} and tensors["ids"].tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_lengths_of_a_row_are_expected_again():
    """Row 7: 2, 4 and later 6, 8 tokens, mean 5. Row 8: 10, 10. An unknown row: 40 / 6."""
    rows = {name: Prompt(0, [5], row=number, source="a b"[0]) for name, number in (("x", 7), ("y", 8), ("z", 9))}
    lengths = PastLengths(keeps_rows=True)
    assert lengths.expect([rows["x"]])[0].expected_tokens == 0
    lengths.record([rows["x"], rows["y"]], [completion(i, n) for i, n in enumerate((2, 4, 10, 10))])
    lengths.record([rows["x"]], [completion(i, n) for i, n in enumerate((6, 8))])
    again = PastLengths(keeps_rows=True)
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    for of in (lengths, again):
        assert [p.expected_tokens for p in of.expect(list(rows.values()))] == [5, 10, 40 / 6]
    streamed = PastLengths(keeps_rows=False)
    streamed.record([rows["x"]], [completion(0, 2), completion(1, 4)])
    assert streamed.expect([rows["x"], rows["y"]])[1].expected_tokens == 3 and not streamed.state_dict()["rows"]
