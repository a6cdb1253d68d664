"""Qwen3-30B-A3B, a mixture of experts, learns GSM8K's word problems: one node of 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_30b_a3b_8x80.py

Layout: every rank is a trainer (FSDP over all 8, experts included) and a part of one of two vLLM engines, which have
four ranks each and give their memory back while the trainers work; no reference, because kl_coef is 0.

Memory (`--dry-run --gpus 8 --gpu-gib 80` with this recipe; not measured): float32 weights and gradients and Adam's two
moments in bfloat16 are 12 bytes per parameter, 30.5e9 x 12 / 8 ranks = 43 GiB; the bfloat16 gathers of two blocks, the
embeddings and the LM head 3.5; the gradients of a block and of the LM head before they are shared out 4.6; with the
activations of 16384 tokens, all blocks computed again, and the rest about 58 GiB. Rows of 32768 tokens take 64. With
moments in float32 it would be 72 GiB, too close to 80 GB. While the engines sample, weights and moments stay, 28 GiB,
and an engine takes 40 %, 32 GiB: 14 of weights, the rest is KV cache. Asleep it keeps about 5. So a GPU holds 63 GiB.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.path": "Qwen/Qwen3-30B-A3B",
        "roles.colocated": True,
        "roles.num_trainers": 8,
        "generator.tensor_parallel": 4,
        "generator.sleep": True,
        "generator.gpu_memory_utilization": 0.4,
        "trainer.moments": "bfloat16",
        "trainer.activation_checkpointing": "full",
        "trainer.logprob_chunk_tokens": 2048,
        "run_dir": "runs/qwen3_30b_a3b_8x80",
    },
)
