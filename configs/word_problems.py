"""GRPO on arithmetic word problems, on one GPU: a model of 64 M parameters learns from right and wrong answers alone.

    torchrun --nproc_per_node=1 train_grpo.py configs/word_problems.py

Starts from the model that `configs/word_problems_sft.py` leaves. Every role is on the one GPU. Memory: the engine takes
a tenth of it, the trainer below 10 GiB.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/word_problems_sft/model"),
    roles=c.RolesConfig(colocated=True, num_trainers=1),
    data=c.DataConfig(
        path="configs/examples/word_problem_rows.py:word_problems", system_prompt="", max_prompt_tokens=96
    ),
    reward=c.RewardConfig(functions={"math_reward": 1.0}),
    generator=c.GeneratorConfig(max_completion_tokens=96, gpu_memory_utilization=0.1),
    trainer=c.TrainerConfig(
        micro_batch_tokens=32_768,
        activation_checkpointing="none",
        logprob_chunk_tokens=32_768,  # the vocabulary is small
        learning_rate=1e-5,
        warmup_steps=5,
    ),
    evaluation=c.EvaluationConfig(interval=10, num_prompts=512),
    run_dir="runs/word_problems",
    num_steps=150,
    prompts_per_step=64,
)
