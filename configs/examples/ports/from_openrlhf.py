"""A script of OpenRLHF 0.11 as a recipe: behind each line is what it was there. docs/from-verl.md has all settings.

torchrun --nproc_per_node=8 train_grpo.py configs/examples/ports/from_openrlhf.py
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="Qwen/Qwen3-1.7B"),
    roles=c.RolesConfig(colocated=True, num_trainers=8),  # colocate_all
    data=c.DataConfig(
        path="train.jsonl",
        prompt_column="prompt",
        answer_column="label",
        system_prompt="",
        max_prompt_tokens=1024,  # data.max_len less rollout.max_new_tokens
    ),
    reward=c.RewardConfig(functions={"configs/examples/ports/openrlhf_reward.py:rewards": 1.0}),
    generator=c.GeneratorConfig(
        max_completion_tokens=1024,  # rollout.max_new_tokens
        gpu_memory_utilization=0.75,  # vllm.gpu_memory_utilization
        sleep=True,  # vllm.enable_sleep
        engine={"enforce_eager": True},  # vllm.enforce_eager
    ),
    trainer=c.TrainerConfig(
        micro_batch_tokens=32768,
        learning_rate=5e-7,
        schedule="cosine",  # lr_scheduler cosine_with_min_lr, the default there
        min_lr_ratio=0.1,
        warmup_steps=2,  # warmup_ratio 0.03, the default there
    ),
    algorithm=c.AlgorithmConfig(  # advantage.estimator group_norm
        aggregation="token_mean",
        clip_low=0.2,  # eps_clip_low_high
        clip_high=0.27,
        kl_coef=1e-3,  # kl.init_coef
        kl_estimator="k3",  # kl.estimator
        kl_in="loss",  # kl.use_loss
        num_mini_batches=8,  # 128 prompts x 8 / train.batch_size=128 COMPLETIONS
        importance_correction="mask_tokens",  # is_correction_type icepop
        importance_correction_low=0.5,
        importance_correction_high=5.0,
    ),
    sampling=c.SamplingConfig(dynamic=True),  # dynamic_filtering_enable
    evaluation=c.EvaluationConfig(path="test.jsonl", interval=5, num_samples=4, temperature=0.6),
    checkpoint=c.CheckpointConfig(interval=20, keep=3),
    seed=42,
    num_steps=58,
    prompts_per_step=128,  # rollout.batch_size
    group_size=8,  # rollout.n_samples_per_prompt
    run_dir="runs/from_openrlhf",
)
