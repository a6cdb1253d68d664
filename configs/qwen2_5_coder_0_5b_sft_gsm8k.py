"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K's worked solutions, as a start for GRPO: one GPU.

    torchrun --nproc_per_node=1 train_sft.py configs/qwen2_5_coder_0_5b_sft_gsm8k.py

GRPO goes on from the model that it leaves, which writes its answer behind ####:

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k.py \\
        --model.path runs/qwen2_5_coder_0_5b_sft_gsm8k/model --data.system-prompt "" --reward.answer-format hashes \\
        --generator.max-completion-tokens 256 --run-dir runs/qwen2_5_coder_0_5b_after_sft

What to expect: two epochs of 117 steps; validation loss, greedy accuracy on 512 held-out questions before, after one
epoch and after two, and minutes on an H100: not measured yet. Before, the answers do not stand behind ####, so the
accuracy at the start says nothing.

Memory: as in qwen2_5_coder_0_5b_gsm8k.py.
"""

from grpo import config as c

config = c.SFTConfig(
    model=c.ModelConfig(path="Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    data=c.DataConfig(system_prompt=""),
    reward=c.RewardConfig(functions={"math_reward": 1.0}, answer_format="hashes"),
    generator=c.GeneratorConfig(
        max_completion_tokens=256,
        gpu_memory_utilization=0.35,
        engine={"max_num_seqs": 512},
    ),
    trainer=c.TrainerConfig(learning_rate=1e-5, warmup_steps=10, schedule="linear", min_lr_ratio=0.1),
    validation=c.ValidationConfig(interval=39, num_examples=512),
    evaluation=c.EvaluationConfig(interval=117, num_prompts=512),
    completion_column="answer",
    run_dir="runs/qwen2_5_coder_0_5b_sft_gsm8k",
    num_steps=234,
    sequences_per_step=64,
    max_sequence_tokens=768,
)
