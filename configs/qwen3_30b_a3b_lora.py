"""Qwen3-30B-A3B learns GSM8K's word problems with LoRA on its attention: one GPU of 141 GB that has every role.

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen3_30b_a3b_lora.py

As qwen3_30b_a3b_8x141.py, with adapters of rank 16 on q, k, v and o of each block (experts take none) and ten times its
learning rate.

Memory (`--dry-run --gpus 1 --gpu-gib 139.8` with this recipe; not measured): the frozen bfloat16 weights are 57 GiB,
the adapters with gradients and moments 0.2; with the activations of 16384 tokens, selective checkpointing, and the rest
about 67 GiB. While the engine samples, both stay and it takes half, 70 GiB: 57 of weights and 13 of KV cache, of the 36
that its 256 completions at once would need at full length. On two GPUs of 80 GB, --roles.num-trainers 2 and
--generator.tensor-parallel 2 halve the weights of both.
"""

from grpo.config import change

config = change(
    "qwen3_30b_a3b_8x141.py",
    {
        "roles.num_trainers": 1,
        "trainer.lora_rank": 16,
        "trainer.learning_rate": 1e-5,
        "run_dir": "runs/qwen3_30b_a3b_lora",
    },
)
