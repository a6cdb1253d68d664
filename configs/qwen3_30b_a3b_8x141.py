"""Qwen3-30B-A3B, a mixture of experts, learns GSM8K's word problems: one node of 8 GPUs of 141 GB.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_30b_a3b_8x141.py

As qwen3_30b_a3b_8x80.py, with an engine on each rank, moments in float32, and fewer operations computed again.

Memory (`--dry-run --gpus 8 --gpu-gib 139.8` with this recipe; not measured): 30.5e9 x 16 / 8 ranks = 57 GiB; with the
activations of 16384 tokens, selective checkpointing, and the rest about 80 GiB. While the engines sample, weights and
moments stay and an engine takes half, 70 GiB: 57 of weights and 13 of KV cache, where its 64 completions need 9.
"""

from grpo.config import change

config = change(
    "qwen3_30b_a3b_8x80.py",
    {
        "generator.tensor_parallel": 1,
        "generator.gpu_memory_utilization": 0.5,
        "trainer.moments": "float32",
        "trainer.activation_checkpointing": "auto",
        "run_dir": "runs/qwen3_30b_a3b_8x141",
    },
)
