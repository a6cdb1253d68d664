"""Real questions, a random model of 1 M parameters, 4 ranks on a CPU: every part of a GSM8K run, in about a minute.

    torchrun --nproc_per_node=4 train_grpo.py configs/toy_gsm8k.py --data.path /path/to/gsm8k/train.jsonl

Ten steps teach a random model nothing: its only reward is now and then a tag hit by chance. The run shows that data,
chat template, rewards, all four ranks, checkpoint and export work. Without --data.path the questions come from the hub.

Layout: 2 trainer + 1 reference + 1 generator rank over gloo. Memory: about 1 GiB per process, most of it libraries.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="configs/examples/toys.py:gsm8k_model", dtype="float32"),
    roles=c.RolesConfig(num_trainers=2, num_references=1, num_generators=1),
    data=c.DataConfig(max_prompt_tokens=384),
    generator=c.GeneratorConfig(max_completion_tokens=48),
    trainer=c.TrainerConfig(
        micro_batch_tokens=2048,
        activation_checkpointing="none",
        compile=False,
        learning_rate=1e-4,
        logprob_chunk_tokens=1024,
    ),
    algorithm=c.AlgorithmConfig(kl_coef=0.01),
    run_dir="runs/toy_gsm8k",
    num_steps=10,
    prompts_per_step=4,
    group_size=4,
)
