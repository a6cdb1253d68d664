"""What the config leaves to the machine is decided, and whether the run fits is judged."""

import os
import pathlib
import re
from typing import Any

import torch

from grpo import features
from grpo.config import RolesConfig
from grpo.config.fields import Config
from grpo.models.families import has_states
from grpo.models.memory import GIB, Device, read_needs


def fit_to_machine(
    config: Config,
    layout: RolesConfig,
    folder: str,
    reward_model: str = "",
) -> tuple[Config, int]:
    """Decide what the config leaves to the machine, print it, and have it judged whether the run fits.

    A dry run is for this machine, or for `config.gpus` GPUs; with fewer than ranks for another layout. layout: which
    ranks do what; without trainers only the engines are decided. For the folders see `read_needs`. Returns the number
    of problems too.
    """
    device = Device(config.gpus, "GPU", config.gpu_gib) if config.gpus else look_at_device()
    needs = read_needs(config, folder, reward_model)
    proposed: dict[str, Any] = {}
    if config.dry_run:
        for _, propose_layout in features.turned_on(config, "propose_layout"):
            proposed = propose_layout(needs, device)
        needs = needs.changed(proposed)
        layout = needs.config.roles
    needs = needs.decided(layout, device)
    if layout.num_engine_ranks:
        engine = needs.config.generator.engine
        cache = f"{needs.cache(device.gib):.2f} GiB of KV cache"
        print(
            f"engines: {needs.config.num_engines}; each decodes {engine['max_num_seqs']} sequences at once in {cache}"
        )
    num_problems = 0
    if layout.num_trainers:
        trainer = needs.config.trainer
        print(f"trainer.micro_batch_tokens: {trainer.micro_batch_tokens}")
        print(f"trainer.activation_checkpointing: {trainer.activation_checkpointing}")
        if trainer.share_prompts and has_states(needs.policy.hf):
            print("trainer.share_prompts: off, since each completion continues the states of its own prompt")
        for _, judge in features.turned_on(config, "judge"):
            num_problems = judge(config, needs, device, proposed)
    return needs.config, num_problems


def look_at_device() -> Device:
    """Return this host's GPUs, or the host itself if torch sees none."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        gpu = torch.cuda.get_device_properties(0)
        return Device(num_gpus, gpu.name, gpu.total_memory / GIB)
    facts = pathlib.Path("/proc/meminfo").read_text()
    free_kib = re.search(r"MemAvailable: +(\d+)", facts)[1]
    return Device(0, f"{os.cpu_count()} CPU cores", int(free_kib) / 2**20)
