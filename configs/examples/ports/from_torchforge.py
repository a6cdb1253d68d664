"""TorchForge's Qwen3-1.7B yaml of 2025-11 as a recipe: two trainers with 12 completions each, in groups of 8.

torchrun --nproc_per_node=5 train_grpo.py configs/examples/ports/from_torchforge.py
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="Qwen/Qwen3-1.7B"),
    roles=c.RolesConfig(num_trainers=2, num_references=1, num_generators=2),  # services, actors
    data=c.DataConfig(
        chat_template_kwargs={"enable_thinking": False},
        max_prompt_tokens=1024,  # max_req_tokens
    ),
    reward=c.RewardConfig(
        functions={"math_reward": 0.5, "thinking_reward": 0.5},  # the mean of MathReward and ThinkingReward
        options={"math_reward": {"partial_credit": 0.1}},
    ),
    generator=c.GeneratorConfig(max_completion_tokens=1024),  # max_res_tokens
    trainer=c.TrainerConfig(learning_rate=1e-5, warmup_steps=1),
    algorithm=c.AlgorithmConfig(kl_coef=0.1),
    evaluation=c.EvaluationConfig(interval=20),
    overlap_steps=1,  # off_by_n
    prompts_per_step=3,  # local_batch_size=12 x 2 trainers / group_size
    group_size=8,
    run_dir="runs/from_torchforge",
)
