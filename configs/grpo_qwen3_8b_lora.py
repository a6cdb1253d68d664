"""Qwen3-8B learns GSM8K's word problems with LoRA: one GPU of 80 GB that has every role.

    torchrun --nproc_per_node=1 train_grpo.py configs/grpo_qwen3_8b_lora.py

As qwen3_8b_gsm8k.py, with adapters of rank 16 on all linear layers and ten times its learning rate. The reference of
the KL term is the policy with its adapters off, and takes no memory.

Memory (`--dry-run --gpus 8` with this recipe): the trainer's frozen bfloat16 weights are 15 GiB, its adapters with
gradients and moments 0.7 GiB; with the activations of 8192 tokens, all of them kept, and the rest about 58 GiB. The
engine takes 60 %: 15 GiB of weights and 32 of KV cache. Both do not fit at once. So the engine gives its memory back
while the trainer works, and while the engine samples, the trainer holds its weights and adapters alone. On an H200 with
32 GiB of KV cache at most 69 GiB were in use.
"""

from grpo.config import change

config = change(
    "qwen3_8b_gsm8k.py",
    {
        "roles.colocated": True,
        "roles.num_trainers": 1,
        "generator.sleep": True,
        "generator.gpu_memory_utilization": 0.6,
        "trainer.lora_rank": 16,
        "trainer.learning_rate": 1e-5,
        "run_dir": "runs/grpo_qwen3_8b_lora",
    },
)
