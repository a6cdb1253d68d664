"""An engine's loop: completions begin at any time, are decoded together step by step, and are handed out as they end.

Each completion is a request of its own: vLLM hands out a request of several samples only when the last of them has
ended. Left out: which completions, with what parameters and until when; the generator decides that.
"""

import contextlib
import gc
import itertools
from collections.abc import Collection, Hashable, Iterator
from typing import Any

from grpo.roles.engine.shortcuts import SampledTokens
from grpo.types import Piece


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
        self._running: dict[str, tuple[str, Hashable]] = {}  # our own name -> vLLM's name and the request's number
        self.version = 0  # of the weights, which who loads them sets

    @property
    def num_running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def add(self, number: Hashable, ids: list[int], params: Any) -> None:
        """Begin to sample what follows `ids`, by vllm.SamplingParams, for the request of this number."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        name = next(self._names)
        prompt = {"type": "token", "prompt_token_ids": ids}  # vLLM renders nothing
        self._running[name] = self.engine.add_request(name, prompt, params), number

    def step(self) -> dict[Any, Piece]:
        """Decode one token of each running request, or prefill. Returns what was sampled for those that have ended.

        Raises RuntimeError for one that ended by an error of vLLM's: it is neither complete nor cut off at a limit.
        """
        ended = {}
        for output in self.engine.step():
            (sample,) = output.outputs
            if sample.finish_reason == "error":
                raise RuntimeError(
                    "vLLM ended a completion by an error, which the lines above name; if they speak of a grammar, what "
                    "generator.sampling excludes leaves structured_outputs no token: leave one of them out"
                )
            vllms_name, number = self._running.pop(output.request_id)
            ids = list(sample.token_ids)
            ended_by = "stop" if sample.finish_reason == "stop" else "tokens"
            piece = self.sampled_tokens.take(
                vllms_name,
                self.version,
                len(ids),
                ended_by,
            )
            if piece.ids_T.tolist() != ids or len(piece.logprobs_T) != len(ids):
                raise RuntimeError("log-probs and tokens do not belong together: SampledTokens is wrong")
            ended[number] = piece
        return ended

    def end(self, numbers: Collection[Hashable] | None = None) -> dict[Any, Piece]:
        """End all requests that run or wait, or those of these numbers. Returns what they have, in the order of `add`.

        On GPUs vLLM schedules ahead; tokens of the step in flight are lost.
        """
        ended = {}
        for name, (vllms_name, number) in self._running.items():
            if numbers is None or number in numbers:
                ended[name] = vllms_name, number
        self.engine.abort_request([vllms_name for vllms_name, _ in ended.values()], internal=True)
        for name in ended:
            del self._running[name]
        return {number: self.sampled_tokens.take(name, self.version) for name, number in ended.values()}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn Python's garbage collector off in this block: it would walk vLLM's object of each token again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
