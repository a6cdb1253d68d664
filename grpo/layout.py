"""Which layout is the fastest for a recipe on these GPUs? Two sizes of a step are measured, the rest is arithmetic.

    torchrun --nproc_per_node=4 -m grpo.layout [RECIPE.py] [--field value ...]

with the flags of the run. Every rank gets every role. A step's generation, training (with the reference, if there is
one) and weight sync are timed with the run's number of completions and with twice as many, each after one that warms
up. Between the two lies a straight line for each phase, and the layouts of as many ranks are compared by it
(grpo/config/best_layout.py has the rule). Printed are all of them with their arithmetic and the flags of the one
chosen; `--roles.layout auto` does the same before a run and goes on with it. The numbers are in RUN_DIR-layout.json.

Left out: rewards, which workers compute meanwhile, and how lengths of completions will change. Nothing is trained.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from grpo.config import GRPOConfig
from grpo.config.best_layout import (
    Line,
    PhaseTimes,
    choose,
    colocated,
    layout_changes,
    layout_flags,
    possible_layouts,
    predict,
    table,
)
from grpo.config.checks import validate
from grpo.config.layout import describe_layout
from grpo.config.recipes import load
from grpo.data.batches import make_batch, sample_of, split_groups
from grpo.models.hf_folder import fetch_folder, read_hf_config
from grpo.roles.comm import add_ref_logprobs, gather_completions, send_batch, wait_for_all
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import sync_weights
from grpo.run.caches import keep_caches
from grpo.run.driver import Driver
from grpo.run.machine import check_memory, look_at_device
from grpo.run.measured_layout import layout_file, measuring_dir
from grpo.run.quiet import quiet_libraries
from grpo.run.step_timer import StepTimer
from grpo.types import Completion, Prompt, TrainBatch
from grpo.watch.failures import refuse_bad_input, run_script, set_place
from grpo.watch.stopping import end_with_launcher
from grpo.watch.watchdog import watched

DEFAULT_RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "qwen3_1_7b_gsm8k.py")


def main() -> None:
    quiet_libraries()
    end_with_launcher()
    with refuse_bad_input():
        keep_caches()
        config = load(GRPOConfig, DEFAULT_RECIPE)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        measured = measuring(config, num_ranks)
    roles = setup_roles(measured)
    set_place(role=roles.name)
    with watched(roles, config.deadlines):
        measure(config, measured, roles)


def measuring(config: GRPOConfig, num_ranks: int) -> GRPOConfig:
    """The config of the measurement: every role on every rank, and weights that stay as they are.

    Raises ValueError if that cannot work with the recipe's numbers.
    """
    config = replace(
        colocated(config, num_ranks),
        trainer=replace(config.trainer, learning_rate=0.0),
        evaluation=replace(config.evaluation, interval=0),
        checkpoint=replace(config.checkpoint, interval=0, keep_best=""),
        metrics=replace(config.metrics, tensorboard=False, wandb_project=""),
        sampling=replace(config.sampling, dynamic=False, carry_over=0),
        run_dir=str(measuring_dir(config.run_dir)),
        resume=False,
        overwrite=True,
        profile=0,
        record=False,
        replay="",
    )
    validate(config)
    return config


def measure(config: GRPOConfig, measured: GRPOConfig, roles: Roles) -> None:
    """Start all roles, time both sizes, print and write the choice. Every rank calls it."""
    driver = Driver(measured, roles, StepTimer(roles.is_driver))
    start = driver.start()
    folder = fetch_folder(start.model_folder, roles.control)
    generator = Generator(measured, folder, start.stop_token_ids, roles)
    trainer = Trainer(measured.model, start.trainer, folder, 1, roles)
    reference = None
    if roles.references:
        base = trainer.model if measured.reference_is_base else None
        reference = Reference(measured, fetch_folder(start.reference_folder, roles.control), roles, base)
    prompts = [driver.plan(step, None).prompts for step in range(2)]
    found = []
    for step_prompts in (prompts[0], prompts[0] + prompts[1]):
        for _ in range(2):  # the first one compiles
            seconds = time_step(measured, step_prompts, generator, trainer, reference, roles)
        found.append((len(step_prompts) * measured.group_size, seconds))
    if roles.is_driver:
        report(config, phase_times(measured, found), measured.roles.num_trainers, folder)
    driver.finish()
    close_roles(roles, generator.close)


def time_step(
    config: GRPOConfig,
    prompts: list[Prompt],
    generator: Generator,
    trainer: Trainer,
    reference: Reference | None,
    roles: Roles,
) -> dict[str, float]:
    """Seconds of `sync`, `generate` and `train`, each until all ranks are done. Every rank calls it."""
    seconds = {}

    def timed(name: str, action: Callable) -> object:
        wait_for_all(roles)
        began = time.perf_counter()
        result = action()
        wait_for_all(roles)
        seconds[name] = time.perf_counter() - began
        return result

    timed("sync", lambda: sync_weights(trainer, generator, 0, roles))
    completions = timed("generate", lambda: generator.generate(prompts, config.group_size))
    generator.sleep()
    batch = send_batch(batch_of(prompts, gather_completions(completions, roles), config), roles)
    timed("train", lambda: train(config, batch, trainer, reference, roles))
    return seconds


def batch_of(prompts: list[Prompt], completions: list[Completion] | None, config: GRPOConfig) -> TrainBatch | None:
    """The step's sequences, on the driver."""
    if completions is None:
        return None
    of_completions = [prompt for prompt in prompts for _ in range(config.group_size)]
    return make_batch([sample_of(*pair) for pair in zip(of_completions, completions, strict=True)])


