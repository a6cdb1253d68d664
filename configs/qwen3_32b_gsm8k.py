"""Qwen3-32B learns GSM8K's word problems: 2 nodes of 8 GPUs.

    sbatch --nodes=2 launch/grpo.sbatch configs/qwen3_32b_gsm8k.py

Without SLURM, on both nodes: torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500
train_grpo.py configs/qwen3_32b_gsm8k.py

Layout: 8 trainer ranks on one node (FSDP over 4 x tensor parallelism of 2, so that their traffic stays on NVLink) and 8
generator ranks on the other (two vLLM engines with tensor parallelism of 4); no reference, because kl_coef is 0.

Memory per trainer, by arithmetic (this recipe has run in small only, without GPUs):
- float32 weights, gradients and Adam's two moments, 16 bytes per parameter: 32.8e9 x 16 / 8 ranks = 61 GiB;
- bfloat16 gathers over FSDP of what one tensor-parallel rank needs: embeddings 0.7, LM head 0.7, two blocks of 0.5 GiB;
- before they are reduced: gradients of one block 1.4, of the LM head 2.2 GiB (bfloat16 and float32);
- full activation checkpointing, in rows of 4096 tokens, which the start chooses: the inputs of 64 blocks, 4096 x 5120 x
  2 bytes / 2 ranks each = 1.3 GiB, and one block in full, about 1.5 GiB;
- logits of 2048 tokens, 0.6 GiB per float32 copy, about five at a time: 3 GiB.
Together 73 GiB: little is left on a GPU of 80 GB, much on one of 141 GB. On 3 nodes, 16 trainers
(--roles.num-trainers 16) halve the first line.
Per generator: 65.6 GB of bfloat16 weights / 4 ranks = 15 GiB, the rest of the 85 % is KV cache.

torch.compile is off, because it fails with tensor parallelism and full activation checkpointing in torch 2.13.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.path": "Qwen/Qwen3-32B",
        "roles.num_trainers": 8,
        "roles.num_generators": 8,
        "generator.tensor_parallel": 4,
        "trainer.tensor_parallel": 2,
        "trainer.logprob_chunk_tokens": 2048,
        "trainer.activation_checkpointing": "full",
        "trainer.compile": False,
        "run_dir": "runs/qwen3_32b_gsm8k",
    },
)
