"""A real model on two CPU cores: SmolLM2-135M-Instruct learns to name the smallest of three numbers.

    bash launch/quickstart.sh

gets the model and runs this, which is also

    torchrun --nproc_per_node=1 train_grpo.py configs/smollm2_smallest.py

What to expect on two CPU cores, weights from a 4-bit file: greedy accuracy on 256 held-out questions (standard error
0.01 to 0.03) 0.24 at the start, 0.69 to 0.90 after 15 steps, 0.94 to 0.98 after 30 (three seeds). 30 steps take 6 to 8
minutes on quiet cores, and less than 6 GiB of memory. Answers and steps become shorter. In bfloat16, which
launch/quickstart.sh takes on a GPU, 30 steps end at 0.81 and 60 at 0.98, because rounding hides small updates.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/smollm2-135m", dtype="float32"),
    roles=c.RolesConfig(colocated=True, num_trainers=1),
    data=c.DataConfig(path="configs/examples/smallest.py:rows", system_prompt="", max_prompt_tokens=64),
    reward=c.RewardConfig(functions={"configs/examples/smallest.py:last_number": 1.0}),
    generator=c.GeneratorConfig(max_completion_tokens=14),
    trainer=c.TrainerConfig(
        micro_batch_tokens=320,
        logprob_chunk_tokens=256,
        learning_rate=2e-5,
        schedule="linear",
        min_lr_ratio=0.1,
    ),
    sampling=c.SamplingConfig(dynamic=True, max_rounds=1),  # trains on no group that has nothing to compare
    evaluation=c.EvaluationConfig(path="configs/examples/smallest.py:rows:test", interval=15),
    run_dir="runs/smollm2_smallest",
    num_steps=30,
    prompts_per_step=8,
    group_size=8,
)
