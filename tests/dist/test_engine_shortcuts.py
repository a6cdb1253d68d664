"""The shortcuts through vLLM's scheduler plan what it would have planned, also a step ahead, as only GPUs do."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from grpo.roles.engine import shortcuts, vllm_engine
from grpo.roles.engine.shortcuts import PlainSteps, SampledTokens
from grpo.types import Piece
from tests.tiny_models import make_tiny

BLOCK, NUM_BLOCKS, MAX_TOKENS, STOP = 4, 22, 24, 1


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    from vllm.engine.arg_utils import EngineArgs

    folder = make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-tied")
    sizes = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": BLOCK}
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, disable_log_stats=True, **sizes)
    return arguments.create_engine_config()


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("is_ahead, is_v2", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("seed", range(2))  # the second one also hands out the ids that were kept
def test_equals_vllms_own_scheduler(vllm_config, is_ahead, is_v2, caches, seed, monkeypatch):
    """Every step's plan, every token and log-prob, and the free blocks in the end.

    Requests come and are aborted at any time, share prompts, end with a stop token, their limit or the model's, wait
    for a slot, and are preempted because the cache is small. With the second seed and runner V1 vLLM sees each
    token, as stop texts need.
    """
    monkeypatch.setattr(shortcuts, "MOST_UNWRITTEN", 8)
    (plans, taken, preempted), short = (
        run(scheduler_of(vllm_config, is_ahead, is_v2, caches), seed, is_short) for is_short in (False, True)
    )
    assert short == (plans, taken, preempted)
    assert preempted and len(taken) > 40


@pytest.mark.parametrize(
    "head_dim, options, capability, chosen",
    [
        (128, {}, (9, 0), {"attention_config": {"backend": "TRITON_ATTN"}}),
        (128, {"attention_backend": "FLASH_ATTN"}, (9, 0), {}),
        (128, {"kv_cache_dtype": "fp8"}, (9, 0), {}),
        (96, {}, (9, 0), {}),
        (128, {}, (8, 0), {}),
    ],
)
def test_triton_attends_where_it_was_measured_and_nobody_chose(head_dim, options, capability, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hf = transformers.Qwen3Config(head_dim=head_dim)
    assert vllm_engine.options_of_model(hf, options, torch.device("cuda")) == chosen
    assert vllm_engine.options_of_model(hf, options, torch.device("cpu")) == {}


def test_the_ranks_of_an_engine_do_not_add_up_by_kernels_that_need_a_compiler_and_multicast(monkeypatch):
    """vLLM fuses all-reduces with norms by FlashInfer, where nobody says otherwise, on Hopper and Blackwell."""
    from vllm import envs
    from vllm.config import CompilationConfig

    hf = transformers.Qwen3Config(head_dim=96)
    options = vllm_engine.options_of_model(hf, {}, torch.device("cuda"), tensor_parallel=2)
    assert CompilationConfig(**options["compilation_config"]).pass_config.fuse_allreduce_rms is False
    assert "compilation_config" not in vllm_engine.options_of_model(hf, {}, torch.device("cuda"))
    for name in ("VLLM_CACHE_ROOT", *vllm_engine.ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that it is as before after this test
        monkeypatch.delenv(name)
    vllm_engine._set_environment(torch.device("cuda", 0))
    assert not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    assert envs.VLLM_FLASHINFER_ALLREDUCE_BACKEND == "trtllm"


def test_kept_ids_on_a_gpu_need_the_model_runner_that_tells_them(monkeypatch):
    runner = SimpleNamespace(sampler=SimpleNamespace(sample=lambda: (1, "log-probs")))
    llm = SimpleNamespace(collective_rpc=lambda function: [function(SimpleNamespace(model_runner=runner))])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="model runner V1 .VLLM_USE_V2_MODEL_RUNNER=0.* leave them out"):
        shortcuts.sampler_of(llm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shortcuts.sampler_of(llm).sample() == (1, "log-probs")
    runner.sampler = SimpleNamespace(return_sampling_mask=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert shortcuts.sampler_of(llm) is runner.sampler


def test_a_step_in_flight_when_an_evaluation_ends_has_no_kept_ids(vllm_config):
    """On GPUs the step after a call's last token is read by the next call, which may be the first to ask for ids."""
    scheduler = scheduler_of(vllm_config, is_ahead=True, is_v2=True, caches=False)
    core = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    sampled = SampledTokens(SimpleNamespace(llm_engine=core), whole=True)
    sampled.sampler = SimpleNamespace(return_sampling_mask=False)

    def add(name: str) -> None:
        request = random_request(random.Random(0), name)
        request.max_tokens = 10
        scheduler.add_request(request)

    def schedule(name: str):
        """Schedule a step, which samples now: with ids if they were asked for."""
        plan = scheduler.schedule()
        return plan, sample(scheduler, plan, {name: 31}, seed=int(sampled.sampler.return_sampling_mask))

    add("held out")
    sampled.keep_ids(False)
    first = schedule("held out")
    in_flight = schedule("held out")
    first[1].sampled_token_ids = [[STOP]]
    assert scheduler.update_from_output(*first)[0].outputs[0].finish_reason is not None
    sampled.take("held out", version=0)

    add("training")
    sampled.keep_ids(True)
    ahead = schedule("training")
    scheduler.update_from_output(*in_flight)
    scheduler.update_from_output(*ahead)
    piece = sampled.take("training", version=0)
    assert [int(ids[0]) for ids in kept_of(piece)] == piece.ids_T.tolist()
    assert piece.num_tokens == 1

    plan = scheduler.schedule()
    output = sample(scheduler, plan, {"training": 31}, seed=0)  # an option that hides the ids
    with pytest.raises(RuntimeError, match="did not say which ids .* enable_batch_sharded_sampling"):
        scheduler.update_from_output(plan, output)


