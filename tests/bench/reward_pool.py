"""Calls per second of the reward pool, and what loops cost: 1024 completions, math_reward and thinking_reward.

    python tests/bench/reward_pool.py [NUM_WORKERS ...]

Prints median, lowest and highest of 7 rounds after a first one, and the same for the functions called in this process.
"""

import pathlib
import statistics
import sys
import tempfile
import time

import torch

from grpo.config import RewardConfig
from grpo.rewards.loading import load_functions
from grpo.rewards.workers.pool import RewardPool
from grpo.types import Completion, Prompt, Rollout

FUNCTIONS = {"math_reward": 1.0, "thinking_reward": 0.2}
TEXT = "<think>" + "so many words " * 80 + "</think><answer>41</answer>"  # 1.2 kB
ROLLOUTS = [
    Rollout(Prompt(0, [1], {"answer": "41"}), Completion.of(torch.tensor([1]), torch.zeros(1), False), TEXT)
] * 1024
NUM_ROUNDS = 7
LOOPS = "def loops(completions, **columns):\n    while completions[0] == 'loop':\n        pass\n    return [1.0]\n"


def main(numbers: list[int]) -> None:
    functions = load_functions(RewardConfig(functions=FUNCTIONS))
    columns = {"answer": ["41"], "num_tokens": [1], "truncated": [False]}
    show("in this process", lambda: [f([TEXT], **columns) for _ in ROLLOUTS for f, _ in functions.values()])
    for num_workers in numbers:
        pool = RewardPool(RewardConfig(functions=FUNCTIONS, num_workers=num_workers), 1024)
        show(f"{num_workers} workers", lambda pool=pool: score(pool, ROLLOUTS))
        pool.close()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "loops.py").write_text(LOOPS)
        config = RewardConfig(functions={f"{folder}/loops.py:loops": 1.0}, num_workers=4, timeout_seconds=0.3)
        pool = RewardPool(config, 1024)
        looping = [Rollout(r.prompt, r.completion, "loop" if i % 32 == 0 else "") for i, r in enumerate(ROLLOUTS)]
        start = time.perf_counter()
        failed = sum(bool(r.failures) for r in score(pool, looping))
        seconds = time.perf_counter() - start
        print(f"{failed} of 1024 loop, 0.3 s each on 4 workers (2.4 s at best): {seconds:.2f} s")
        pool.close()


def score(pool: RewardPool, rollouts: list[Rollout]) -> list[Rollout]:
    pool.submit(rollouts, 8)
    return pool.collect()


def show(name: str, work) -> None:
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    median, lowest, highest = statistics.median(seconds[1:]), min(seconds[1:]), max(seconds[1:])
    rate = 2 * len(ROLLOUTS) / median
    print(f"{name}: {median:.3f} s ({lowest:.3f} to {highest:.3f}), {rate:,.0f} calls per second")


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or [1, 2, 4])
