"""Four GPUs: 2 trainer + 1 reference + 1 generator rank over NCCL; 32 prompts x 8 completions of 128 + 256 tokens.

    python tests/bench/random_checkpoint.py qwen3-1.7b /tmp/model
    torchrun --nproc_per_node=4 train_grpo.py tests/bench/split.py --model.path /tmp/model \
        --data.path /tmp/model/prompts.jsonl
"""

import dataclasses

from grpo.config import AlgorithmConfig, GeneratorConfig, GRPOConfig, RolesConfig
from grpo.config.recipes import load_recipe

config = dataclasses.replace(
    load_recipe("tests/bench/colocated.py", GRPOConfig),
    roles=RolesConfig(num_trainers=2, num_references=1, num_generators=1),
    generator=GeneratorConfig(max_completion_tokens=256),
    algorithm=AlgorithmConfig(kl_coef=0.01),
)
