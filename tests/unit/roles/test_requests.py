"""What each replica samples and in which order, by numbers worked out by hand; seeds."""

from types import SimpleNamespace

import pytest

from grpo.roles.engine.generator import continuation_seed, enough_groups, request_seed, share_out
from grpo.roles.engine.loop import EngineLoop
from grpo.roles.engine.shortcuts import SampledTokens, _Tokens
from grpo.types import Prompt, Request, Requests


def asked(num_prompts: int, group_size: int) -> Requests:
    return Requests.of([Prompt(index, [5]) for index in range(num_prompts)], group_size)


def indices(shares: list[list[Request]]) -> list[list[int]]:
    return [[request.index for request in requests] for requests in shares]


def test_groups_are_cut_at_the_edges_of_equal_shares():
    """3 groups of 4 over 2 replicas are 6 completions each; 1 of 10 over 4 is 2 or 3 each."""
    assert indices(share_out(asked(3, 4), 2)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert indices(share_out(asked(1, 10), 4)) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert share_out(asked(2, 0), 2) == share_out(asked(0, 8), 2) == [[], []]


def test_shares_are_equal_to_the_nearest_completion_and_nothing_is_lost():
    for num_replicas in (1, 2, 3, 7, 16):
        shares = share_out(asked(33, 8), num_replicas)
        found = [(r.prompt.index, r.index) for requests in shares for r in requests]
        assert found == [(prompt, 8 * prompt + i) for prompt in range(33) for i in range(8)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_groups_that_may_stay_unfinished_go_whole_to_a_replica_in_their_order():
    """Of prompts 1 and 2 (groups of 2) one completion goes on; prompts 6 and 7 are fresh."""
    begun = [Request(Prompt(1, [5]), 2, [7, 7]), Request(Prompt(2, [5]), 5)]
    fresh = Requests.of([Prompt(6, [5]), Prompt(7, [5])], 2).requests
    requests = Requests(begun + fresh, group_size=2, num_left=1)
    assert share_out(requests, 1) == [requests.requests]
    # each has the 1 of a group that was begun, and a fresh one
    assert indices(share_out(requests, 2)) == [[2, 12, 13], [5, 14, 15]]


def test_what_is_left_over_is_spread_over_replicas():
    # of several requests of one group
    shares = [[Request(Prompt(i, []), 4 * i + j) for i in range(n) for j in range(4)] for n in (3, 3, 2)]
    assert enough_groups(shares, 0) == [3, 3, 2]
    assert enough_groups(shares, 2) == [3, 2, 1] and enough_groups(shares, 7) == [1, 0, 0]
    for num_left in range(9):
        assert sum(enough_groups(shares, num_left)) == 8 - num_left


def test_seeds_of_completions_and_of_what_goes_on():
    """8,000 completions, each cut after 0, 1 and 500 tokens: all different, and the first are the completions' own."""
    seeds = [request_seed(3, index) for index in range(8000)]
    assert [continuation_seed(seed, 0) for seed in seeds] == seeds
    further = [continuation_seed(seed, n) for seed in seeds for n in (1, 500)]
    assert len({*seeds, *further}) == 3 * len(seeds) and max(further) < 2**63
    assert further[:2] == [continuation_seed(3 * 2**40, 1), continuation_seed(3 * 2**40, 500)]  # by these alone


def test_what_an_engine_hands_out_says_how_it_ended_and_by_which_weights():
    """Of four requests one stops, one meets a limit, one is cut off by repetition_detection, and one is interrupted."""
    reasons = ["stop", "length", "repetition"]
    loop = made_loop(reasons)
    loop.version = 3
    pieces = loop.step() | loop.end()
    assert [pieces[number].ended_by for number in range(4)] == ["stop", "tokens", "tokens", ""]
    assert {piece.version for piece in pieces.values()} == {3} and not loop.num_running
    assert pieces[0].ids_T.tolist() == [5, 6] and pieces[3].ids_T.tolist() == [5, 6, 7]  # 7 is behind a stop text


def made_loop(reasons: list[str]) -> EngineLoop:
    """Return a loop whose engine ends requests 0, 1, ... for these reasons, each with two tokens; one more runs."""
    outputs = []
    for number, reason in enumerate(reasons):
        sample = SimpleNamespace(token_ids=[5, 6], finish_reason=reason)
        outputs.append(SimpleNamespace(request_id=str(number), outputs=[sample]))
    loop = object.__new__(EngineLoop)
    loop.engine = SimpleNamespace(step=lambda: outputs, abort_request=lambda names, internal: None)
    loop.sampled_tokens = object.__new__(SampledTokens)
    loop._running = {}
    by_request = loop.sampled_tokens._by_request = {}
    for number in range(len(reasons) + 1):
        loop._running[str(number)] = (f"vllm-{number}", number)
        by_request[f"vllm-{number}"] = _Tokens([5, 6, 7], [-1.0, -2.0, -3.0])
    return loop


def test_a_completion_that_the_engine_gave_up_ends_the_rank_and_is_not_trained_on():
    """As when a grammar and allowed_token_ids leave no token."""
    with pytest.raises(RuntimeError, match="ended a completion by an error"):
        made_loop(["error"]).step()
