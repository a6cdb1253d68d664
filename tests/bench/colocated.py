"""One GPU, every role on it: 32 prompts x 8 completions of 128 + 256 tokens, no reference.

    python tests/bench/random_checkpoint.py qwen3-0.6b /tmp/model
    torchrun --nproc_per_node=1 train_grpo.py tests/bench/colocated.py --model.path /tmp/model \
        --data.path /tmp/model/prompts.jsonl
"""

from grpo.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    GeneratorConfig,
    GRPOConfig,
    RewardConfig,
    RolesConfig,
    TrainerConfig,
)

config = GRPOConfig(
    roles=RolesConfig(colocated=True, num_trainers=1),
    data=DataConfig(system_prompt="", max_prompt_tokens=128),
    reward=RewardConfig(functions={"tests/bench/rewards.py:coin": 1.0}),
    generator=GeneratorConfig(max_completion_tokens=256, gpu_memory_utilization=0.35),
    trainer=TrainerConfig(micro_batch_tokens=16_384),
    algorithm=AlgorithmConfig(kl_coef=0.0),
    checkpoint=CheckpointConfig(export=False),
    run_dir="runs/bench",
    overwrite=True,
    num_steps=8,
    prompts_per_step=32,
    group_size=8,
    sync_check_interval=1,
)
