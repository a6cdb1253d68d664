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

from grpo.roles.engine.shortcuts import SampledTokens


@dataclass(frozen=True, eq=False)
class Stretch:
    """What an engine sampled for one request."""

    request: Any
    """The first argument of `EngineLoop.add`."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = "abort"
    """vLLM's finish reason: `stop`, `length`, or `abort` if `EngineLoop.end` ended it."""
    kept: list[np.ndarray] = field(default_factory=list)
    """As in `Piece.sampled`."""


class EngineLoop:
    """The requests that one engine is working on.

    All ranks of a replica make the same calls in the same order. An exception in here is fatal for the rank, because
    vLLM keeps the requests that it has.
    """

    def __init__(self, llm: Any, reads_texts: bool):
        """Take over `llm`, a vllm.LLM in this process. reads_texts: vLLM must see each token, to find stop texts."""
        self.engine = llm.llm_engine
        self.sampled_tokens = SampledTokens(llm, whole=not reads_texts)
        self._names = map(str, itertools.count())  # unique, because outputs are told apart by them
        self._running: dict[str, tuple[str, Any]] = {}  # our own name -> vLLM's name and the request

    @property
    def num_running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def add(self, request: Any, ids: list[int], params: Any) -> None:
        """Begin to sample what follows `ids`, by vllm.SamplingParams."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        name = next(self._names)
        prompt = {"type": "token", "prompt_token_ids": ids}  # vLLM renders nothing
        self._running[name] = self.engine.add_request(name, prompt, params), request

    def step(self) -> list[Stretch]:
        """Decode one token of each running request, or prefill. Returns the requests that have ended.

        Raises RuntimeError for one that ended by an error of vLLM's: it is neither complete nor cut off at a limit.
        """
        ended = []
        for output in self.engine.step():
            (sample,) = output.outputs
            if sample.finish_reason == "error":
                raise RuntimeError(
                    "vLLM ended a completion by an error, which the lines above name; if they speak of a grammar, what "
                    "generator.sampling excludes leaves structured_outputs no token: leave one of them out"
                )
            vllms_name, request = self._running.pop(output.request_id)
            ids = list(sample.token_ids)
            tokens = self.sampled_tokens.take(vllms_name)
            logprobs = tokens.logprobs[: len(ids)]  # it may have more, behind a stop text
            if tokens.ids[: len(ids)] != ids or len(logprobs) != len(ids):
                raise RuntimeError("log-probs and tokens do not belong together: SampledTokens is wrong")
            ended.append(Stretch(request, ids, logprobs, sample.finish_reason, tokens.kept[: len(ids)]))
        return ended

    def end(self) -> list[Stretch]:
        """End all requests that run or wait. Returns what they have so far, maybe nothing, in the order of `add`.

        On GPUs vLLM schedules ahead; tokens of the step in flight are lost.
        """
        self.engine.abort_request([vllms_name for vllms_name, _ in self._running.values()], internal=True)
        stretches = []
        for vllms_name, request in self._running.values():
            tokens = self.sampled_tokens.take(vllms_name)
            stretches.append(Stretch(request, tokens.ids, tokens.logprobs, kept=tokens.kept))
        self._running.clear()
        return stretches


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn Python's garbage collector off in this block: it would walk vLLM's object of each token again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
