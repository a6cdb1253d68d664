"""The choice of a layout from made-up times."""

import pytest

from grpo.config import GeneratorConfig, GRPOConfig, RolesConfig, TrainerConfig
from grpo.config.best_layout import (
    Line,
    PhaseTimes,
    Prediction,
    choose,
    layout_flags,
    possible_layouts,
    predict,
    split,
    table,
)
from grpo.config.layout import describe_layout

OVERLAPPING = GRPOConfig(prompts_per_step=8, group_size=8, overlap_steps=1)  # 64 completions


def predictions(config: GRPOConfig, num_ranks: int, times: PhaseTimes) -> dict[str, Prediction]:
    return {
        describe_layout(found.config): found
        for found in (predict(c, times) for c in possible_layouts(config, num_ranks))
    }


def chosen(config: GRPOConfig, num_ranks: int, times: PhaseTimes) -> str:
    return describe_layout(choose(list(predictions(config, num_ranks, times).values())).config)


def test_a_line_through_two_points():
    # 10 completions 3 s, 20 completions 4 s: 2 s and 0.1 s for each
    line = Line.through((10, 3.0), (20, 4.0))
    assert (line.fixed, line.per_completion) == pytest.approx((2.0, 0.1))
    assert line.at(40) == pytest.approx(6.0)
    # more in less time is noise: the time of the larger one, whatever there is to do
    assert Line.through((10, 5.0), (20, 4.0)) == Line(4.0, 0.0)
    # more than twice the time for twice the work: through 0
    assert Line.through((10, 1.0), (20, 4.0)) == Line(0.0, 0.2)


def test_layouts_are_those_that_the_checks_let_pass():
    found = [describe_layout(config) for config in possible_layouts(OVERLAPPING, 4)]
    # 64 completions do not divide over 3 trainers
    assert found == ["4 colocated", "2 trainer + 2 generator", "1 trainer + 3 generator"]
    pairs = GRPOConfig(generator=GeneratorConfig(tensor_parallel=2), trainer=TrainerConfig(tensor_parallel=2))
    found = [describe_layout(config) for config in possible_layouts(pairs, 8)]
    assert found == ["8 colocated", "4 trainer + 4 generator", "2 trainer + 6 generator"]  # 6 are 3 data ranks


def test_work_that_divides_freely_takes_as_long_colocated_as_split():
    # of 64 completions: generate 6.4 s and train 6.4 s of one rank; on 2 + 2 ranks max(3.2, 3.2), on 4: 1.6 + 1.6
    times = PhaseTimes(Line(0, 0.1), Line(0, 0.1), sync=0.5)
    found = predictions(OVERLAPPING, 4, times)
    assert found["4 colocated"].step == found["2 trainer + 2 generator"].step == pytest.approx(3.7)
    assert chosen(OVERLAPPING, 4, times) == "4 colocated"  # no sample is a step old


def test_a_fixed_cost_of_decoding_speaks_for_fewer_engines():
    # generate 2 s + 0.05 s for each completion of an engine, train 0.1 s for each of a rank
    times = PhaseTimes(Line(2, 0.05), Line(0, 0.1), sync=0.1)
    found = predictions(OVERLAPPING, 4, times)
    assert found["4 colocated"].step == pytest.approx(2 + 0.8 + 1.6 + 0.1)
    assert found["2 trainer + 2 generator"].step == pytest.approx(max(2 + 1.6, 3.2) + 0.1)
    assert found["1 trainer + 3 generator"].step == pytest.approx(6.4 + 0.1)
    assert chosen(OVERLAPPING, 4, times) == "2 trainer + 2 generator"
    # without overlap the two halves wait for each other: 3.6 + 3.2 + 0.1
    in_turns = GRPOConfig(prompts_per_step=8, group_size=8)
    assert predictions(in_turns, 4, times)["2 trainer + 2 generator"].step == pytest.approx(6.9)
    assert chosen(in_turns, 4, times) == "4 colocated"


def test_little_gain_is_not_worth_older_samples():
    def predicted(config: GRPOConfig, seconds: float) -> Prediction:
        return Prediction(config, generate=seconds, train=0.0, sync=0.0)

    overlapped, in_turns = split(OVERLAPPING, 2, 2), split(GRPOConfig(), 2, 2)
    a, b = predicted(in_turns, 10.0), predicted(overlapped, 9.6)
    assert choose([a, b]) is a  # 4 % faster
    b = predicted(overlapped, 9.4)
    assert choose([a, b]) is b  # 6 %
    assert choose([b]) is b  # nothing else is possible


def test_flags_give_the_layout_back():
    colocated, halves, _ = possible_layouts(OVERLAPPING, 4)
    assert layout_flags(colocated) == (
        "--roles.colocated --roles.num-trainers 4 --roles.num-references 0 --generator.gpu-memory-utilization 0.35 "
        "--overlap-steps 0"
    )
    assert layout_flags(halves) == (
        "--roles.no-colocated --roles.num-trainers 2 --roles.num-references 0 --roles.num-generators 2 "
        "--overlap-steps 1"
    )


def test_a_colocated_recipes_share_of_memory_is_no_split_engines():
    config = GRPOConfig(
        roles=RolesConfig(colocated=True, num_trainers=2), generator=GeneratorConfig(gpu_memory_utilization=0.3)
    )
    assert [c.generator.gpu_memory_utilization for c in possible_layouts(config, 2)] == [0.3, 0.85]


def test_the_table_shows_the_arithmetic():
    times = PhaseTimes(Line(2, 0.05), Line(0, 0.1), sync=0.1)
    found = list(predictions(OVERLAPPING, 2, times).values())
    assert table(found, choose(found)).splitlines() == [
        "   2 colocated                       3.60 + 3.20 + 0.10 = 6.90 s",
        "-> 1 trainer + 1 generator, overlap  max(5.20, 6.40) + 0.10 = 6.50 s",
    ]
