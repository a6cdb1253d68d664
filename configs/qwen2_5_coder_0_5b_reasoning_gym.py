"""Qwen2.5-Coder-0.5B-Instruct learns three tasks of reasoning-gym at once: every role on one GPU.

    pip install reasoning-gym
    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_reasoning_gym.py

Full marks of each task's own verifier are the reward. For other tasks change `TASKS` and the functions in
configs/examples/reasoning_gym_rows.py.

What to expect, weights from a 5-bit file, one seed: before training 0.16, 0.05 and 0.05 of 200 held-out prompts each
are right (greedy). Many answers stand in a box in place of the tag, others are wrong. After 20 steps 0.80, 0.26 and
0.43 are right, after 40 steps 0.89, 0.42 and 0.57, and after 100 steps 0.83, 0.43 and 0.53 (standard error 0.03): 40
steps are enough. That run also paid the parts of marks that verifiers give to some wrong answers, which 0 to 2.8 % of a
recorded step's completions got; right are full marks alone. 10 minutes on an H200 beside two to four other runs, 4.5 s
a step. Many of the hundred tasks are too hard for this model: within 160 tokens none of 16 was right of
letter_counting, gcd, number_filtering, family_relationships and spell_backward.
"""

from grpo import config as c
from grpo.config import change

ROWS = "configs/examples/reasoning_gym_rows.py"
TASKS = ("chain_sum", "basic_arithmetic", "simple_equations")

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data": c.DataConfig(
            path={task: f"{ROWS}:{task}" for task in TASKS},
            system_prompt="Think step by step, then write the final answer alone inside <answer> and </answer>.",
            answer_column="",
            columns={"entry": "entry"},
        ),
        "reward": c.RewardConfig(functions={f"{ROWS}:verified": 1.0}),
        "generator.max_completion_tokens": 256,
        "evaluation": c.EvaluationConfig(path={task: f"{ROWS}:{task}" for task in TASKS}, interval=20, num_prompts=200),
        "run_dir": "runs/qwen2_5_coder_0_5b_reasoning_gym",
    },
)
