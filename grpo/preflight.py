"""Will it run? What a run needs, looked at in under a minute, before anything large is loaded.

    python -m grpo.preflight RECIPE.py [--field value ...]                                     what one process can see
    torchrun --nproc_per_node=8 -m grpo.preflight RECIPE.py [--field value ...]                and the process groups

A recipe of GRPO or SFT, with the flags of the run. Shown is a table: versions, GPUs, bandwidth of each process group,
memory by arithmetic, disk, run folder, loss, rewards, data, model and tokenizer, one dry reward call and, with
code_reward, the sandbox. Data, model and rewards go through the checks with which the run itself starts. Nothing is
written to the run folder. A hub model that is not in the cache is downloaded, as the run would. Exit code 1 if there is
a problem. Left out: starting vLLM, and a forward.
"""

import contextlib
import io
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.layout import check_world_size, describe_layout
from grpo.config.recipes import load
from grpo.models.hf_folder import read_hf_config
from grpo.roles.bandwidth import Bandwidth, measure_groups
from grpo.roles.process_groups import close_roles, setup_roles, setup_trainers
from grpo.run.machine import Device, Row, check_disk, check_gpus, check_memory, check_versions, look_at_device
from grpo.run.quiet import quiet_libraries
from grpo.text import printable
from grpo.types import Completion, Prompt
from grpo.watch.failures import refuse_bad_input, run_rank

if TYPE_CHECKING:
    from grpo.run.scorer import Scorer

DEFAULT_RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "qwen3_1_7b_gsm8k.py")
# Between GPUs; below it a step waits for the network, which is then probably not the one that was meant.
SLOW_GIB_PER_SECOND = 1.0
MADE_UP = "This is no answer."  # what the dry call scores
COLORS = {"ok": "green", "problem": "bold red", "not checked": "yellow"}


@dataclass(frozen=True)
class Seen:
    """What one rank sees."""

    device: Device
    bandwidths: list[Bandwidth]


@dataclass
class Report:
    """The rows so far."""

    rows: list[Row] = field(default_factory=list)

    def check(self, name: str, function: Callable[..., Any], *needs: Any, say: Callable[[Any], str] = str) -> Any:
        """The value of function(*needs), None if it raises or if one of `needs` is None.

        Adds a row with what it printed, else what `say` makes of the value. An error's text is what was found and,
        after its last semicolon, the way out, as everywhere in this project.
        """
        if any(need is None for need in needs):
            self.rows.append(Row(name, "not checked", "", "solve the problem above first"))
            return None
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                value = function(*needs)
        except Exception as error:  # a user's file may raise anything, and the other rows are wanted too
            refused = isinstance(error, ValueError | OSError | RuntimeError)
            found, _, to_do = (str(error) if refused else f"{type(error).__name__}: {error}").rpartition("; ")
            self.rows.append(Row(name, "problem", found or to_do, to_do if found else ""))
            return None
        self.rows.append(Row(name, "ok", printed.getvalue().strip() or say(value)))
        return value


def main(arguments: list[str]) -> int:
    """Print the table on rank 0; returns the exit code."""
    start, is_first, report = time.perf_counter(), os.environ.get("RANK", "0") == "0", Report()
    with refuse_bad_input():
        config = load((GRPOConfig, SFTConfig), DEFAULT_RECIPE, arguments)
        if isinstance(config, GRPOConfig) and config.replay:
            raise ValueError("a replay samples nothing and is not looked at here; leave --replay out")
    seen = look_at_ranks(config, report)
    if not is_first:
        return 0
    report.rows.insert(0, check_versions())
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE")
    device = min((one.device for one in seen), key=lambda device: device.free_gib)
    report.rows.append(check_gpus(config, device, int(local_ranks) if local_ranks else None))
    report.rows += check_bandwidths([bandwidth for one in seen for bandwidth in one.bandwidths])
    with tempfile.TemporaryDirectory() as toy_dir:
        check_inputs(report, config, device, toy_dir)
    show(report.rows, time.perf_counter() - start)
    return int(any(row.status == "problem" for row in report.rows))


