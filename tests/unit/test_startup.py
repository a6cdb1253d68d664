"""What is told of the time before the first step."""

from grpo.run.step_timer import slowest_of


def test_the_slowest_rank_is_the_one_that_works_longest():
    first = {"importing": 6.0, "loading the models": 9.04, "waiting for the other ranks": 30.0}
    second = {"importing": 7.0, "loading the models": 9.0, "waiting for the other ranks": 29.0}  # 16 s against 15.04
    told = "importing 7.0 s, loading the models 9.0 s, waiting for the other ranks 29.0 s"
    assert slowest_of([first, second]) == f"{told} (the slowest of 2 ranks)"
    assert slowest_of([second]) == told


def test_what_takes_no_time_is_left_out():
    assert slowest_of([{"importing": 6.0, "waiting for the other ranks": 0.01}]) == "importing 6.0 s"
    assert slowest_of([{"importing": 0.01}]) == "importing 0.0 s"
