"""What each replica samples and in which order, by numbers worked out by hand; seeds."""

from grpo.roles.requests import (
    Request,
    continuation_seed,
    enough_groups,
    one_by_one,
    request_seed,
    share_out,
)
from grpo.types import Prompt, Requests


def prompts_of(number: int) -> list[Prompt]:
    return [Prompt(index, [5]) for index in range(number)]


def parts(requests: list[Request]) -> list[tuple[int, int, int]]:
    return [(r.prompt, r.first, r.count) for r in requests]


def test_replicas_keep_the_order_and_have_equal_counts():
    assert [parts(r) for r in share_out(Requests(prompts_of(3)), 4, 1)] == [[(0, 0, 4), (1, 0, 4), (2, 0, 4)]]
    assert [parts(r) for r in share_out(Requests(prompts_of(2)), 4, 2)] == [[(0, 0, 4)], [(1, 0, 4)]]


def test_nothing_is_asked_for():
    assert share_out(Requests(prompts_of(2)), 0, 2) == share_out(Requests([]), 8, 2) == [[], []]


def test_a_group_is_cut_where_replicas_outnumber_prompts():
    assert [parts(r) for r in share_out(Requests(prompts_of(1)), 8, 2)] == [[(0, 0, 4)], [(0, 4, 4)]]
    counts = [sum(r.count for r in requests) for requests in share_out(Requests(prompts_of(1)), 10, 4)]
    assert counts == [2, 3, 2, 3]


def test_groups_are_cut_at_the_edges_of_equal_shares():
    """3 groups of 4 over 2 replicas: 6 completions each."""
    found = [parts(r) for r in share_out(Requests(prompts_of(3)), 4, 2)]
    assert found == [[(0, 0, 4), (1, 0, 2)], [(1, 2, 2), (2, 0, 4)]]


def test_shares_are_equal_to_the_nearest_completion_and_nothing_is_lost():
    for num_replicas in (1, 2, 3, 7, 16):
        shares = share_out(Requests(prompts_of(33)), 8, num_replicas)
        found = [(r.prompt, r.first) for requests in shares for r in one_by_one(requests)]
        assert found == [(prompt, i) for prompt in range(33) for i in range(8)]
        loads = [sum(r.count for r in requests) for requests in shares]
        assert max(loads) - min(loads) <= 1


BEGUN = {2: [7, 7], 3: None, 4: None, 5: []}


def test_what_was_begun_comes_first_and_whole():
    """Prompts 1 and 2 (groups of 2) were begun; a completion of each has ended. Then fresh ones."""
    prompts = [Prompt(index, [5]) for index in (1, 2, 6, 7)]
    asked = Requests(prompts, BEGUN, num_left=1)
    [requests] = share_out(asked, 2, 1)
    assert requests == [Request(0, 0, 1, [7, 7]), Request(1, 1, 1, []), Request(2, 0, 2), Request(3, 0, 2)]
    # each has the 1 of a group that was begun, and a fresh one
    found = share_out(asked, 2, 2)
    assert [parts(r) for r in found] == [[(0, 0, 1), (2, 0, 2)], [(1, 1, 1), (3, 0, 2)]]


def test_what_is_left_over_is_spread_over_replicas():
    shares = [[Request(i, 0, 4) for i in range(n)] for n in (3, 3, 2)]
    assert enough_groups(shares, 0) == [3, 3, 2]
    assert enough_groups(shares, 2) == [3, 2, 1] and enough_groups(shares, 7) == [1, 0, 0]
    for num_left in range(9):
        assert sum(enough_groups(shares, num_left)) == 8 - num_left
    # several requests of one group count as one
    assert enough_groups([[Request(0, 0, 1), Request(0, 1, 1), Request(1, 0, 4)]], 1) == [1]


def test_seeds_of_completions_and_of_what_goes_on():
    """1,000 prompts x 8, each cut after 0, 1 and 500 tokens: all different, and the first are the completions' own."""
    seeds = [request_seed(3, Prompt(index, []), i, 8) for index in range(1000) for i in range(8)]
    assert [continuation_seed(seed, 0) for seed in seeds] == seeds
    further = [continuation_seed(seed, n) for seed in seeds for n in (1, 500)]
    assert len({*seeds, *further}) == 3 * len(seeds) and max(further) < 2**63
    assert further[:2] == [continuation_seed(3 * 2**40, 1), continuation_seed(3 * 2**40, 500)]  # by these alone