def scheduler_of(vllm_config, is_ahead: bool, is_v2: bool, caches: bool):
    """A scheduler of vLLM's own; is_ahead: as on GPUs. is_v2: for the runner that GPUs have."""
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
    kind = AsyncScheduler if is_ahead else Scheduler
    scheduler = kind(config, cache, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)
    scheduler.use_v2_model_runner = is_v2
    return scheduler


def run(scheduler, seed: int, is_short: bool):
    """What `scheduler` plans for a random load, what was taken of each request, and whom it preempted."""
    from vllm.v1.request import RequestStatus

    core = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    assert PlainSteps.fit(scheduler)
    with pytest.MonkeyPatch.context() as patch:
        if not is_short:
            patch.setattr(PlainSteps, "fit", lambda scheduler: False)
        sampled = SampledTokens(SimpleNamespace(llm_engine=core), whole=seed == 0 or scheduler.use_v2_model_runner)
    sampled.sampler = SimpleNamespace()
    sampled.keep_ids(seed > 0)
    draw, depth = random.Random(seed), 1 + scheduler.scheduler_config.async_scheduling
    plans, taken, preempted, in_flight, live, number = [], {}, [], [], [], 0
    preempt = scheduler._preempt_request

    def noted(request, *arguments, **options):
        preempted.append(request.request_id)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = noted
    scheduler.structured_output_manager.accept_tokens = lambda *_: True
    for step in range(5000):
        if step < 200 and draw.random() < 0.3:
            for _ in range(draw.randint(1, 4)):
                scheduler.add_request(request := random_request(draw, str(number)))
                live.append(request.request_id)
                number += 1
        if live and draw.random() < 0.05:
            live.remove(name := draw.choice(live))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            own = sampled.take(name, version=0)
            taken[name] = own.ids_T.tolist(), own.logprobs_T.tolist()
        if scheduler.has_requests():
            plan = scheduler.schedule()
            facts = facts_of(plan)
            plans.append(facts)
            if plan.total_num_scheduled_tokens:
                in_flight.append((plan, dict(facts["computed"])))
        if not in_flight or (len(in_flight) < depth and scheduler.has_unfinished_requests()):
            continue
        plan, computed = in_flight.pop(0)
        output = sample(scheduler, plan, computed, seed)
        for of_client in scheduler.update_from_output(plan, output).values():
            for ended in of_client.outputs:
                if ended.finish_reason is None:
                    continue
                live.remove(ended.request_id)
                own = sampled.take(ended.request_id, version=0)
                ids = own.ids_T.tolist()
                taken[ended.request_id] = ended.new_token_ids, ids, own.logprobs_T.tolist(), str(ended.finish_reason)
                kept = kept_of(own)
                assert [int(kept_ids[0]) for kept_ids in kept] == ids * (seed > 0)
                assert all(kept_ids[1:].tolist() == [*range(100, 100 + kept_ids[0] % 3), -1] for kept_ids in kept)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.reset_prefix_cache()  # which it does only if every block was given back
    return plans, taken, preempted


