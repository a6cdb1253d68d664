"""Supervised fine-tuning in one torchrun: the shape of `train_grpo.py`, without sampling.

    torchrun --nproc_per_node=8 train_sft.py [RECIPE.py] [--field value ...]

Every rank is a trainer; rank 0, the driver, draws the examples and logs. The loss is the mean negative log-prob of the
labels of the whole step. Labels are the tokens to learn: those that `train_on` names, by default the assistant's.
`--dry-run --show 3` prints examples with their labels in colour and stops. With `--evaluation.interval` every rank is a
generator too, which completes held-out prompts between steps, as in GRPO.
"""

from functools import partial

from grpo.config import SFTConfig
from grpo.run.command_line import read_config

CONFIG = read_config(SFTConfig) if __name__ == "__main__" else None  # before torch, so that a typo is answered at once

import torch

from grpo.metrics import StepMetrics
from grpo.roles.comm import send_batch
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import sync_weights
from grpo.run.session import Session, run
from grpo.run.sft_driver import SFTDriver
from grpo.run.start import read_sft
from grpo.types import MicroBatch, TrainBatch
from grpo.watch.failures import run_script


def main(config: SFTConfig) -> None:
    run(config, "train_sft.py", read_sft, train)


def train(config: SFTConfig, session: Session) -> None:
    """Run the supervised steps up to `config.num_steps`, from the checkpoint's step or 0. Every rank calls it."""
    roles = session.roles
    timer = session.timer
    trainer, _, generator = session.start_up()  # also evaluates before the first step
    driver = SFTDriver(session)
    held_out = {}
    if config.validation.interval:
        for source in config.validation.held_out(config.data):
            held_out[source.label] = send_batch(driver.held_out_batch(source.label), roles)  # driver -> trainers
    if held_out and session.shared.step == 0:
        with timer.startup("validating before the first step"):
            validate(driver, trainer, held_out, 0)
    if generator:
        generator.sleep()  # only if generator.sleep is set; the next sync wakes it

    ending = ""
    for step in session.steps():  # the number of steps before this one
        ending = driver.ending(step)  # a low loss, a signal, or the file `stop` in the run folder
        if ending:
            break
        batch = send_batch(driver.next_batch(config.sequences_per_step), roles)  # driver -> trainers
        metrics = StepMetrics(batch.num_sequences)
        with timer.phase("train"):
            num_labels = float(batch.loss_mask_N.sum())  # of the whole step, so micro-batches and ranks change nothing
            trainer.forward_backward(batch, partial(label_objective, denominator=num_labels), metrics)
            metrics.record(**trainer.optimizer_step())
            trainer.end_step()  # the next learning rate

        due = driver.due(step + 1, metrics)  # the same on all ranks; a low loss can make this step the last
        if due.validate:
            with timer.phase("validate"):
                validate(driver, trainer, held_out, step + 1)
        if due.evaluate:
            with timer.phase("sync"):
                sync_weights(trainer, generator, step + 1, roles)  # trainers -> generators
            with timer.phase("evaluate"):
                session.evaluate(generator, step + 1)
                generator.sleep()
        driver.log(step + 1, batch, metrics)
        if due.save:
            session.save(step + 1, trainer, driver.state)

    if ending == "stopped":
        session.save(step, trainer, driver.state)
    else:
        session.export(trainer)
    session.end()


def label_objective(
    micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor, *, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a micro-batch's part of the mean negative log-prob of the labels, and no metrics of its own."""
    return -logprobs_BT.where(micro.loss_mask_BT, 0).sum() / denominator, {}


def validate(driver: SFTDriver, trainer: Trainer, held_out: dict[str, TrainBatch], step: int) -> None:
    """Log the mean negative log-prob of each held-out set's labels. Every rank calls it."""
    losses = {}
    for name, batch in held_out.items():
        logprobs_N = trainer.logprobs(batch)  # every rank gets those of the whole set
        losses[name] = -logprobs_N[batch.loss_mask_N].double().mean().item()
    driver.log_validation(step, losses)


if __name__ == "__main__":
    run_script(partial(main, CONFIG))
