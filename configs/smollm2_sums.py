"""A real model on two CPU cores: SmolLM2-135M-Instruct learns sums of two-digit numbers from rewards alone."""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/smollm2-135m", dtype="float32"),
    roles=c.RolesConfig(colocated=True, num_trainers=1),
    data=c.DataConfig(path="runs/sums/train.jsonl", system_prompt="", max_prompt_tokens=64),
    reward=c.RewardConfig(functions={"configs/examples/sums.py:last_number": 1.0}),
    generator=c.GeneratorConfig(max_completion_tokens=16),
    trainer=c.TrainerConfig(learning_rate=1e-5),
    algorithm=c.AlgorithmConfig(kl_coef=0.0),
    evaluation=c.EvaluationConfig(path="runs/sums/test.jsonl", interval=10),
    checkpoint=c.CheckpointConfig(interval=0),
    run_dir="runs/smollm2_sums",
    num_steps=40,
    prompts_per_step=8,
    group_size=8,
)
