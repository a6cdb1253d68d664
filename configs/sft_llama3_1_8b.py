"""Llama-3.1-8B-Instruct learns the chats of UltraChat: the default recipe of SFT, one node of 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_sft.py configs/sft_llama3_1_8b.py

208,000 chats of several turns, of which every answer is learned; 1600 steps of 128 are almost one epoch. Chats of more
than 4096 tokens are cut off there. All rows are tokenized once before the first start, which takes minutes.

Memory per GPU (`--dry-run --gpus 8` with this recipe): float32 weights, gradients and Adam's two moments are 16 bytes
per parameter, 8.0e9 x 16 / 8 ranks = 15 GiB; with the activations of 16384 tokens and the rest about 53 GiB.

The checkpoint is gated: accept its license on the hub and log in, or give a local folder with --model.path.
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="meta-llama/Llama-3.1-8B-Instruct"),
    data=c.DataConfig(path="HuggingFaceH4/ultrachat_200k:train_sft", system_prompt="", bad_rows="skip"),
    trainer=c.TrainerConfig(
        micro_batch_tokens=16384,
        logprob_chunk_tokens=2048,
        learning_rate=1e-5,
        warmup_steps=50,
        schedule="cosine",
        min_lr_ratio=0.1,
    ),
    validation=c.ValidationConfig(interval=100, path="HuggingFaceH4/ultrachat_200k:test_sft"),
    run_dir="runs/sft_llama3_1_8b",
    num_trainers=8,
    num_steps=1600,
    too_long="truncate",
    max_sequence_tokens=4096,
)
