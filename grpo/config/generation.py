"""What evaluation by generating needs of a config, whether it runs between steps of SFT or alone."""

from dataclasses import fields

from grpo.config.fields import AlgorithmConfig, GRPOConfig, RolesConfig, SFTConfig, TrainerConfig


def generating(config: GRPOConfig | SFTConfig, num_ranks: int) -> GRPOConfig:
    """The config with `num_ranks` ranks that all generate and, as far as it says, train nothing.

    Its data, rewards, sampling and everything else that evaluation reads are those of `config`.
    """
    shared = {field.name: getattr(config, field.name) for field in fields(GRPOConfig) if hasattr(config, field.name)}
    longest = config.data.max_prompt_tokens + config.generator.max_completion_tokens
    return GRPOConfig(
        **shared
        | {
            "roles": RolesConfig(colocated=True, num_trainers=num_ranks, num_references=0),
            "algorithm": AlgorithmConfig(advantages="none"),
            "trainer": TrainerConfig(micro_batch_tokens=longest),
            "prompts_per_step": num_ranks,
        }
    )
