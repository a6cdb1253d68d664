"""Qwen3-32B learns GSM8K's word problems: 2 nodes of 8 GPUs.

    sbatch --nodes=2 launch/grpo.sbatch configs/qwen3_32b_gsm8k.py

Without SLURM, on both nodes: torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500
train_grpo.py configs/qwen3_32b_gsm8k.py

Layout: 8 trainer ranks on one node (FSDP over 4 x tensor parallelism of 2, so that their traffic stays on NVLink) and 8
generator ranks on the other (two vLLM engines with tensor parallelism of 4); no reference, because kl_coef is 0.

Memory per trainer, by arithmetic (nobody has run this here):
- float32 weights, gradients and Adam's two moments, 16 bytes per parameter: 32.8e9 x 16 / 8 ranks = 61 GiB;
- bfloat16 gathers over FSDP of what one tensor-parallel rank needs: embeddings 0.7, LM head 0.7, two blocks of 0.5 GiB;
- before they are reduced: gradients of one block 1.4, of the LM head 2.2 GiB (bfloat16 and float32);
- full activation checkpointing: the inputs of 64 blocks, 4096 tokens x 5120 x 2 bytes / 2 ranks each = 1.3 GiB, and one
  block in full, about 1.5 GiB;
- logits of 2048 tokens, 0.6 GiB per float32 copy, about five at a time: 3 GiB.
Together 73 GiB: little is left on a GPU of 80 GB, much on one of 141 GB. On 3 nodes, 16 trainers
(--roles.num-trainers 16) halve the first line.
Per generator: 65.6 GB of bfloat16 weights / 4 ranks = 15 GiB, the rest of the 85 % is KV cache.

torch.compile is off, because it fails beside tensor parallelism and full activation checkpointing in torch 2.13.
"""

from grpo.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GeneratorConfig,
    GRPOConfig,
    ModelConfig,
    RolesConfig,
    TrainerConfig,
)

config = GRPOConfig(
    model=ModelConfig(path="Qwen/Qwen3-32B"),
    roles=RolesConfig(num_trainers=8, num_references=0, num_generators=8),
    data=DataConfig(path="openai/gsm8k", chat_template_kwargs={"enable_thinking": False}, max_prompt_tokens=512),
    generator=GeneratorConfig(tensor_parallel=4, max_completion_tokens=1024),
    trainer=TrainerConfig(
        tensor_parallel=2,
        micro_batch_tokens=4096,
        activation_checkpointing="full",
        compile=False,
        logprob_chunk_tokens=2048,
        learning_rate=1e-6,
    ),
    algorithm=AlgorithmConfig(kl_coef=0.0),
    evaluation=EvaluationConfig(interval=20, name="main", split="test"),
    checkpoint=CheckpointConfig(interval=50),
    run_dir="runs/qwen3_32b_gsm8k",
    num_steps=200,
    prompts_per_step=64,
    group_size=8,
)