def train(config: GRPOConfig, batch: TrainBatch, trainer: Trainer, reference: Reference | None, roles: Roles) -> None:
    """The passes that the run's steps make over a batch."""
    batch = add_ref_logprobs(batch, reference, roles)
    if config.recomputes_old_logprobs:
        trainer.logprobs(batch)
    for _ in range(config.algorithm.num_epochs):
        for mini_batch in split_groups(batch, config.group_size, config.algorithm.num_mini_batches):
            trainer.forward_backward(mini_batch, objective, StepMetrics(batch.num_sequences))
            trainer.optimizer_step()


def objective(micro, logprobs_BT, entropy_BT):
    """Any that has a gradient for every trained token; the run's own takes as long."""
    return logprobs_BT.where(micro.loss_mask_BT, 0).mean(), {}


def phase_times(measured: GRPOConfig, found: list[tuple[int, dict[str, float]]]) -> PhaseTimes:
    """The lines through two (completions of a step, seconds of its phases)."""
    num_ranks = measured.roles.num_trainers
    num_engines = num_ranks // measured.generator.tensor_parallel
    num_data_ranks = num_ranks // measured.trainer.tensor_parallel
    generate = Line.through(*((completions / num_engines, times["generate"]) for completions, times in found))
    train = Line.through(*((completions / num_data_ranks, times["train"]) for completions, times in found))
    return PhaseTimes(generate, train, min(times["sync"] for _, times in found))


def report(config: GRPOConfig, times: PhaseTimes, num_ranks: int, folder: str) -> None:
    """Print the choice with its reason, and write it. folder: the model's."""
    generate, train = times.generate, times.train
    print(
        f"generate {generate.fixed:.2f} s + {generate.per_completion:.4f} s for each completion of an engine, train "
        f"{train.fixed:.2f} s + {train.per_completion:.4f} s for each of a data-parallel rank, sync {times.sync:.2f} s"
    )
    predictions = [predict(layout, times) for layout in possible_layouts(config, num_ranks) if has_room(layout, folder)]
    chosen = choose(predictions)
    changes = layout_changes(chosen.config)
    print(f"{table(predictions, chosen)}\n{layout_flags(chosen.config)}", flush=True)
    compared = [{"changes": layout_changes(p.config), "step": p.step} for p in predictions]
    content = {"changes": changes, "times": asdict(times), "compared": compared}
    layout_file(config.run_dir).write_text(json.dumps(content, indent=1))


def has_room(config: GRPOConfig, folder: str) -> bool:
    """Whether each role fits on a GPU by arithmetic; says so if not. The colocated layout was measured."""
    device = look_at_device(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    if config.roles.colocated or not device.num_gpus:
        return True
    problems = [row for row in check_memory(config, read_hf_config(folder), device) if row.status == "problem"]
    for row in problems:
        print(f"   {describe_layout(config)}  left out, {row.check}: {row.found}", flush=True)
    return not problems


if __name__ == "__main__":
    run_script(main)
