"""Teach a toy policy the format of additions and some of the arithmetic: the start for `configs/toy_arithmetic.py`.

torchrun --nproc_per_node=2 train_sft.py configs/toy_sft.py
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="configs/examples/toys.py:addition_model", dtype="float32"),
    data=c.DataConfig(path="configs/examples/toys.py:addition", system_prompt=""),
    trainer=c.TrainerConfig(
        micro_batch_tokens=8192, activation_checkpointing="none", compile=False, learning_rate=1e-3, adam_beta2=0.999
    ),
    num_trainers=2,
    run_dir="runs/toy_sft",
    num_steps=400,
    stop_at_loss=0.09,
    max_sequence_tokens=64,
)