def look_at_ranks(config: GRPOConfig | SFTConfig, report: Report) -> list[Seen]:
    """What each rank sees; under torchrun with the layout's process groups, which are closed again.

    Every rank calls it.
    """
    name = f"{config.num_trainers} trainer" if isinstance(config, SFTConfig) else describe_layout(config)
    device = look_at_device(int(os.environ.get("LOCAL_RANK", "0")))  # before this rank's groups take memory
    if "RANK" not in os.environ:
        report.rows.append(Row("ranks", "ok", f"{name}; without torchrun their groups are not looked at"))
        return [Seen(device, [])]
    world_size = int(os.environ["WORLD_SIZE"])
    if report.check("ranks", lambda: check_world_size(config, world_size) or name) is None:
        return [Seen(device, [])]
    roles = setup_trainers(config) if isinstance(config, SFTConfig) else setup_roles(config)
    seen: list[Any] = [None] * world_size
    dist.all_gather_object(seen, Seen(device, measure_groups(roles)), group=roles.control)
    close_roles(roles)
    return seen


def check_bandwidths(found: list[Bandwidth]) -> list[Row]:
    """One row for each kind of group, with its slowest rank. On CPUs nothing is too slow."""
    rows = []
    for group in dict.fromkeys(bandwidth.group for bandwidth in found):
        slowest = min((b for b in found if b.group == group), key=lambda bandwidth: bandwidth.gib_per_second)
        told = (
            f"{slowest.gib_per_second:.2f} GiB/s among {slowest.num_ranks} ranks on {slowest.device}, all-reduce of "
            f"{slowest.num_bytes / 2**20:.0f} MiB in {slowest.seconds * 1000:.1f} ms"
        )
        is_ok = slowest.device == "cpu" or slowest.gib_per_second >= SLOW_GIB_PER_SECOND
        to_do = "NCCL_DEBUG=INFO says which network NCCL takes; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name another"
        rows.append(Row.of(f"bandwidth, {group}", is_ok, told, to_do))
    return rows


def check_inputs(report: Report, config: GRPOConfig | SFTConfig, device: Device, toy_dir: str) -> None:
    """Add a row for each thing that a run reads, by the functions that a driver starts with.

    toy_dir: where a toy model is built.
    """
    # here, because only rank 0 needs them, and each rank that imports them takes seconds of the host's cores
    from grpo.data.prepare import load_chat_sources, load_sources, texts_of
    from grpo.run.model_folder import open_model_folder
    from grpo.workers.programs import check_programs

    sft = isinstance(config, SFTConfig)
    report.check("run folder", partial(_check_run_folder, config))
    if "code_reward" in config.reward.functions and not (sft and not config.evaluation.interval):
        report.check("programs", partial(check_programs, config.reward.allow_without_landlock))
    sources = report.check("data", lambda: load_chat_sources(config) if sft else load_sources(config.data), say=_rows)
    tensor_parallel = config.trainer.tensor_parallel if sft else config.largest_tensor_parallel
    opened = report.check(
        "model, tokenizer",
        lambda: open_model_folder(config, tensor_parallel, texts_of(sources or []), toy_dir),
        say=lambda opened: f"{opened[0]}: {len(opened[1]):,} tokens",
    )
    if opened is None:
        report.rows.append(Row("memory, disk", "not checked", "", "solve the problem above first"))
    else:
        hf = read_hf_config(opened[0])
        report.rows += [*check_memory(config, hf, device), check_disk(config, hf)]
    (_check_sft if sft else _check_grpo)(report, config, sources, opened)


def _rows(sources: list) -> str:
    return "; ".join(f"{rows.source.text}: {len(rows.rows):,} rows, {len(rows.usable):,} usable" for rows in sources)


def _check_run_folder(config: GRPOConfig | SFTConfig) -> str:
    from grpo.folder.run_folder import check_run_folder

    script = "train_sft.py" if isinstance(config, SFTConfig) else "train_grpo.py"
    inputs = (config.model.path, *(source.path for source in config.data.all_sources))
    check_run_folder(config.run_dir, script, inputs, resume=config.resume, overwrite=config.overwrite)
    return config.run_dir


