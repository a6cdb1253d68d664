"""Products that a tiny model cannot compute: it learns to ask the calculator, on a laptop.

    torchrun --nproc_per_node=2 train_grpo.py configs/toy_calculator.py

Starts from what `train_sft.py configs/toy_tools_sft.py` leaves, which asks for every second product.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/toy_tools_sft/model", dtype="float32"),
    roles=c.RolesConfig(num_trainers=1, num_references=0, num_generators=1),
    data=c.DataConfig(path="configs/examples/toys.py:calculator", system_prompt="", max_prompt_tokens=32),
    environment=c.EnvironmentConfig(tools=("configs/examples/calculator.py:multiply",), calls="hermes", max_turns=2),
    reward=c.RewardConfig(functions={"math_reward": 1.0}, num_workers=1),
    generator=c.GeneratorConfig(max_completion_tokens=64),
    trainer=c.TrainerConfig(
        micro_batch_tokens=8192,
        activation_checkpointing="none",
        compile=False,
        learning_rate=3e-4,
        warmup_steps=5,
        schedule="linear",
        min_lr_ratio=0.1,
    ),
    evaluation=c.EvaluationConfig(interval=20, num_prompts=128, num_samples=4),
    run_dir="runs/toy_calculator",
    num_steps=80,
    prompts_per_step=16,
)
