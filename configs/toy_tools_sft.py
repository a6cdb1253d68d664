"""Teach a toy policy to write a tool call for every second product: the start for `toy_calculator.py`.

torchrun --nproc_per_node=2 train_sft.py configs/toy_tools_sft.py
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="configs/examples/toys.py:calculator_model", dtype="float32"),
    data=c.DataConfig(path="configs/examples/toys.py:calculator", system_prompt=""),
    trainer=c.TrainerConfig(
        micro_batch_tokens=8192,
        activation_checkpointing="none",
        compile=False,
        learning_rate=3e-3,
        adam_beta2=0.999,
        warmup_steps=20,
        schedule="linear",
        min_lr_ratio=0.1,
    ),
    num_trainers=2,
    run_dir="runs/toy_tools_sft",
    num_steps=600,
    sequences_per_step=64,
    max_sequence_tokens=256,
)
