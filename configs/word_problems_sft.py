"""Arithmetic word problems from nothing, on one GPU: the start for `configs/word_problems.py`.

    torchrun --nproc_per_node=1 train_sft.py configs/word_problems_sft.py

A model of 64 M parameters with random weights learns worked solutions until about half of the held-out problems are
solved: the completions are certain except for their arithmetic, so the loss says when. Memory: below 10 GiB.
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="configs/examples/word_problem_rows.py:model"),
    data=c.DataConfig(path="configs/examples/word_problem_rows.py:word_problems", system_prompt=""),
    trainer=c.TrainerConfig(
        micro_batch_tokens=32_768,
        activation_checkpointing="none",
        logprob_chunk_tokens=32_768,  # the vocabulary is small
        learning_rate=6e-4,
        warmup_steps=100,
        adam_beta2=0.99,
    ),
    run_dir="runs/word_problems_sft",
    num_steps=1500,
    sequences_per_step=256,
    max_sequence_tokens=192,
    stop_at_loss=0.045,
)
