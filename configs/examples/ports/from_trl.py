"""A TRL script as a recipe: behind each line is what it was there. docs/from-trl.md has all settings.

torchrun --nproc_per_node=8 train_grpo.py configs/examples/ports/from_trl.py
"""

from grpo import config as c

FILE = "configs/examples/ports/trl_rewards.py"

config = c.GRPOConfig(
    model=c.ModelConfig(path="Qwen/Qwen3-1.7B"),  # model; bf16=True
    roles=c.RolesConfig(colocated=True, num_trainers=8),  # vllm_mode="colocate", 8 processes
    data=c.DataConfig(
        path="train.jsonl",  # train_dataset
        row=f"{FILE}:make_row",  # .map(make_row)
        system_prompt="",  # the rows have their own
        max_prompt_tokens=1024,  # TRL has no limit
    ),
    # reward_funcs in TRL's order and reward_weights; the first function decides what passes
    reward=c.RewardConfig(functions={f"{FILE}:correctness": 1.0, f"{FILE}:short": 0.1}),
    generator=c.GeneratorConfig(
        max_completion_tokens=512,  # max_completion_length
        temperature=(0.9,),  # temperature
        sampling={"top_p": 0.95, "top_k": 50},  # top_p, top_k
        stop=("<|end|>",),  # generation_kwargs
        tensor_parallel=1,  # vllm_tensor_parallel_size
        gpu_memory_utilization=0.3,  # vllm_gpu_memory_utilization
        sleep=True,  # vllm_enable_sleep_mode
    ),
    trainer=c.TrainerConfig(
        learning_rate=5e-6,  # learning_rate
        adam_beta2=0.999,  # TRL's default; 0.95 is ours
        weight_decay=0.1,  # weight_decay
        warmup_steps=20,  # warmup_steps=40 updates
        schedule="cosine",  # lr_scheduler_type="cosine_with_min_lr"
        min_lr_ratio=0.1,  # lr_scheduler_kwargs
        max_grad_norm=0.1,  # max_grad_norm
    ),
    algorithm=c.AlgorithmConfig(
        loss="dr_grpo",  # loss_type, scale_rewards="none"
        clip_low=0.2,  # epsilon
        clip_high=0.28,  # epsilon_high
        kl_coef=0.01,  # beta
        kl_estimator="k3_weighted",  # use_bias_correction_kl=True, TRL's default
        reference_interval=32,  # sync_ref_model=True, ref_model_sync_steps=64 updates
        reference_mixture=0.6,  # ref_model_mixup_alpha
        mask_truncated=True,  # mask_truncated_completions
        entropy_coef=0.001,  # entropy_coef
        num_mini_batches=2,  # steps_per_generation=8 / gradient_accumulation_steps=4
        num_epochs=1,  # num_iterations
        importance_correction="truncate",  # vllm_importance_sampling_mode="token_truncate"
        importance_correction_high=2.0,  # vllm_importance_sampling_clip_max
    ),
    evaluation=c.EvaluationConfig(
        path="test.jsonl",  # eval_dataset
        interval=25,  # eval_steps=50 updates
        num_samples=4,  # num_generations_eval
        temperature=0.9,
    ),
    checkpoint=c.CheckpointConfig(interval=50, keep=2),  # save_steps=100 updates, save_total_limit
    metrics=c.MetricsConfig(samples_interval=1),  # log_completions
    seed=42,  # seed, whose default is 42 there and 0 here
    num_steps=200,  # max_steps=400 updates
    prompts_per_step=64,  # per_device_train_batch_size=8 x 8 processes x steps_per_generation=8 / num_generations
    group_size=8,  # num_generations
    run_dir="runs/from_trl",  # output_dir
)
