"""Who runs where: how many processes the roles of a config need, in words, and flags of roles that fit a number."""

from dataclasses import replace

from grpo.config.fields import SHARED_GPU, Config, GRPOConfig, RolesConfig, SFTConfig


def check_world_size(config: GRPOConfig | SFTConfig, world_size: int) -> None:
    """Compare torchrun's number of processes with the config's. Raises ValueError that names both and a way out."""
    if world_size == config.num_ranks:
        return
    raise ValueError(
        f"the layout ({describe_roles(config.roles)}) needs {config.num_ranks} processes, but torchrun started "
        f"{world_size}; use --nproc_per_node={config.num_ranks} (times nnodes), or for {world_size} processes: "
        f"{suggest_roles(config, world_size)}"
    )


def for_one_process(config: Config) -> Config:
    """Return the config with all roles on one rank, which is what a script is without torchrun.

    On a GPU the engine then takes a smaller part of the memory, because a trainer has the rest. A config that needs one
    rank is returned as it is.
    """
    if config.num_ranks == 1:
        return config
    if isinstance(config, SFTConfig):
        return replace(config, num_trainers=1)
    memory = min(config.generator.gpu_memory_utilization, SHARED_GPU)
    return replace(
        config,
        roles=replace(config.roles, colocated=True, num_trainers=1, num_references=0),
        generator=replace(config.generator, gpu_memory_utilization=memory),
        overlap_steps=0,
    )


def describe_roles(roles: RolesConfig) -> str:
    """Name the ranks of each role in one phrase, such as `2 trainer + 1 reference + 1 generator`."""
    if roles.colocated:
        return f"{roles.num_trainers} colocated"
    parts = [(roles.num_trainers, "trainer"), (roles.num_references, "reference"), (roles.num_generators, "generator")]
    return " + ".join(f"{count} {name}" for count, name in parts if count)


def suggest_roles(config: GRPOConfig | SFTConfig, world_size: int) -> str:
    """Return command-line flags of roles that `world_size` ranks can have with this config's parallel degrees."""
    if isinstance(config, SFTConfig):
        return f"--num-trainers {world_size}"
    shards = config.trainer.tensor_parallel * config.trainer.data_replicas
    for references in dict.fromkeys([config.roles.num_references, 0]):
        for generators in range(config.generator.tensor_parallel, world_size, config.generator.tensor_parallel):
            trainers = world_size - references - generators
            fits = 0 < trainers <= max(generators, shards) and trainers % shards == 0
            if fits and config.completions_per_step % (trainers // config.trainer.tensor_parallel) == 0:
                return (
                    f"--roles.no-colocated --roles.num-trainers {trainers} --roles.num-references {references} "
                    f"--roles.num-generators {generators}"
                )
    if world_size % shards == 0 and world_size % config.generator.tensor_parallel == 0:
        overlap = " --overlap-steps 0" if config.overlap_steps else ""
        return f"--roles.colocated --roles.num-trainers {world_size} --roles.num-references 0{overlap}"
    return "no layout fits these tensor_parallel degrees; lower them"
