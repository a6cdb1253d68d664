"""Qwen2.5-7B-Instruct, the model of most published baselines, learns GSM8K's word problems: 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen2_5_7b_gsm8k.py

Layout: 4 trainer ranks (FSDP) + 4 generator ranks (one vLLM engine each); no reference, because kl_coef is 0.

Memory per trainer, by arithmetic (`--dry-run --gpus 8` with this recipe; it has run in small only):
float32 weights, gradients and Adam's two moments are 16 bytes per parameter, 7.6e9 x 16 / 4 ranks = 28 GiB; bfloat16
weights that FSDP gathers 2.9 GiB; activations of a row of 16384 tokens, with selective checkpointing, 30.1 GiB;
the logits of 2048 tokens and their gradient 1.2 GiB, those of the LM head and of a block 3.3 GiB: together 66 GiB, and
with a KL term 3.5 GiB more for the reference. Per generator: 14 GiB of bfloat16 weights, the rest of the 85 % is KV
cache.

With `--model.path deepseek-ai/DeepSeek-R1-Distill-Qwen-7B` it trains R1-Distill, whose chat template opens <think>
itself: then reward with math_reward alone, and allow longer completions.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.path": "Qwen/Qwen2.5-7B-Instruct",
        "data.chat_template_kwargs": {},
        "trainer.logprob_chunk_tokens": 2048,
        "run_dir": "runs/qwen2_5_7b_gsm8k",
    },
)
