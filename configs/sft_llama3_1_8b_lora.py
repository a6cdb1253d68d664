"""Llama-3.1-8B-Instruct learns the chats of UltraChat with LoRA: one GPU of 80 GB.

    torchrun --nproc_per_node=1 train_sft.py configs/sft_llama3_1_8b_lora.py

As sft_llama3_1_8b.py, with adapters of rank 16 on all linear layers and ten times its learning rate. On 8 GPUs:
--num-trainers 8.

Memory (`--dry-run --gpus 8` with this recipe): the frozen bfloat16 weights are 15 GiB, adapters with gradients and
moments 0.6 GiB; with the activations of 8192 tokens, all of them kept, and the rest about 57 GiB.
"""

from grpo.config import change

config = change(
    "sft_llama3_1_8b.py",
    {
        "trainer.lora_rank": 16,
        "trainer.micro_batch_tokens": 8192,
        "trainer.learning_rate": 1e-4,
        "num_trainers": 1,
        "run_dir": "runs/sft_llama3_1_8b_lora",
    },
)