def _check_grpo(report: Report, config: GRPOConfig, sources: list | None, opened: tuple | None) -> None:
    from grpo.algorithm.trial import try_algorithm
    from grpo.data.prepare import reward_columns, usable_prompts
    from grpo.data.streams import PromptStream
    from grpo.models import hf_folder
    from grpo.run.scorer import Scorer, check_functions, held_out_prompts

    def functions() -> str:
        check_functions(config, reward_columns(sources) if config.data.row and sources else None)
        return ", ".join(config.reward.functions) or "none"

    def reference(opened: tuple) -> str:
        folder = hf_folder.resolve_folder(config.model.reference_path)
        hf_folder.check_folder(folder, config.max_sequence_tokens, config.reference_tensor_parallel)
        hf_folder.check_reference(folder, *opened)
        return folder

    def first_prompt(sources: list, opened: tuple) -> Prompt:
        return PromptStream(usable_prompts(sources, config, opened[1]), config, opened[1]).draw(1)[0]

    report.check("loss", lambda: try_algorithm(config.algorithm), say=lambda _: config.algorithm.loss)
    report.check("reward functions", functions)
    if config.needs_reference and config.model.reference_path:
        report.check("reference", reference, opened)
    drawn = report.check("prompts", first_prompt, sources, opened)
    if config.evaluation.interval:
        report.check("held-out prompts", lambda opened: held_out_prompts(config, opened[1]), opened)
    scorer = report.check("reward processes", lambda opened, _: Scorer(config, *opened), opened, drawn)
    report.check("dry reward call", partial(dry_call, config.group_size), scorer, drawn)


def _check_sft(report: Report, config: SFTConfig, sources: list | None, opened: tuple | None) -> None:
    from grpo.data.held_out import load_validation
    from grpo.data.prepare import usable_chats
    from grpo.run.model_folder import learned_form
    from grpo.run.sft_driver import open_evaluation

    report.check("examples", lambda sources, opened: usable_chats(sources, config, opened[1]), sources, opened)
    if config.validation.interval:
        report.check("validation", lambda opened: load_validation(config, opened[1]), opened)
    if config.evaluation.interval:
        evaluation = report.check(
            "evaluation", lambda opened: open_evaluation(config, *opened, learned_form(config, opened[1])), opened
        )
        scorer, prompts = evaluation or (None, None)
        report.check("dry reward call", lambda scorer, prompts: dry_call(1, scorer, prompts[0]), scorer, prompts)


def dry_call(group_size: int, scorer: "Scorer", prompt: Prompt) -> str:
    """Score a group of made-up completions in the reward processes, and end those.

    Returns the values in words; raises ValueError if a function failed.
    """
    ids_T = torch.tensor(scorer.tokenizer.encode(MADE_UP, add_special_tokens=False))
    completion = Completion.of(ids_T, torch.zeros(len(ids_T)), truncated=False)
    start = time.perf_counter()
    try:
        scorer.submit([prompt], [completion] * group_size, step=1)
        rollout = scorer.pool.collect()[0]
    finally:
        scorer.pool.close()
    if rollout.failures:
        told = ", ".join(f"{name}: {why}" for name, why in rollout.failures.items())
        raise ValueError(f"{told}; python -m grpo.check_reward shows what a function does on rows of the data")
    values = ", ".join(f"{name} {value}" for name, value in rollout.rewards.items())
    return f"{MADE_UP!r} earns {values or 'nothing'} ({time.perf_counter() - start:.2f} s for {group_size})"


def show(rows: list[Row], seconds: float) -> None:
    """Print the table."""
    table = Table("check", "", "found", "what to do", title_justify="left")
    for row in rows:
        cells = [Text(row.check), Text(row.status, style=COLORS[row.status])]
        table.add_row(*cells, Text(printable(row.found)), Text(printable(row.to_do)))
    console = Console(highlight=False)
    console.print(table)
    problems = sum(row.status == "problem" for row in rows)
    console.print(f"{len(rows)} checks, {problems} problems, {seconds:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["--help"], ["-h"]):
        print(__doc__)
        sys.exit(2 if len(sys.argv) == 1 else 0)
    quiet_libraries()
    sys.exit(run_rank(partial(main, sys.argv[1:])))
