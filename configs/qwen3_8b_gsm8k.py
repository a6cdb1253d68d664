"""Qwen3-8B learns GSM8K's word problems, held near its start by a KL term: one node of 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_8b_gsm8k.py

Layout: 4 trainer ranks (FSDP), which also hold the frozen reference, + 4 generator ranks (one vLLM engine each).

Memory per trainer: float32 weights, gradients and Adam's two moments are 16 bytes per parameter, 8.2e9 x 16 / 4 ranks =
31 GiB; the reference in bfloat16 2 x 8.2e9 / 4 = 4 GiB; the logits of 2048 tokens 1.2 GiB per float32 copy. On 80 GB
the start chooses rows of 8192 tokens and selective checkpointing, whose activations are 16 GiB by arithmetic, on 141 GB
rows of 16384. Per generator: 15 GiB of bfloat16 weights, the rest of the 85 % is KV cache.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.path": "Qwen/Qwen3-8B",
        "trainer.logprob_chunk_tokens": 2048,
        "algorithm.kl_coef": 0.001,
        "run_dir": "runs/qwen3_8b_gsm8k",
    },
)
