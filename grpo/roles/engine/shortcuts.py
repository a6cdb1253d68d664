"""What is changed of vLLM for speed: shortcuts through its scheduler, and kernels that are launched otherwise.

The scheduler visits each request in Python several times for each of its tokens, for which the GPU waits with hundreds
of sequences or a small model. The shortcut is for plain steps, in which every request decodes one token; all other
steps, and the requests of a step that end in it, go vLLM's own way. Left out: the loop over steps (loop.py), and
which engine gets which kernels (vllm_engine.py).
"""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# Of attention whose tiles were measured
WIDE_HEAD_DIM, WIDE_TILE = 128, 64


@dataclass(eq=False)
class Taken:
    """What one request has sampled so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class SampledTokens:
    """The tokens that an engine samples and their log-probs, taken before it makes objects of them.

    A third of a small model's sampling is what vLLM makes of its numbers: for each token of each request lists, a dict
    and an object of its log-prob, and another object for the engine's front. Here the numbers of a step are kept as
    they come from the sampler and handed out once, and a completion goes to the front once, when it has ended.
    """

    def __init__(self, llm: Any, whole: bool):
        """From now on the outputs of `llm` (vllm.LLM, in this process) have no log-probs of their own.

        whole: and there is one output for each completion, when it has ended.
        """
        self._by_request: dict[str, Taken] = defaultdict(Taken)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update_from_output = scheduler.update_from_output
        plain = PlainSteps(scheduler) if PlainSteps.fit(scheduler) else None

        def take_tokens(scheduled: Any, model_output: Any) -> Any:
            logprobs, model_output.logprobs = model_output.logprobs, None
            if logprobs is None:
                return update_from_output(scheduled, model_output)
            column, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
            if plain and whole:
                scheduled = plain.take(scheduled, model_output, column, self._by_request)
            outputs = update_from_output(scheduled, model_output)
            self._take(outputs, model_output.req_id_to_index, column, starts)
            if whole:
                self._hold_back(outputs)
            return outputs

        scheduler.update_from_output = take_tokens

    def _take(self, outputs: Any, row_of: dict[str, int], column: list[float], starts: list[int] | None) -> None:
        """Keep those that the scheduler accepted from this step, which may be fewer than it has."""
        for of_client in outputs.values():
            for output in of_client.outputs:
                row = row_of.get(output.request_id)
                if row is None:  # ended without a token
                    continue
                row = row if starts is None else starts[row]  # drafted tokens: several rows per request
                taken = self._by_request[output.request_id]
                taken.ids += output.new_token_ids
                taken.logprobs += column[row : row + len(output.new_token_ids)]

    def _hold_back(self, outputs: Any) -> None:
        """Leave only outputs of completions that have ended, with all of their tokens."""
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if output.finish_reason is not None]
            for output in of_client.outputs:
                output.new_token_ids = list(self._by_request[output.request_id].ids)

    def take(self, request: str) -> Taken:
        """What there is so far of the request that vLLM knows by this name; it is handed out once.

        There may be more than the completion has: those behind a stop text.
        """
        return self._by_request.pop(request, Taken())


class PlainSteps:
    """Schedules and takes the tokens of plain steps, with the effects that vLLM's scheduler would have.

    Full blocks are entered into the prefix cache up to one block later.
    """

    @staticmethod
    def fit(scheduler: Any) -> bool:
        """Whether `scheduler` decodes one token a step, into one table of blocks, with nothing else attached to it."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        manager, *others = scheduler.kv_cache_manager.coordinator.single_type_managers
        more = ("connector", "ec_connector", "aux_output_connector", "lora_config", "use_pp", "num_spec_tokens")
        more += ("defer_block_free", "needs_kv_cache_zeroing", "return_sampling_mask")
        return (
            type(scheduler) in (Scheduler, AsyncScheduler)
            and not others
            and type(manager) is FullAttentionManager
            and manager.block_size == manager.block_pool.hash_block_size
            and not any(getattr(scheduler, name) for name in more)
        )

    def __init__(self, scheduler: Any):
        """From now on `scheduler`, which must `fit`, schedules plain steps by this."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._scheduler, self._cache, self._pool = scheduler, scheduler.kv_cache_manager, manager.block_pool
        self._block_size, self._blocks_of = manager.block_size, manager.req_to_blocks
        self._cached_of = manager.num_cached_block
        # Tokens that are scheduled before their predecessor is known: vLLM then counts a placeholder for each
        self._ahead = int(type(scheduler) is AsyncScheduler)
        self._running = RequestStatus.RUNNING
        self._schedule, scheduler.schedule = scheduler.schedule, self.schedule

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One token for each running request, or what vLLM's own `schedule` would have."""
        scheduler = self._scheduler
        requests = self._decoding()
        if not requests:
            return self._schedule(throttle_prefills)
        running, most = scheduler.running, scheduler.max_num_active_reqs
        scheduler.running, scheduler.max_num_active_reqs = [], 0  # a step of nothing, with all that belongs to a step
        try:
            step = self._schedule(throttle_prefills)
        finally:
            scheduler.running, scheduler.max_num_active_reqs = running, most
        cached, names = step.scheduled_cached_reqs, []
        for request in requests:
            name, num_computed = request.request_id, request.num_computed_tokens
            names.append(name)
            cached.new_block_ids.append(self._new_blocks(request, name, num_computed + 1))
            cached.num_computed_tokens.append(num_computed)
            cached.num_output_tokens.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens = num_computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self._ahead
        cached.req_ids.extend(names)
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = dict.fromkeys(names, 1), len(names)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(names)
        return step

    def _decoding(self) -> list[Any]:
        """The requests of a plain step; none if the next step is not one."""
        scheduler, requests = self._scheduler, []
        running = scheduler.running
        waits = bool(scheduler.waiting or scheduler.kv_holding_waiting)
        if waits and len(running) < scheduler.max_num_active_reqs:
            return []
        if self._pool.get_num_free_blocks() < len(running):
            return []
        for request in running:
            ahead, num_computed = request.num_output_placeholders, request.num_computed_tokens
            if len(request._all_token_ids) + ahead - num_computed != 1 or request.structured_output_request is not None:
                return []
            # the step before may end a request, and one that must end with it gets no other
            ends = ahead and num_computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
            if not ends and num_computed + 1 < scheduler.max_model_len:
                requests.append(request)
        return requests

    def _new_blocks(self, request: Any, name: str, num_tokens: int) -> Any:
        """What a request of `num_tokens` tokens gets: in most steps none, which two comparisons tell."""
        fits = num_tokens <= len(self._blocks_of[name]) * self._block_size
        num_full = min(num_tokens, len(request._all_token_ids)) // self._block_size
        if fits and (num_full <= self._cached_of.get(name, 0) or not self._cache.enable_caching):
            return None
        return self._cache.allocate_slots(request, 1, num_lookahead_tokens=0).get_block_ids(allow_none=True)

    def take(self, scheduled: Any, model_output: Any, column: list[float], into: dict[str, Taken]) -> Any:
        """Take the tokens of requests that go on; returns the step with the others, for vLLM's own way.

        column: the sampled tokens' log-probs, a row for each request.
        """
        scheduler, rest = self._scheduler, {}
        tokens, row_of = model_output.sampled_token_ids, model_output.req_id_to_index
        for name, num_scheduled in scheduled.num_scheduled_tokens.items():
            request, row = scheduler.requests.get(name), row_of[name]
            if request is None or len(tokens[row]) != 1 or not self._goes_on(request, tokens[row][0]):
                rest[name] = num_scheduled
                continue
            request.num_in_flight_tokens -= num_scheduled
            request._output_token_ids.append(tokens[row][0])
            request._all_token_ids.append(tokens[row][0])
            if len(request._all_token_ids) % self._block_size == 0:
                request.update_block_hashes()
            request.num_output_placeholders -= self._ahead
            taken = into[name]
            taken.ids.append(tokens[row][0])
            taken.logprobs.append(column[row])
        scheduled = copy.copy(scheduled)
        scheduled.num_scheduled_tokens = rest
        return scheduled

    def _goes_on(self, request: Any, token: int) -> bool:
        """Whether a request needs nothing but this token and does not end with it."""
        params = request.sampling_params
        return (
            request.status is self._running
            and token != params.eos_token_id
            and token not in (params.stop_token_ids or ())
            and len(request._output_token_ids) + 1 < request.max_tokens
            and len(request._all_token_ids) + 1 < self._scheduler.max_model_len
            and request.structured_output_request is None
            and params.repetition_detection is None
        )


