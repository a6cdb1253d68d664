"""Qwen3-1.7B learns GSM8K's word problems from Qwen3-8B: on-policy distillation, without a reward, 8 GPUs.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_1_7b_distill.py

The student samples, the teacher says of every sampled token how much likelier it finds it than the student did. The
reward functions have weight 0: they measure and teach nothing. For both, give one a weight and raise group_size.

Layout: 2 trainer ranks (FSDP), 2 reference ranks that each hold the teacher, 4 generator ranks.

Memory per trainer: float32 weights, gradients and Adam's two moments are 16 bytes per parameter, 1.7e9 x 16 / 2 ranks =
13 GiB; on top the activations of a micro-batch of 16384 tokens and the logits of 4096 (2.3 GiB per float32 copy). Per
reference: 2 x 8.2e9 = 15.3 GiB of bfloat16 weights and the same logits. Per generator: 3.2 GiB of weights, the rest
of the 85 % is KV cache. An estimate for GPUs of 80 GB; it has run in small only.
"""

from grpo import config as c
from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.reference_path": "Qwen/Qwen3-8B",
        "roles": c.RolesConfig(num_trainers=2, num_references=2, num_generators=4),
        "reward": c.RewardConfig(functions={"math_reward": 0.0, "thinking_reward": 0.0}),
        "algorithm": c.AlgorithmConfig(loss="reinforce", distill_coef=1.0),
        "run_dir": "runs/qwen3_1_7b_distill",
        "prompts_per_step": 256,
        "group_size": 1,
    },
)
