"""An engine's loop: completions begin at any time, are decoded together step by step, and are handed out as they end.

Each completion is a request of its own: vLLM hands out a request of several samples only when the last of them has
ended. Left out: which completions, with what parameters and until when; the generator decides that.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.roles.engine.shortcuts import RequestTokens, SampledTokens
from grpo.roles.engine_routes import Routes


@dataclass(frozen=True, eq=False)
class Stretch:
    """What an engine sampled for one request."""

    request: Any
    """The first argument of `EngineLoop.add`."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = "abort"
    """vLLM's finish reason: `stop`, `length`, or `abort` if `EngineLoop.end` ended it."""
    routes_TLE: torch.Tensor | None = None
    """uint8: experts with which the engine predicted these tokens and, before them, the ones that were not fed before
    (all but the first of a prompt); None for dense models and where nobody asks."""


class EngineLoop:
    """The requests that one engine is working on.

    All ranks of a replica make the same calls in the same order. An exception in here is fatal for the rank, because
    vLLM keeps the requests that it has.
    """

    def __init__(self, llm: Any, reads_texts: bool, routes: Routes | None = None):
        """Take over `llm`, a vllm.LLM in this process. reads_texts: vLLM must see each token, to find stop texts."""
        self.engine = llm.llm_engine
        self.routes = routes
        self.sampled_tokens = SampledTokens(llm, whole=not reads_texts, routes=routes)
        self._names = map(str, itertools.count())  # unique, because outputs are told apart by them
        # our own name -> vLLM's name, the request, and how many of its last tokens have no routes yet
        self._running: dict[str, tuple[str, Any, int]] = {}

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def add(self, request: Any, ids: list[int], params: Any, num_fed: int = 0) -> None:
        """Begin to sample what follows `ids`, by vllm.SamplingParams. The first `num_fed` of the ids have routes."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        name = next(self._names)
        prompt = {"type": "token", "prompt_token_ids": ids}  # vLLM renders nothing
        num_new = len(ids) - max(num_fed, 1)  # nothing predicts the first one
        if self.routes:
            params.routed_experts_prompt_start = len(ids) - 1 - num_new
        self._running[name] = self.engine.add_request(name, prompt, params), request, num_new

    def step(self) -> list[Stretch]:
        """Decode one token of each running request, or prefill. Returns the requests that have ended."""
        ended = []
        for output in self.engine.step():
            (sample,) = output.outputs
            vllms_name, request, num_new = self._running.pop(output.request_id)
            ids = list(sample.token_ids)
            tokens = self.sampled_tokens.take(vllms_name)
            logprobs = tokens.logprobs[: len(ids)]  # it may have more, behind a stop text
            if tokens.ids[: len(ids)] != ids or len(logprobs) != len(ids):
                raise RuntimeError("log-probs and tokens do not belong together: SampledTokens is wrong")
            routes = self._routes_of(tokens, num_new, len(ids))
            ended.append(Stretch(request, ids, logprobs, sample.finish_reason, routes))
        return ended

    def _routes_of(self, tokens: RequestTokens, num_new: int, num_sampled: int) -> torch.Tensor | None:
        """Return `Stretch.routes_TLE`: the experts of a prompt's last `num_new` tokens and `num_sampled` more."""
        if self.routes is None:
            return None
        if not tokens.ids:  # ended before its first token
            return self.routes.nothing
        rows = torch.from_numpy(np.concatenate(tokens.routes))
        rows = rows[len(rows) - num_new - len(tokens.ids) :][: num_new + num_sampled]
        if len(rows) != num_new + num_sampled:
            raise RuntimeError(f"{len(rows)} routes for {num_new} + {num_sampled} tokens: Routes is wrong")
        return rows

    def end(self) -> list[Stretch]:
        """End all requests that run or wait. Returns what they have so far, maybe nothing, in the order of `add`.

        On GPUs vLLM schedules ahead; tokens of the step in flight are lost.
        """
        self.engine.abort_request([vllms_name for vllms_name, *_ in self._running.values()], internal=True)
        stretches = []
        for vllms_name, request, num_new in self._running.values():
            tokens = self.sampled_tokens.take(vllms_name)
            routes = self._routes_of(tokens, num_new, len(tokens.ids))
            stretches.append(Stretch(request, tokens.ids, tokens.logprobs, routes_TLE=routes))
        self._running.clear()
        return stretches

    def settle(self) -> None:
        """Wait for the step that vLLM may have begun ahead, once all requests have ended. It samples nothing.

        vLLM raises an error if the routes of that step arrive after the next reset of the prefix cache.
        """
        while self.engine.engine_core.engine_core.batch_queue:
            self.engine.step()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn Python's garbage collector off in this block: it would walk vLLM's object of each token again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
