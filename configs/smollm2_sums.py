"""A real model on two CPU cores: SmolLM2-135M-Instruct learns sums of two-digit numbers from rewards alone.

    bash launch/quickstart.sh

gets the model and runs this, which is also

    torchrun --nproc_per_node=1 train_grpo.py configs/smollm2_sums.py

What to expect on two CPU cores, weights from a 4-bit file: greedy accuracy on 256 held-out sums (standard error 0.025)
0.18 at the start, 0.73 after 20 steps, 0.78 after 40, 0.80 after 60, in 12.4 minutes; 6.7 GB of memory. Completions
keep the form "25 + 60 = 85", which the model had before.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="runs/smollm2-135m", dtype="float32"),
    roles=c.RolesConfig(colocated=True, num_trainers=1),
    data=c.DataConfig(path="configs/examples/sums.py:rows", system_prompt="", max_prompt_tokens=64),
    reward=c.RewardConfig(functions={"configs/examples/sums.py:last_number": 1.0}),
    generator=c.GeneratorConfig(max_completion_tokens=14),
    trainer=c.TrainerConfig(
        micro_batch_tokens=1024,
        logprob_chunk_tokens=512,
        learning_rate=1e-5,
        schedule="linear",
        min_lr_ratio=0.1,
    ),
    sampling=c.SamplingConfig(dynamic=True, max_rounds=1),  # trains on no group that has nothing to compare
    evaluation=c.EvaluationConfig(path="configs/examples/sums.py:rows:test", interval=20),
    run_dir="runs/smollm2_sums",
    num_steps=60,
    prompts_per_step=8,
    group_size=8,
)
