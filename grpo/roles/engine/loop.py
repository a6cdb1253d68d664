"""An engine's loop: completions are begun at any time, decoded together step by step, and handed out as they end.

One request for each completion: one of several samples would be handed out when the last of them has ended. Left out:
which completions, with what parameters and until when, which is the generator's.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.roles.engine.shortcuts import SampledTokens, Taken
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

    def _routes_of(self, taken: Taken, num_new: int, num_sampled: int) -> torch.Tensor | None:
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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector off: vLLM makes an object per token, and it would walk them all again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
