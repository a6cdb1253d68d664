"""Qwen3-1.7B learns the chats of UltraChat: one node of 8 GPUs.

    torchrun --nproc_per_node=8 train_sft.py configs/sft_qwen3_1_7b.py

As sft_qwen3_8b.py. Memory per GPU (`--dry-run --gpus 8` with this recipe): 16 bytes per parameter,
1.7e9 x 16 / 8 ranks = 3.2 GiB; with the activations of 16384 tokens and the rest about 45 GiB,
without activation checkpointing. One GPU of 80 GB is enough too (--num-trainers 1): it then holds 70 GiB.
"""

from grpo.config import change

config = change(
    "sft_qwen3_8b.py",
    {"model.path": "Qwen/Qwen3-1.7B", "trainer.logprob_chunk_tokens": 4096, "run_dir": "runs/sft_qwen3_1_7b"},
)
