"""The default recipe with DAPO (Yu et al. 2025, arXiv:2503.14476) in place of GRPO: one node of 8 GPUs.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_1_7b_gsm8k_dapo.py

Everything of the paper is on: the mean over tokens and the wider clip from above, which the loss brings along; dynamic
sampling; and the penalty for completions that come near the longest one. With four mini-batches the policy moves within
a step, so that there is something to clip. Layout and memory are those of qwen3_1_7b_gsm8k.py. It runs in
the tests in small, and has not been run at its size.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "reward.functions": {"math_reward": 1.0, "thinking_reward": 0.2, "overlong_penalty": 1.0},
        "algorithm.loss": "dapo",
        "algorithm.num_mini_batches": 4,
        "sampling.dynamic": True,
        "run_dir": "runs/qwen3_1_7b_gsm8k_dapo",
    },
)
