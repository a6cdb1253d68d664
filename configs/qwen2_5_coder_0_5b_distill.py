"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K from the 1.5B: on-policy distillation, every role on one GPU.

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_distill.py

The student samples, and the teacher says of every token how much likelier it finds it than the student did. The reward
has weight 0: it measures and teaches nothing. A folder of the teacher is `--model.reference-path`.

What to expect, weights from files of 5 and 4 bits, two runs: greedy accuracy on all 1,319 held-out questions (standard
error 0.013) rises from 0.259 to 0.32 after 25 steps and 0.33 after 50; the teacher has 0.573. GRPO has 0.32 to 0.34
and 0.37 to 0.39 after as many completions. A step takes 12 to 13 s on an H200 beside other runs: 512 prompts, none
shared, so 50 steps take about 13 minutes with the start.

Memory: as in qwen2_5_coder_0_5b_gsm8k.py, and 2.9 GiB for the teacher.
"""

from grpo import config as c
from grpo.config import change

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "model.reference_path": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "reward.functions": {"math_reward": 0.0},
        "algorithm": c.AlgorithmConfig(loss="reinforce", distill_coef=1.0),
        "run_dir": "runs/qwen2_5_coder_0_5b_distill",
        "num_steps": 50,
        "prompts_per_step": 512,
        "group_size": 1,
    },
)
