"""Supervised fine-tuning in one torchrun: the shape of `train_grpo.py`, without sampling.

    torchrun --nproc_per_node=8 train_sft.py [RECIPE.py] [--field value ...]

Every rank is a trainer; rank 0, the driver, draws the examples and logs. The loss is the mean negative log-prob of the
labels over the whole step; labels are the tokens that `train_on` names, by default what the assistant says. `--show 3`
prints examples with their labels in colour and stops. With `--evaluation.interval` every rank is a generator too, which
completes held-out prompts between steps, as in GRPO.
"""

import collections
import os
import pathlib
from functools import partial

from grpo.config import SFTConfig
from grpo.run.command_line import read_config

DEFAULT_RECIPE = pathlib.Path(__file__).parent / "configs" / "sft_llama3_1_8b.py"
CONFIG = read_config(SFTConfig, DEFAULT_RECIPE) if __name__ == "__main__" else None  # a typo does not wait for torch

import torch

from grpo.folder import checkpoint
from grpo.models.export import export_hf
from grpo.models.hf_folder import fetch_folder
from grpo.roles.comm import send_batch
from grpo.roles.generator import Generator
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles, close_roles, setup_trainers
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import sync_weights
from grpo.run.profiler import profile_step
from grpo.run.scorer import evaluate
from grpo.run.sft_driver import Driver, Start, show_examples
from grpo.run.step_timer import StepTimer
from grpo.types import MicroBatch, TrainBatch
from grpo.watch.failures import run_script, set_place
from grpo.watch.watchdog import watched

STOP_WINDOW = 10  # steps whose mean loss `stop_at_loss` looks at


def main(config: SFTConfig) -> None:
    if config.show:
        if os.environ.get("RANK", "0") == "0":
            show_examples(config)
        return
    roles = setup_trainers(config)
    set_place(role=roles.name)
    with watched(roles, config.deadlines):
        train(config, roles)


def train(config: SFTConfig, roles: Roles) -> None:
    """Run the supervised steps up to `config.num_steps`, from the checkpoint's or from 0. Every rank calls it."""
    timer = StepTimer(roles.is_driver)
    driver = Driver(config, roles, timer)
    start, trainer, generator, held_out = start_up(config, driver, timer, roles)
    saver = checkpoint.Saver(config.run_dir, config.checkpoint, roles.saving)

    stopped, saved_step = False, start.step
    recent_losses = collections.deque(start.recent_losses, maxlen=STOP_WINDOW)  # the same on all ranks
    for step in profile_step(range(start.step, config.num_steps), config.profile, config.run_dir, roles):
        if is_learned(recent_losses, config):
            break
        if stopped := driver.stops(step):  # by a signal, or the file `stop` in the run folder
            if step > saved_step:
                saver.save(step, trainer, driver.state(step, list(recent_losses)))
            break
        batch = send_batch(driver.next_batch(), roles)  # driver -> trainers
        metrics = StepMetrics(batch.num_sequences)
        with timer.phase("train"), timer.compilation_in_startup():
            denominator = float(batch.loss_mask_N.sum())  # the whole step's, whatever the micro-batch
            trainer.forward_backward(batch, partial(label_objective, denominator=denominator), metrics)
            metrics.record(**trainer.optimizer_step())
            trainer.schedule.step()
        recent_losses.append(metrics.means()["loss"])

        is_last = step + 1 == config.num_steps or is_learned(recent_losses, config)
        if held_out and (is_last or is_due(step + 1, config.validation.interval)):
            with timer.phase("validate"):
                validate(driver, trainer, held_out, step + 1)
        if generator and (is_last or is_due(step + 1, config.evaluation.interval)):
            with timer.phase("sync"):
                sync_weights(trainer, generator, step + 1, roles)
            with timer.phase("evaluate"):
                evaluate(driver, generator, start.eval_prompts, config.evaluation, step + 1, roles)
                generator.sleep()  # only if generator.sleep is set; the next sync wakes it
        driver.log(step + 1, batch, metrics)
        if checkpoint.saves(config.checkpoint, step + 1, is_last):  # dying before it is complete repeats the step
            with timer.phase("save"):
                saver.save(step + 1, trainer, driver.state(step + 1, list(recent_losses)))
            saved_step = step + 1

    if config.checkpoint.export and not stopped:
        export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", trainer.dtype, start.form)
    saver.wait()  # for what threads still write with checkpoint.in_background
    driver.finish()
    close_roles(roles, generator.close if generator else None)


def label_objective(
    micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor, *, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of the mean negative log-prob of the labels."""
    return -logprobs_BT.where(micro.loss_mask_BT, 0).sum() / denominator, {}


def validate(driver: Driver, trainer: Trainer, held_out: dict[str, TrainBatch], step: int) -> None:
    """Log the mean negative log-prob of the labels of each held-out set. Every rank calls it."""
    losses = {}
    for name, batch in held_out.items():
        logprobs_N = trainer.logprobs(batch)  # of the whole set, on every rank
        losses[name] = -logprobs_N[batch.loss_mask_N].double().mean().item()
    driver.log_validation(step, losses)


def is_due(step: int, interval: int) -> bool:
    """Whether something that is done every `interval` steps, 0 for never, is done after `step` steps."""
    return interval > 0 and step % interval == 0


def is_learned(recent_losses: collections.deque[float], config: SFTConfig) -> bool:
    """Whether the mean loss of the last STOP_WINDOW steps is below `stop_at_loss`."""
    return len(recent_losses) == STOP_WINDOW and sum(recent_losses) / STOP_WINDOW < config.stop_at_loss


def start_up(
    config: SFTConfig, driver: Driver, timer: StepTimer, roles: Roles
) -> tuple[Start, Trainer, Generator | None, dict[str, TrainBatch]]:
    """Check everything on rank 0, then load the model. Every rank calls it."""
    generator = None
    with timer.startup("checking data, tokenizer and model"):
        start = driver.start()
        folder = fetch_folder(start.model_folder, roles.control)
    if config.evaluation.interval:
        with timer.startup("starting vLLM"):  # before the trainer, because it sizes its KV cache from the free memory
            generator = Generator(
                config.generator, config.model, config.data, config.seed, folder, start.stop_token_ids, roles
            )
    with timer.startup("loading the model"):
        trainer = Trainer(config.model, start.trainer, folder, config.num_steps, roles, config.seed)
    held_out = {name: send_batch(driver.held_out_batch(name), roles) for name in start.held_out}
    if start.checkpoint is not None:
        with timer.startup("loading the checkpoint"):
            checkpoint.load_checkpoint(start.checkpoint, trainer)
    if held_out and start.step == 0:
        with timer.startup("validating before the first step"):
            validate(driver, trainer, held_out, 0)
    if generator:
        if start.step == 0:
            with timer.startup("evaluating before the first step"):
                evaluate(driver, generator, start.eval_prompts, config.evaluation, 0, roles)
        generator.sleep()
    timer.close_startup(roles)
    return start, trainer, generator, held_out


if __name__ == "__main__":
    run_script(partial(main, CONFIG))
