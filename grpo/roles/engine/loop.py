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

from grpo.roles.engine.shortcuts import SampledTokens


@dataclass(frozen=True, eq=False)
class Stretch:
    """What an engine sampled for one request."""

    request: Any
    """What `EngineLoop.add` was given."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = "abort"
    """vLLM's finish reason: `stop`, `length`, or `abort` where it was ended from outside."""


class EngineLoop:
    """The requests that one engine is working on.

    All ranks of a replica make the same calls in the same order. An exception in here is fatal for the rank, because
    vLLM keeps the requests that it has.
    """

    def __init__(self, llm: Any, reads_texts: bool):
        """llm: a vllm.LLM in this process. reads_texts: for stop texts, vLLM must see each token."""
        self.engine = llm.llm_engine
        self.sampled_tokens = SampledTokens(llm, whole=not reads_texts)
        self._names = map(str, itertools.count())  # never twice: outputs of equal names could not be told apart
        # by our own name: vLLM's, and the request
        self._running: dict[str, tuple[str, Any]] = {}

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def add(self, request: Any, ids: list[int], params: Any) -> None:
        """Begin to sample behind `ids` as vllm.SamplingParams say."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        name, prompt = next(self._names), {"type": "token", "prompt_token_ids": ids}  # rendered already
        self._running[name] = self.engine.add_request(name, prompt, params), request

    def step(self) -> list[Stretch]:
        """Decode one token of each running request, or prefill; returns those that have ended."""
        ended = []
        for output in self.engine.step():
            (sample,) = output.outputs
            vllms_name, request = self._running.pop(output.request_id)
            ids, taken = list(sample.token_ids), self.sampled_tokens.take(vllms_name)
            logprobs = taken.logprobs[: len(ids)]  # it has more: what stands behind a stop text
            if taken.ids[: len(ids)] != ids or len(logprobs) != len(ids):
                raise RuntimeError("log-probs and tokens do not belong together: SampledTokens is wrong")
            ended.append(Stretch(request, ids, logprobs, sample.finish_reason))
        return ended

    def end(self) -> list[Stretch]:
        """End all requests that run or wait; returns what they have so far, maybe nothing, in the order of `add`.

        Where vLLM schedules ahead (on GPUs), the step that is computed meanwhile gives them nothing.
        """
        self.engine.abort_request([vllms_name for vllms_name, _ in self._running.values()], internal=True)
        stretches = []
        for vllms_name, request in self._running.values():
            taken = self.sampled_tokens.take(vllms_name)
            stretches.append(Stretch(request, taken.ids, taken.logprobs))
        self._running.clear()
        return stretches


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector off: vLLM makes an object per token, and it would walk them all again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
