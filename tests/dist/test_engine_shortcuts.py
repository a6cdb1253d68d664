"""The shortcuts through vLLM's scheduler schedule what it would have scheduled, also ahead, which only GPUs do."""

import copy
import random
from types import SimpleNamespace

import pytest

from tests.tiny_models import make_tiny

BLOCK, NUM_BLOCKS, MAX_TOKENS = 4, 22, 24


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    from vllm.engine.arg_utils import EngineArgs

    folder = make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")
    sizes = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": BLOCK}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, disable_log_stats=True, **sizes
    ).create_engine_config()


def scheduler_of(vllm_config, is_ahead: bool, is_v2: bool, caches: bool):
    import torch
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(hash)
    config = copy.deepcopy(vllm_config)
    config.scheduler_config.async_scheduling = is_ahead
    config.cache_config.enable_prefix_caching, config.cache_config.num_gpu_blocks = caches, NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    made = (AsyncScheduler if is_ahead else Scheduler)(
        config, cache, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK
    )
    made.use_v2_model_runner = is_v2
    return made


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("is_ahead, is_v2", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_vllms_own_scheduler(vllm_config, is_ahead, is_v2, caches, seed):
    """Every step's plan, every token and log-prob, and the free blocks in the end.

    Requests come and are aborted at any time, share prompts, end with a stop token, their limit or the model's, wait
    for a slot, and are preempted because the cache is small.
    """
    plans, taken, preempted = zip(
        *(run(scheduler_of(vllm_config, is_ahead, is_v2, caches), seed, short) for short in (0, 1))
    )
    assert plans[0] == plans[1]
    assert taken[0] == taken[1]
    assert preempted[0] == preempted[1] and preempted[0]


def run(scheduler, seed: int, is_short: int):
    """What `scheduler` plans for a random load, what was taken for each request, and whom it preempted."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    import numpy as np

    from grpo.roles.engine_shortcuts import PlainSteps, SampledTokens

    core = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    assert PlainSteps.fit(scheduler)
    with pytest.MonkeyPatch.context() as patch:
        if not is_short:
            patch.setattr(PlainSteps, "fit", lambda scheduler: False)
        sampled = SampledTokens(SimpleNamespace(llm_engine=core), whole=True)
    draw, hasher = random.Random(seed), get_request_block_hasher(BLOCK, sha256)
    plans, taken, queue, live, number, preempted = [], {}, [], [], 0, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **o: (
        preempted.append(request.request_id),
        preempt(request, *a, **o),
    )
    for step in range(5000):
        if step < 200 and draw.random() < 0.2:
            for _ in range(draw.randint(1, 4)):
                prompt = list(range(7, 7 + (50 if draw.random() < 0.1 else draw.randint(1, 10))))
                params = SamplingParams(max_tokens=draw.randint(1, MAX_TOKENS), stop_token_ids=[1], logprobs=0)
                request = Request(str(number), prompt, params, None, block_hasher=hasher)
                scheduler.add_request(request)
                live.append(str(number))
                number += 1
        if live and draw.random() < 0.05:
            scheduler.finish_requests(draw.choice(live), RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            plan = scheduler.schedule()
            cached = plan.scheduled_cached_reqs
            plans.append([
                plan.num_scheduled_tokens, plan.total_num_scheduled_tokens, sorted(plan.finished_req_ids),
                [(new.req_id, new.block_ids, new.num_computed_tokens) for new in plan.scheduled_new_reqs],
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens,
                sorted(cached.resumed_req_ids), sorted(cached.all_token_ids.items()),
            ])  # fmt: skip
            if plan.total_num_scheduled_tokens:
                fed = plan.scheduled_new_reqs
                done = {new.req_id: new.num_computed_tokens for new in fed}
                done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
                queue.append((plan, done))
        if not queue or (len(queue) < 1 + scheduler_ahead(scheduler) and scheduler.has_unfinished_requests()):
            continue
        plan, done = queue.pop(0)
        names = list(plan.num_scheduled_tokens)
        tokens, column = [], []
        for name in names:
            request = scheduler.requests.get(name)
            length = request.num_prompt_tokens if request else 0
            rng = random.Random(f"{seed} {name} {done[name]}")
            samples = done[name] + plan.num_scheduled_tokens[name] >= length
            tokens.append([rng.choice([1] + list(range(2, 20)))] if samples else [])
            column.append([rng.random()])
        logprobs = LogprobsLists(np.zeros((len(names), 1)), np.array(column), np.zeros(len(names)))
        output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens, logprobs)
        for of_client in scheduler.update_from_output(plan, output).values():
            for ended in of_client.outputs:
                live.remove(ended.request_id)
                of_it = sampled.take(ended.request_id)
                taken[ended.request_id] = ended.new_token_ids, of_it.ids, of_it.logprobs, str(ended.finish_reason)
    assert not scheduler.has_unfinished_requests() and len(taken) > 40
    assert scheduler.reset_prefix_cache()
    return plans, taken, preempted


def scheduler_ahead(scheduler) -> int:
    return int(scheduler.scheduler_config.async_scheduling)