def kept_of(piece: Piece) -> list[torch.Tensor]:
    """Return the kept ids of each token, with the -1 at their end."""
    ends = (piece.kept_C < 0).nonzero().flatten() + 1
    return list(piece.kept_C.tensor_split(ends))[:-1]


def random_request(draw: random.Random, name: str):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    prompt = list(range(7, 7 + (50 if draw.random() < 0.1 else draw.randint(1, 10))))
    params = SamplingParams(max_tokens=draw.randint(1, MAX_TOKENS), stop_token_ids=[STOP], logprobs=0)
    params.update_from_generation_config({}, eos_token_id=STOP + 1)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request(name, prompt, params, None, block_hasher=hasher)
    if draw.random() < 0.1:
        request.structured_output_request = object()  # all of it that a plan depends on
    return request


def facts_of(plan) -> dict:
    new, cached = plan.scheduled_new_reqs, plan.scheduled_cached_reqs
    computed = [(request.req_id, request.num_computed_tokens) for request in new]
    return {
        "scheduled": (plan.num_scheduled_tokens, plan.total_num_scheduled_tokens),
        "computed": computed + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
        "blocks": ([request.block_ids for request in new], cached.new_block_ids),
        "sampled": cached.num_output_tokens,
        "resumed": (cached.resumed_req_ids, cached.all_token_ids),
        "finished": plan.finished_req_ids,
        "structured": (plan.has_structured_output_requests, plan.pending_structured_output_tokens),
    }


def sample(scheduler, plan, computed: dict[str, int], seed: int):
    """A model's output for a step: tokens and log-probs that depend on the request and its place alone.

    Each token is chosen from itself and up to two other ids, if they are asked for, as model runner V2 hands them out:
    some as ids, more than two as bits.
    """
    import vllm.v1.worker.gpu.sample.sampler  # noqa: F401
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    names, tokens, logprobs = list(plan.num_scheduled_tokens), [], []
    for name in names:
        rng, request = random.Random(f"{seed} {name} {computed[name]}"), scheduler.requests.get(name)
        samples = request is None or computed[name] + plan.num_scheduled_tokens[name] >= request.num_prompt_tokens
        tokens.append([rng.randint(STOP, 29)] if samples else [])
        logprobs.append([rng.random()])
    lists = LogprobsLists(np.zeros((len(names), 1)), np.array(logprobs), np.zeros(len(names)))
    output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens, lists)
    if seed > 0:
        is_kept = torch.zeros(len(names), 128, dtype=torch.int64)
        first_two = torch.zeros(len(names), 2, dtype=torch.int32)
        for row, ids in enumerate(tokens):
            kept = torch.tensor([*ids, *range(100, 100 + sum(ids) % 3)])
            is_kept[row, kept.long()] = 1
            first_two[row, : len(kept)] = kept[:2]
        bits = (is_kept.view(-1, 16, 8) << torch.arange(8)).sum(-1).to(torch.uint8)
        output.sampling_masks = SamplingMaskTensors(first_two, bits, is_kept.sum(-1), 128).tolists()
    return output
