"""An engine's loop: completions are begun at any time, decoded together step by step, and handed out as they end.

One request for each completion: one of several samples would be handed out when the last of them has ended. Left out:
which completions, with what parameters and until when, which is the generator's.
"""

import contextlib
import gc
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.roles.engine_routes import Routes


@dataclass(frozen=True, eq=False)
class Stretch:
    """What an engine sampled for one request."""

    request: Any
    """What `EngineLoop.add` was given."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = "abort"
    """vLLM's finish reason: `stop`, `length`, or `abort` where it was ended from outside."""
    routes_TLE: torch.Tensor | None = None
    """uint8: experts with which the engine predicted these tokens and, before them, the ones that were not fed before
    (all but the first of a prompt); None for dense models and where nobody asks."""


class EngineLoop:
    """The requests that one engine is working on.

    All ranks of a replica make the same calls in the same order. An exception in here is fatal for the rank, because
    vLLM keeps the requests that it has.
    """

    def __init__(self, llm: Any, reads_texts: bool, routes: Routes | None = None):
        """llm: a vllm.LLM in this process. reads_texts: for stop texts, vLLM must see each token."""
        skip_settled_slots(llm)
        self.engine, self.routes = llm.llm_engine, routes
        self.sampled_tokens = SampledTokens(llm, whole=not reads_texts, routes=routes)
        self._names = map(str, itertools.count())  # never twice: outputs of equal names could not be told apart
        # by our own name: vLLM's, the request, and how many of its last tokens have no routes yet
        self._running: dict[str, tuple[str, Any, int]] = {}

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def add(self, request: Any, ids: list[int], params: Any, num_fed: int = 0) -> None:
        """Begin to sample behind `ids`, the first `num_fed` of which have routes, as vllm.SamplingParams say."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        name, prompt = next(self._names), {"type": "token", "prompt_token_ids": ids}  # rendered already
        num_new = len(ids) - max(num_fed, 1)  # nothing predicts the first one
        if self.routes:
            params.routed_experts_prompt_start = len(ids) - 1 - num_new
        self._running[name] = self.engine.add_request(name, prompt, params), request, num_new

    def step(self) -> list[Stretch]:
        """Decode one token of each running request, or prefill; returns those that have ended."""
        ended = []
        for output in self.engine.step():
            (sample,) = output.outputs
            vllms_name, request, num_new = self._running.pop(output.request_id)
            ids, taken = list(sample.token_ids), self.sampled_tokens.take(vllms_name)
            logprobs = taken.logprobs[: len(ids)]  # it has more: what stands behind a stop text
            if taken.ids[: len(ids)] != ids or len(logprobs) != len(ids):
                raise RuntimeError("log-probs and tokens do not belong together: SampledTokens is wrong")
            routes = self._routes_of(taken, num_new, len(ids))
            ended.append(Stretch(request, ids, logprobs, sample.finish_reason, routes))
        return ended

    def _routes_of(self, taken: "Taken", num_new: int, num_sampled: int) -> torch.Tensor | None:
        """`Stretch.routes_TLE` of a request whose last `num_new` tokens and `num_sampled` behind them had none."""
        if self.routes is None:
            return None
        if not taken.ids:  # ended before its first token
            return self.routes.nothing
        rows = torch.from_numpy(np.concatenate(taken.routes))
        rows = rows[len(rows) - num_new - len(taken.ids) :][: num_new + num_sampled]
        if len(rows) != num_new + num_sampled:
            raise RuntimeError(f"{len(rows)} routes for {num_new} + {num_sampled} tokens: Routes is wrong")
        return rows

    def end(self) -> list[Stretch]:
        """End all requests that run or wait; returns what they have so far, maybe nothing, in the order of `add`.

        Where vLLM schedules ahead (on GPUs), the step that is computed meanwhile gives them nothing.
        """
        self.engine.abort_request([vllms_name for vllms_name, *_ in self._running.values()], internal=True)
        stretches = []
        for vllms_name, request, num_new in self._running.values():
            taken = self.sampled_tokens.take(vllms_name)
            routes = self._routes_of(taken, num_new, len(taken.ids))
            stretches.append(Stretch(request, taken.ids, taken.logprobs, routes_TLE=routes))
        self._running.clear()
        return stretches

    def settle(self) -> None:
        """Wait for the step that vLLM may have begun ahead, when all requests have ended; it gives nothing.

        If its routes came after the next reset of the prefix cache, vLLM would take it for an error.
        """
        while self.engine.engine_core.engine_core.batch_queue:
            self.engine.step()


@dataclass(eq=False)
class Taken:
    """What one request has sampled so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)
    """Rows as `Routes` has them, step after step."""


class SampledTokens:
    """The tokens that an engine samples and their log-probs, taken before it makes objects of them.

    A third of a small model's sampling is what vLLM makes of its numbers: for each token of each request lists, a dict
    and an object of its log-prob, and another object for the engine's front. Here the numbers of a step are kept as
    they come from the sampler and handed out once, and a completion goes to the front once, when it has ended. What
    gave less than 5 % of the sampling of a model of 1.7B parameters is left as it is.
    """

    def __init__(self, llm: Any, whole: bool, routes: Routes | None = None):
        """From now on the outputs of `llm` (vllm.LLM, in this process) have no log-probs of their own.

        whole: and there is one output for each completion, when it has ended. routes: take these too.
        """
        self._by_request: dict[str, Taken] = defaultdict(Taken)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update_from_output = scheduler.update_from_output

        def take_tokens(scheduler_output: Any, model_output: Any) -> Any:
            logprobs, model_output.logprobs = model_output.logprobs, None
            if logprobs is None:
                return update_from_output(scheduler_output, model_output)
            column, starts = logprobs.logprobs[:, 0].tolist(), logprobs.cu_num_generated_tokens
            outputs = update_from_output(scheduler_output, model_output)
            rows = routes.of_step(scheduler_output, model_output, outputs) if routes else {}
            self._take(outputs, model_output.req_id_to_index, column, starts, rows)
            if whole:
                self._hold_back(outputs)
            return outputs

        scheduler.update_from_output = take_tokens

    def _take(
        self,
        outputs: Any,
        row_of: dict[str, int],
        column: list[float],
        starts: list[int] | None,
        routes: dict[str, Any],
    ) -> None:
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
                if output.request_id in routes:
                    taken.routes.append(routes[output.request_id])

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


def skip_settled_slots(llm: Any) -> None:
    """Answer without the KV cache's managers where a decoding request needs no block and fills none.

    For each of these tokens the scheduler asks whether a block must be allocated or has become full, which two
    comparisons tell. A fast host asks while the GPU computes; a slow one keeps it waiting: 256 sequences of a model of
    1.7B parameters took 1.24 times as long. This holds for models whose layers are all of full attention, with one
    block table; others are left alone. Full blocks are then entered into the prefix cache up to one block later.
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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector off: vLLM makes an object per token, and it would walk them all again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
