"""Qwen2.5-Coder-0.5B-Instruct learns three tasks of reasoning-gym at once: every role on one GPU.

    pip install reasoning-gym
    python configs/examples/reasoning_gym_rows.py data/reasoning_gym spell_backward letter_counting chain_sum
    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_reasoning_gym.py

A task's own verifier is the reward. Other tasks: the names in `TASKS`, here and on the command line of the second line.
"""

from grpo import config as c
from grpo.config import change

TASKS = ("spell_backward", "letter_counting", "chain_sum")

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data": c.DataConfig(
            sources={task: f"data/reasoning_gym/{task}_train.jsonl" for task in TASKS},
            system_prompt="Think step by step, then write the final answer alone inside <answer> and </answer>.",
            answer_column="",
            columns={"entry": "entry"},
        ),
        "reward": c.RewardConfig(functions={"configs/examples/reasoning_gym_rows.py:verified": 1.0}),
        "generator.max_completion_tokens": 256,
        "evaluation": c.EvaluationConfig(
            sets={task: f"data/reasoning_gym/{task}_test.jsonl" for task in TASKS}, interval=20, num_prompts=200
        ),
        "run_dir": "runs/qwen2_5_coder_0_5b_reasoning_gym",
    },
)
