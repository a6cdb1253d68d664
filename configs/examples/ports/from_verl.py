"""A script of verl 0.9.1 as a recipe: behind each line is what it was there. docs/from-verl.md has all settings.

torchrun --nproc_per_node=8 train_grpo.py configs/examples/ports/from_verl.py
"""

from grpo import config as c

config = c.GRPOConfig(
    model=c.ModelConfig(path="Qwen/Qwen3-1.7B"),  # actor_rollout_ref.model.path
    roles=c.RolesConfig(colocated=True, num_trainers=8),  # trainer.n_gpus_per_node=8; every rank has every role
    data=c.DataConfig(
        path="train.parquet",  # data.train_files
        prompt_column="prompt",  # data.prompt_key
        answer_column="reward_model.ground_truth",
        columns={"data_source": "data_source", "extra_info": "extra_info"},
        system_prompt="",  # the rows have their own
        max_prompt_tokens=512,  # data.max_prompt_length, data.filter_overlong_prompts=True
    ),
    reward=c.RewardConfig(
        functions={"configs/examples/ports/verl_score.py:score": 1.0},  # reward.custom_reward_function.path
        num_workers=8,  # reward.num_workers
    ),
    generator=c.GeneratorConfig(
        max_completion_tokens=1024,  # data.max_response_length
        tensor_parallel=1,  # rollout.tensor_model_parallel_size
        gpu_memory_utilization=0.6,  # rollout.gpu_memory_utilization
        sleep=True,  # rollout.free_cache_engine, True by default there
        engine={"enable_prefix_caching": True},  # rollout.enable_prefix_caching
    ),
    trainer=c.TrainerConfig(
        micro_batch_tokens=16384,  # actor.use_dynamic_bsz=True, actor.ppo_max_token_len_per_gpu
        learning_rate=1e-6,  # actor.optim.lr
        adam_beta2=0.999,  # verl's default; 0.95 is ours
        weight_decay=0.1,  # actor.optim.weight_decay
        warmup_steps=10,  # actor.optim.lr_warmup_steps
    ),
    algorithm=c.AlgorithmConfig(  # algorithm.adv_estimator=grpo, algorithm.norm_adv_by_std_in_grpo=True
        loss="configs/examples/dual_clip.py:dual_clip",  # verl's loss clips twice
        loss_options={"bound": 10},  # actor.clip_ratio_c
        aggregation="token_mean",  # actor.loss_agg_mode, token-mean by default there
        clip_low=0.2,  # actor.clip_ratio_low
        clip_high=0.28,  # actor.clip_ratio_high
        kl_coef=0.001,  # actor.use_kl_loss=True, actor.kl_loss_coef
        kl_estimator="k3",  # actor.kl_loss_type=low_var_kl
        num_mini_batches=4,  # data.train_batch_size=64 / actor.ppo_mini_batch_size=16
        importance_correction="none",  # algorithm.rollout_correction, off by default there
    ),
    evaluation=c.EvaluationConfig(
        path="test.parquet",  # data.val_files
        interval=5,  # trainer.test_freq
        num_prompts=1319,  # verl takes all rows
        num_samples=4,  # rollout.val_kwargs.n
    ),
    checkpoint=c.CheckpointConfig(interval=20),  # trainer.save_freq
    metrics=c.MetricsConfig(wandb_project="my-project"),  # trainer.logger, trainer.project_name
    seed=42,  # data.seed
    num_steps=1740,  # trainer.total_epochs=15 x floor(7,473 rows of GSM8K / 64)
    prompts_per_step=64,  # data.train_batch_size
    group_size=8,  # rollout.n
    run_dir="runs/from_verl",
)
