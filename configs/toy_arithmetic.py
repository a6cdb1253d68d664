"""Additions on a laptop: a 0.8 M parameter policy, 2 trainer + 1 reference + 1 generator rank over gloo.

    torchrun --nproc_per_node=4 train_grpo.py configs/toy_arithmetic.py

Starts from the model that `train_sft.py configs/toy_sft.py` leaves.

What to expect on two CPU cores, 5 minutes for both: 0.54 of held-out additions right at the start, 0.79 to 0.90 at the
end.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/toy_sft/model", dtype="float32"),
    roles=c.RolesConfig(num_trainers=2, num_references=1, num_generators=1),
    data=c.DataConfig(path="configs/examples/toys.py:addition", system_prompt="", max_prompt_tokens=16),
    reward=c.RewardConfig(functions={"math_reward": 1.0, "thinking_reward": 0.1}),
    generator=c.GeneratorConfig(max_completion_tokens=32),
    trainer=c.TrainerConfig(
        micro_batch_tokens=4096,
        activation_checkpointing="none",
        compile=False,
        learning_rate=2e-4,
        warmup_steps=5,
        schedule="linear",
        min_lr_ratio=0.2,
    ),
    algorithm=c.AlgorithmConfig(kl_coef=0.001),
    evaluation=c.EvaluationConfig(interval=10),
    run_dir="runs/toy_arithmetic",
    num_steps=170,
)
