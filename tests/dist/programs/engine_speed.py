"""What one engine samples, as JSON lines of index, token ids, log-probs, truncated.

Arguments: FOLDER changed|unchanged OUTPUT. With `unchanged` tokens and log-probs are those of vLLM's own outputs. The
KV cache holds a part of the sequences, so that some are preempted; their number is printed.
"""

import json
import pathlib
import sys

from grpo.config import DataConfig, GeneratorConfig, GRPOConfig, ModelConfig, RolesConfig
from grpo.roles.engine import generator as generator_module
from grpo.roles.engine.vllm_engine import CPU_BLOCK_TOKENS
from grpo.roles.process_groups import close_roles, setup_roles
from grpo.types import Piece, Prompt, Requests

STOP_TOKENS = [1]  # of about 20, so that lengths differ
CACHED_SEQUENCES, BYTES_PER_TOKEN = 3, 1024  # of a tiny model in float32


class PlainLoop:
    """Requests as vLLM itself answers them."""

    def __init__(self, llm, reads_texts: bool):
        self.engine, self.requests = llm.llm_engine, {}

    @property
    def num_running(self) -> int:
        return len(self.requests)

    def add(self, request: int, ids: list[int], params) -> None:
        self.requests[str(request)] = request
        self.engine.add_request(str(request), {"type": "token", "prompt_token_ids": ids}, params)

    def step(self) -> dict[int, Piece]:
        ended = {}
        for output in self.engine.step():
            if output.finished:
                (sample,) = output.outputs
                ids = list(sample.token_ids)
                logprobs = [at[token].logprob for at, token in zip(sample.logprobs, ids, strict=True)]
                ended_by = "stop" if sample.finish_reason == "stop" else "tokens"
                number = self.requests.pop(output.request_id)
                ended[number] = Piece.sampled(ids, logprobs, self.version, ended_by=ended_by)
        return ended

    def end(self) -> dict[int, Piece]:
        assert not self.requests
        return {}


def main(folder: str, how: str, output: str) -> None:
    if how == "unchanged":
        generator_module.EngineLoop = PlainLoop
    config = GRPOConfig(
        roles=RolesConfig(colocated=True, num_trainers=1),
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(max_prompt_tokens=32),
        generator=GeneratorConfig(
            max_completion_tokens=96,
            temperature=(1.0, 0.8),
            engine={"max_num_seqs": 16, "kv_cache_memory_bytes": CACHED_SEQUENCES * 128 * BYTES_PER_TOKEN},
        ),
    )
    roles = setup_roles(config.roles, config.needs_reference, config.generator.tensor_parallel)
    generator = generator_module.Generator(
        config.generator, config.model, config.data, config.seed, folder, STOP_TOKENS, roles
    )
    num_preempted, scheduler = 0, generator.llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counted(*arguments, **options):
        nonlocal num_preempted
        num_preempted += 1
        return preempt(*arguments, **options)

    scheduler._preempt_request = counted
    prompts = [Prompt(index, [5, 6, 7, 8 + index % 5] * (1 + index % 6)) for index in range(12)]
    lines = []
    for max_tokens in (None, CPU_BLOCK_TOKENS, 1):
        completions = generator.generate(Requests(prompts), 4, max_tokens=max_tokens)
        lines += [[c.index, c.ids_T.tolist(), c.logprobs_T.tolist(), c.truncated] for c in completions]
        generator.forget_prefixes()  # raises if blocks were not given back
    pathlib.Path(output).write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{num_preempted} preempted", flush=True)
    close_roles(roles, generator.close)


if __name__ == "__main__":
    main(*sys.argv[1:])
