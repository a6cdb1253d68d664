"""Qwen2.5-Coder-0.5B-Instruct learns three tasks of reasoning-gym at once: every role on one GPU.

    pip install reasoning-gym
    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_reasoning_gym.py

Each task's own verifier is the reward. For other tasks change `TASKS` and the functions in
configs/examples/reasoning_gym_rows.py.

What to expect, weights from a 5-bit file: before training 0.16, 0.05 and 0.05 of 200 held-out prompts each are right
(greedy). Many answers stand in a box in place of the tag, others are wrong. The mean reward of samples rises from 0.10
in steps 1 to 5 to 0.53 in steps 21 to 30 (0.76, 0.29 and 0.50 by task) and is 0.54 in steps 51 to 60. A step takes 5 s
on an H200 beside three other runs. Accuracy after 100 steps is not measured yet. Many of the hundred tasks are too hard
for this model: within 160 tokens none of 16 was right of letter_counting, gcd, number_filtering, family_relationships
and spell_backward.
"""

from grpo import config as c
from grpo.config import change

ROWS = "configs/examples/reasoning_gym_rows.py"
TASKS = ("chain_sum", "basic_arithmetic", "simple_equations")

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data": c.DataConfig(
            sources={task: f"{ROWS}:{task}" for task in TASKS},
            system_prompt="Think step by step, then write the final answer alone inside <answer> and </answer>.",
            answer_column="",
            columns={"entry": "entry"},
        ),
        "reward": c.RewardConfig(functions={f"{ROWS}:verified": 1.0}),
        "generator.max_completion_tokens": 256,
        "evaluation": c.EvaluationConfig(sets={task: f"{ROWS}:{task}" for task in TASKS}, interval=20, num_prompts=200),
        "run_dir": "runs/qwen2_5_coder_0_5b_reasoning_gym",
    },
)
