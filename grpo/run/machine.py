"""What the config leaves to the machine is decided, and whether the run fits is judged."""

from grpo import features
from grpo.config.fields import Config, RolesConfig
from grpo.models.families import has_states
from grpo.models.memory import Device, look_at_device, read_needs


def fit_to_machine(
    config: Config,
    layout: RolesConfig,
    folder: str,
    reward_model: str = "",
) -> tuple[Config, int]:
    """Decide what the config leaves to the machine, print it, and have it judged whether the run fits.

    A dry run is for this machine, or for `config.gpus` GPUs. layout: which ranks do what; without trainers only the
    engines are decided. For the folders see `read_needs`. Returns the number of problems too.
    """
    device = Device(config.gpus, "GPU", config.gpu_gib) if config.gpus else look_at_device()
    needs = read_needs(config, folder, reward_model, device).decided(layout)
    fitted = needs.config
    if layout.num_engine_ranks:
        print(
            f"engines: {fitted.num_engines}; each decodes {fitted.generator.max_num_seqs} sequences at once in "
            f"{needs.cache:.2f} GiB of KV cache"
        )
    judge = features.offers("CHECKS").get("machine")
    num_problems = 0
    if layout.num_trainers:
        trainer = fitted.trainer
        print(f"trainer.micro_batch_tokens: {trainer.micro_batch_tokens}")
        print(f"trainer.activation_checkpointing: {trainer.activation_checkpointing}")
        if trainer.share_prompts and has_states(needs.policy.hf):
            print("trainer.share_prompts: off, since each completion continues the states of its own prompt")
        if judge:
            num_problems = judge(needs)
    return fitted, num_problems
