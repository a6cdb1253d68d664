"""Additions from a teacher alone: on-policy distillation, without a reward, of toy_arithmetic's end into its start.

    torchrun --nproc_per_node=4 train_grpo.py configs/toy_distill.py

The student is what `train_sft.py configs/toy_sft.py` leaves, the teacher what `train_grpo.py configs/toy_arithmetic.py`
leaves.
The reward function has weight 0, so it measures accuracy and teaches nothing. One completion per prompt is enough,
because nothing is compared within a group; 256 prompts are as many completions as the 32 x 8 of toy_arithmetic.py.
"""

from grpo import config as c
from grpo.config import change

config = change(
    "toy_arithmetic.py",
    {
        "model.reference_path": "runs/toy_arithmetic/model",
        "reward": c.RewardConfig(functions={"math_reward": 0.0}),
        "algorithm": c.AlgorithmConfig(loss="reinforce", distill_coef=1.0),
        "trainer.learning_rate": 5e-4,
        "run_dir": "runs/toy_distill",
        "prompts_per_step": 256,
        "group_size": 1,
    },
)
