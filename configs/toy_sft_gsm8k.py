"""GSM8K's worked answers into a random model of 1 M parameters, on a laptop.

    torchrun --nproc_per_node=2 train_sft.py configs/toy_sft_gsm8k.py

It learns which words follow each other and how an answer is written, and not to solve anything. Held-out problems are
completed before and after. Questions come from the hub, or with `--data.path` and `--evaluation.path` from files.
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="configs/examples/toys.py:gsm8k_model", dtype="float32"),
    data=c.DataConfig(system_prompt="", max_prompt_tokens=384),
    reward=c.RewardConfig(functions={"math_reward": 1.0}, answer_format="hashes"),
    generator=c.GeneratorConfig(max_completion_tokens=192),
    trainer=c.TrainerConfig(
        micro_batch_tokens=2048,
        activation_checkpointing="none",
        compile=False,
        learning_rate=3e-3,
        warmup_steps=5,
        logprob_chunk_tokens=1024,
    ),
    evaluation=c.EvaluationConfig(interval=60, num_prompts=64),
    completion_column="answer",
    num_trainers=2,
    run_dir="runs/toy_sft_gsm8k",
    num_steps=60,
    sequences_per_step=16,
    max_sequence_tokens=512,
)
