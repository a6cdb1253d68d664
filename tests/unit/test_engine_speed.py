"""The scheduler's books after a step's tokens, kept by us or by vLLM's scheduler of GPUs, which counts tokens ahead."""

import random
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from grpo.roles.engine_speed import _keeps_inner_tokens

BLOCK_TOKENS, MAX_MODEL_LEN, STOP, EOS = 4, 30, 7, 8


def scheduler_of(kind: type, manager: type = FullAttentionManager):
    """One with no more than what is asked of it here."""
    made = object.__new__(kind)
    blocks = object.__new__(manager)
    blocks.block_size, blocks.block_pool = BLOCK_TOKENS, SimpleNamespace(hash_block_size=BLOCK_TOKENS)
    coordinator = SimpleNamespace(single_type_managers=[blocks])
    made.kv_cache_manager = SimpleNamespace(coordinator=coordinator, cache_blocks=lambda request, num_tokens: None)
    made.max_model_len, made.requests = MAX_MODEL_LEN, {}
    return made


def request_of(number: int, num_prompt: int, max_tokens: int, is_ahead: bool) -> Request:
    """A running one, whose next token is under way."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP])
    params.update_from_generation_config({}, EOS)
    made = Request(f"r{number}", list(range(10, 10 + num_prompt)), params, None)
    made.status, made.num_in_flight_tokens, made.num_computed_tokens = RequestStatus.RUNNING, 1, num_prompt
    made.num_output_placeholders = int(is_ahead)
    return made


def books(request: Request) -> dict:
    names = ("status", "stop_reason", "num_in_flight_tokens", "num_output_placeholders", "num_computed_tokens")
    return {name: getattr(request, name) for name in names} | {
        "output": list(request.output_token_ids),
        "all": list(request.all_token_ids),
    }


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_books_are_those_of_vllm(kind):
    """Step after step until all have stopped; what is left to vLLM is done by vLLM in both."""
    draw, is_ahead = random.Random(0), kind is AsyncScheduler
    shapes = [(number, draw.randint(1, 20), draw.randint(1, 12), is_ahead) for number in range(60)]
    ours, theirs = scheduler_of(kind), [request_of(*shape) for shape in shapes]
    keep_inner = _keeps_inner_tokens(ours)
    ours.requests = {request.request_id: request for request in (request_of(*shape) for shape in shapes)}
    taken = {name: ([], []) for name in ours.requests}
    num_kept = num_left = 0
    while running := [request for request in theirs if not request.is_finished()]:
        rows = {request.request_id: row for row, request in enumerate(running)}
        tokens = [[draw.choice([1, 2, 3, 4, 5, 6, STOP, EOS])] for _ in running]
        column = [draw.random() for _ in running]
        output = SimpleNamespace(sampled_token_ids=[list(one) for one in tokens], req_id_to_index=rows)
        left = keep_inner(dict.fromkeys(rows, 1), output, column, taken)
        num_kept, num_left = num_kept + len(rows) - len(left), num_left + len(left)
        for request, token, number in zip(running, tokens, column, strict=True):
            mine = ours.requests[request.request_id]
            if request.request_id in left:
                mine.num_in_flight_tokens -= 1
                ours._update_request_with_output(mine, list(token))
            else:
                assert taken[request.request_id][0][-1] == token[0] and taken[request.request_id][1][-1] == number
            request.num_in_flight_tokens -= 1
            ours._update_request_with_output(request, token)
            assert books(mine) == books(request)
            for one in (mine, request):  # the next step
                one.num_in_flight_tokens, one.num_output_placeholders = 1, int(is_ahead)
                one.num_computed_tokens += 1
    assert num_kept > 60 and num_left > 60


def test_what_is_out_of_the_ordinary_is_left_to_vllm():
    scheduler = scheduler_of(AsyncScheduler)
    requests = [request_of(number, 5, 12, True) for number in range(7)]
    scheduler.requests = {request.request_id: request for request in requests[1:]}  # the first was aborted
    requests[1].num_stale_output_tokens = 1
    requests[2].status = RequestStatus.PREEMPTED
    requests[3].structured_output_request = object()
    sampled = [[3]] * 7
    sampled[4] = [3, 4]  # drafted
    scheduled = {request.request_id: 1 for request in requests} | {"r5": 5}  # the end of a prompt
    rows = {f"r{number}": number for number in range(7)}
    output = SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=rows)
    taken = {name: ([], []) for name in rows}
    left = _keeps_inner_tokens(scheduler)(scheduled, output, [0.5] * 7, taken)
    assert left == {"r0": 1, "r1": 1, "r2": 1, "r3": 1, "r4": 1, "r5": 5}
    assert taken["r6"] == ([3], [0.5]) and requests[6].output_token_ids[-1] == 3


def test_other_caches_are_left_alone():
    assert _keeps_inner_tokens(scheduler_of(Scheduler, SlidingWindowManager)) is None
