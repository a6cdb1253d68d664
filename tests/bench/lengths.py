"""Runs a program whose vLLM engine, in its own process, ends completions at lengths drawn beforehand.

    python tests/bench/lengths.py 700 4096 train_grpo.py RECIPE.py --generator.max-completion-tokens 4096 ...

700 is the median, 4,096 the longest, which must be the program's own limit. The scheduler gets each request's length
as its limit when it arrives, so any program gets the same: the length belongs to the prompt's tokens and to how many
completions it had before. Requests with another limit, such as a sync check's, keep theirs. The clock of a step has
nothing of it, and the program sees completions that reached their limit.
"""

import collections
import os
import random
import runpy
import sys

BETWEEN_PROMPTS = 0.6
WITHIN_GROUPS = 0.5


def main(median: str, longest: str, *program: str) -> None:
    force(int(median), int(longest))
    sys.argv = list(program)
    runpy.run_path(program[0], run_name="__main__")


def draw_length(prompt: str, completion: str, median: float, longest: int) -> int:
    """Draw the tokens of a completion: log-normal between prompts and within a group. The names alone decide."""
    of_prompt = median * random.Random(prompt).lognormvariate(0, BETWEEN_PROMPTS)
    return max(1, min(longest, round(of_prompt * random.Random(completion).lognormvariate(0, WITHIN_GROUPS))))


def force(median: int, longest: int) -> None:
    """Change vLLM's scheduler in this process: requests of at most `longest` tokens end as `draw_length` says."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.v1.core.sched.scheduler import Scheduler

    add_request = Scheduler.add_request
    num_begun = collections.Counter()

    def add_forced(self, request):
        if request.max_tokens == longest:
            prompt = f"prompt {request.prompt_token_ids}"
            request.max_tokens = draw_length(prompt, f"{prompt} {num_begun[prompt]}", median, longest)
            num_begun[prompt] += 1
        add_request(self, request)

    Scheduler.add_request = add_forced


if __name__ == "__main__":
    main(*sys.argv[1:])
