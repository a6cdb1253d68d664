"""Llama-3.1-8B-Instruct learns GSM8K's word problems: one node of 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_grpo.py configs/llama3_1_8b_gsm8k.py

Layout: 4 trainer ranks (FSDP) + 4 generator ranks (one vLLM engine each); no reference, because kl_coef is 0.

Memory per trainer: float32 weights, gradients and Adam's two moments are 16 bytes per parameter, 8.0e9 x 16 / 4 ranks =
30 GiB; the logits of 2048 tokens 1 GiB per float32 copy. The start chooses rows and checkpointing whose activations
fit, see --dry-run. Per generator: 15 GiB of bfloat16 weights, the rest of the 85 % is KV cache.

The checkpoint is gated: accept its license on the hub and log in, or give a local folder with --model.path.
"""

from grpo.config import change

config = change(
    "qwen3_1_7b_gsm8k.py",
    {
        "model.path": "meta-llama/Llama-3.1-8B-Instruct",
        "data.chat_template_kwargs": {},
        "trainer.logprob_chunk_tokens": 2048,
        "run_dir": "runs/llama3_1_8b_gsm8k",
    },
)