class Launch:
    """A Triton kernel that is launched with other options than its caller's; without a kernel not at all."""

    def __init__(self, kernel: Any, **options: Any):
        """options: in place of the caller's."""
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: Any) -> Any:
        if self._kernel is None:
            return lambda *arguments, **options: None
        return lambda *arguments, **options: self._kernel[grid](*arguments, **(options | self._options))


def widen_attention() -> None:
    """Have vLLM's triton attention read 64 keys at once, which on Hopper decodes faster than FlashAttention 3.

    For 128 sequences of 1,024 tokens a layer's attention takes 0.131 ms instead of 0.152, for 256 of 256 it takes 0.079
    instead of 0.114; with vLLM's own 32 keys the former takes 0.157 (16 query and 8 key heads, one H200).
    """
    from vllm.v1.attention.ops import triton_unified_attention as attention

    tile_of = attention._get_tile_size

    def wide_tile(head_size: int, sliding_window: int, element_size: int, is_prefill: bool) -> int:
        wide = head_size == WIDE_HEAD_DIM and element_size == 2 and is_prefill  # as vLLM calls whatever is not split
        return WIDE_TILE if wide else tile_of(head_size, sliding_window, element_size, is_prefill)

    attention._get_tile_size = wide_tile
    attention.kernel_unified_attention = Launch(attention.kernel_unified_attention, num_stages=2)


def widen_logprobs() -> None:
    """Have vLLM's GPU sampler read more logits at once for a log-prob, and leave out ranks, which nobody reads.

    128 sequences of 151,936 logits: 0.06 ms instead of 0.22, and 0.07 for the ranks (one H200).
    """
    import vllm.v1.worker.gpu.sample.sampler  # noqa: F401  (which imports the next one; alone it is a circle)
    from vllm.v1.worker.gpu.sample import logprob

    logprob._topk_log_softmax_kernel = Launch(logprob._topk_log_softmax_kernel, BLOCK_SIZE=16_384, num_warps=16)
    logprob._ranks_kernel = Launch(None)
