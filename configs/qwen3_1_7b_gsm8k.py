"""Qwen3-1.7B learns GSM8K's word problems: the default recipe, one node of 8 GPUs.

    torchrun --nproc_per_node=8 train_grpo.py configs/qwen3_1_7b_gsm8k.py

Layout: 4 trainer ranks (FSDP) + 4 generator ranks (one vLLM engine each); no reference, because kl_coef is 0.

Memory per trainer: float32 weights, gradients and Adam's two moments are 16 bytes per parameter, 1.7e9 x 16 / 4 ranks =
6.4 GiB; on top come the activations of one micro-batch of 16384 tokens and the logits of 4096 tokens (2.3 GiB per
float32 copy). Per generator: 3.2 GiB of bfloat16 weights, the rest of the 85 % is KV cache. An estimate for GPUs of
80 GB; on smaller ones lower trainer.micro_batch_tokens first.

Thinking is off in the chat template, because the system prompt asks for <think> and <answer> itself: the model writes
both tags in its completion, where thinking_reward can see them.
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="Qwen/Qwen3-1.7B"),
    data=c.DataConfig(chat_template_kwargs={"enable_thinking": False}),
    evaluation=c.EvaluationConfig(interval=20),
    run_dir="runs/qwen3_1_7b_gsm8k",
    prompts_per_step=64,
)
