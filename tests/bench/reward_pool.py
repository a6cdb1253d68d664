"""Seconds that the reward pool takes to start, for cheap calls, for loops and to close, of checkouts in turns.

    python tests/bench/reward_pool.py [CHECKOUT ...] [--rounds 5]

2 workers, math_reward and thinking_reward on 5,000 completions of 1.2 kB, twice, since the first time warms up; then 32
of 1,024 calls that loop for ever, with a deadline of 0.3 s on 4 workers, where 2.4 s is the least.
"""

import pathlib
import tempfile
import time

from in_turns import in_turns

FUNCTIONS = {"math_reward": 1.0, "thinking_reward": 0.2}
TEXT = "<think>" + "so many words " * 80 + "</think><answer>41</answer>"
LOOPS = "def loops(completions, **columns):\n    while completions[0] == 'loop':\n        pass\n    return [1.0]\n"


def measure() -> dict[str, float]:
    """Measure the checkout that comes first on the path."""
    import torch

    from grpo.config import RewardConfig
    from grpo.types import Prompt, Rollout

    try:
        from grpo.rewards.pool import RewardPool
        from grpo.types import Completion

        completion = Completion.of(torch.tensor([1]), torch.zeros(1), False)
    except ImportError:  # older checkouts
        from grpo.rewards.pool import RewardPool
        from grpo.types import Completion

        completion = Completion(torch.tensor([1]), torch.zeros(1), False)
    seconds = {}

    def timed(name: str, work):
        start = time.perf_counter()
        done = work()
        seconds[name] = time.perf_counter() - start
        return done

    def score(pool: RewardPool, texts: list[str]) -> list[Rollout]:
        pool.submit([Rollout(Prompt(0, [1], {"answer": "41"}), completion, text) for text in texts], 8)
        return pool.collect()

    pool = timed("start", lambda: RewardPool(RewardConfig(functions=FUNCTIONS, num_workers=2), 1024))
    for name in ("10,000 calls, first", "10,000 calls"):
        scored = timed(name, lambda: score(pool, [TEXT] * 5000))
        assert all(rollout.reward == 1.2 for rollout in scored)
    timed("close", pool.close)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "loops.py").write_text(LOOPS)
        config = RewardConfig(functions={f"{folder}/loops.py:loops": 1.0}, num_workers=4, timeout_seconds=0.3)
        pool = RewardPool(config, 1024)
        scored = timed("32 loops", lambda: score(pool, ["loop" if i % 32 == 0 else "" for i in range(1024)]))
        assert sum(bool(rollout.failures) for rollout in scored) == 32
        pool.close()
    return seconds


if __name__ == "__main__":
    in_turns(measure, __file__, __doc__, rounds=5)
