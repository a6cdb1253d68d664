"""What the config leaves to the machine is decided, and advice is given for a run that does not fit.

What "auto" becomes, how many sequences an engine decodes, the flags with which a trainer fits, layouts for fewer GPUs.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from grpo.config import RolesConfig
from grpo.config.checks import describe_roles, validate
from grpo.config.fields import CPU_KV_CACHE_GIB, MAX_NUM_SEQS, MOST_NUM_SEQS, SHARED_GPU
from grpo.features.machine.memory import (
    GIB,
    PROCESS_GIB,
    TIGHT_FRAC,
    Device,
    Needs,
    Verdict,
    check_disk,
    check_memory,
    check_versions,
    look_at_device,
    read_needs,
)
from grpo.models.families import has_states, windows_of
from grpo.text import aligned

MARGIN_FRAC = 0.05  # added to a peak before "auto" compares it with a GPU
MOST_CPU_KV_CACHE_GIB = 1 / 4
# On a GPU a cache is for an engine's sequences and no more, if that is at most this part of the room for it: the rest
# must hold what vLLM computes with, which it then does not measure
SMALL_CACHE_FRAC = 0.5
LEAST_KV_CACHE_GIB = 1  # of such a cache


def fit_to_machine(config: Any, layout: RolesConfig, folder: str, reward_model: str = "") -> tuple[Any, int]:
    """Decide what the config leaves to the machine, print it, and judge whether the run fits.

    A dry run is for this machine, or for `config.gpus` GPUs. layout: which ranks do what; without trainers only the
    engines are decided. For the folders see `read_needs`. Returns the number of problems too.
    """
    device = Device(config.gpus, "GPU", config.gpu_gib) if config.gpus else look_at_device()
    needs = decide(read_needs(config, folder, reward_model, device), layout)
    fitted = needs.config
    if layout.num_engine_ranks:
        print(
            f"engines: {fitted.num_engines}; each decodes {fitted.generator.max_num_seqs} sequences at once in "
            f"{needs.cache:.2f} GiB of KV cache"
        )
    if not layout.num_trainers:
        return fitted, 0
    trainer = fitted.trainer
    print(f"trainer.micro_batch_tokens: {trainer.micro_batch_tokens}")
    print(f"trainer.activation_checkpointing: {trainer.activation_checkpointing}")
    if trainer.share_prompts and has_states(needs.policy.hf):
        print("trainer.share_prompts: off, since each completion continues the states of its own prompt")
    return fitted, judge(needs)


def judge(needs: Needs) -> int:
    """Compare what a run needs with what there is, and return the number of problems.

    Prints the table of a dry run, or a warning for each problem.
    """
    rows = [check_versions(), *check_memory(needs, ways_out(needs)), check_disk(needs)]
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


# ---- What "auto" becomes


def decide(needs: Needs, layout: RolesConfig) -> Needs:
    """Return the needs of the config without any "auto". layout: which ranks do what.

    `trainer.micro_batch_tokens` and `activation_checkpointing` become the first of `row_choices` whose peak fits the
    GPU with a margin, the last if none does, and the first on a CPU.
    """
    config = needs.config
    choices = row_choices(needs)
    if layout.num_engine_ranks:
        completions = config.completions_at_once if layout.num_trainers else config.evaluation_completions
        needs = fit_engine(needs, math.ceil(completions / config.num_engines))
    room = needs.device.gib
    if not config.roles.colocated:  # beside an engine, what a process holds is counted already
        room -= PROCESS_GIB
    for kind, tokens in choices:
        decided = needs.changed({"trainer.micro_batch_tokens": tokens, "trainer.activation_checkpointing": kind})
        if not needs.device.num_gpus or decided.peak * (1 + MARGIN_FRAC) <= room:
            break
    return decided


def row_choices(needs: Needs) -> list[tuple[str, int]]:
    """Return kinds of checkpointing and rows that "auto" chooses from, the fastest first.

    To compute blocks again is a third more work, and rows half as long are none. The last choice has the shortest rows,
    with room for the longest sequence.
    """
    config = needs.config
    trainer = config.trainer
    kinds = ("none", "logits", "selective", "full")
    if trainer.activation_checkpointing != "auto":
        kinds = (trainer.activation_checkpointing,)
    elif trainer.expert_parallel > 1:
        kinds = ("selective",)
    longest = needs.longest_row
    # a reward model was told this number (`open_reward_model`)
    if trainer.micro_batch_tokens != "auto" or config.reward.model:
        return [(kind, longest) for kind in kinds]
    shortest = config.max_sequence_tokens
    half = max(longest // 2, shortest)
    return [*itertools.product(kinds, (longest, half)), (kinds[-1], shortest)]


def fit_engine(needs: Needs, num_asked: int) -> Needs:
    """Decide vLLM's `max_num_seqs` and its cache where `generator.engine` does not say them.

    `max_num_seqs` becomes `num_asked`, the sequences that one engine gets at one time, up to MOST_NUM_SEQS; above
    MAX_NUM_SEQS only as many as the KV cache holds at half of their longest length. Sequences that grow together need
    less, unless most of them run to the limit. Then vLLM puts some off and computes them again.

    The cache holds these sequences at full length: on a CPU up to MOST_CPU_KV_CACHE_GIB, and two in any case; on a GPU
    if that is at most SMALL_CACHE_FRAC of the room for it and nothing else is cached. Otherwise vLLM takes all of that
    room.
    """
    engine = dict(needs.config.generator.engine)
    of_one = needs.sequence
    cache = needs.cache
    if not needs.device.num_gpus:
        most = max(MOST_CPU_KV_CACHE_GIB, 2 * of_one)
        cache = max(CPU_KV_CACHE_GIB, min(most, num_asked * of_one))
        cache = engine.setdefault("kv_cache_memory_bytes", int(cache * GIB)) / GIB
    number = min(num_asked, MOST_NUM_SEQS, max(MAX_NUM_SEQS, int(2 * cache / of_one)))
    num_tokens = engine.get("max_num_batched_tokens")
    if isinstance(num_tokens, int):  # of all sequences together in a step of the engine
        number = min(number, num_tokens)
    number = engine.setdefault("max_num_seqs", number)
    needed = max(LEAST_KV_CACHE_GIB, number * of_one)
    # Layers with windows or states share blocks of another size, drafts come from a model of their own, and a
    # conversation's tokens stay in the cache while a tool works
    caches_more = needs.config.environment.has_episodes or {None} != set(windows_of(needs.policy.hf))
    caches_more |= any(name.startswith("spec") or name == "num_gpu_blocks_override" for name in engine)
    if needed <= SMALL_CACHE_FRAC * cache and not caches_more:
        engine.setdefault("kv_cache_memory_bytes", int(needed * GIB))
    return needs.changed({"generator.engine": engine})


# ---- Advice


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
