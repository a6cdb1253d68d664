"""Supervised fine-tuning in one torchrun: the shape of `train_grpo.py` with one role.

    torchrun --nproc_per_node=2 train_sft.py [RECIPE.py] [--field value ...]

Every rank is a trainer; rank 0, the driver, draws the examples and logs. The loss is the mean negative log-prob of the
answers' tokens over the whole step. Left out so far: validation, resume.
"""

import collections
import pathlib
from functools import partial

from grpo.config import SFTConfig
from grpo.run.command_line import read_config

DEFAULT_RECIPE = pathlib.Path(__file__).parent / "configs" / "toy_sft.py"
CONFIG = read_config(SFTConfig, DEFAULT_RECIPE) if __name__ == "__main__" else None  # a typo does not wait for torch

import torch

from grpo.config.recipes import as_recipe
from grpo.data import toy
from grpo.data.batches import make_batch
from grpo.data.chat import check_template, load_tokenizer
from grpo.data.prepare import load_sources, texts_of, usable_chats
from grpo.data.streams import ChatStream
from grpo.models import hf_folder
from grpo.models.export import export_hf
from grpo.roles.comm import from_driver, on_driver, send_batch
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles, close_roles, setup_trainers
from grpo.roles.trainer import Trainer
from grpo.run.failures import refuse_bad_input, run_rank, set_place
from grpo.run.log import RunLog
from grpo.run.run_folder import begin_run, check_run_folder, mark_run_folder
from grpo.run.step_timer import StepTimer
from grpo.types import MicroBatch, Sample, TrainBatch

SCRIPT = pathlib.Path(__file__).name  # as run.json names it


def main(config: SFTConfig) -> None:
    roles = setup_trainers()
    set_place(role=roles.name)
    train(config, roles)


def train(config: SFTConfig, roles: Roles) -> None:
    """Run `config.num_steps` supervised steps. Every rank calls it."""
    timer = StepTimer(roles.is_driver)
    driver = Driver(config, roles, timer)
    with timer.startup("checking data, tokenizer and model"):
        folder = hf_folder.fetch_folder(driver.start(), roles.control)
    with timer.startup("loading the model"):
        trainer = Trainer(config.model, config.trainer, folder, config.num_steps, roles)

    recent_losses = collections.deque(maxlen=10)
    for step in range(config.num_steps):
        batch = send_batch(driver.next_batch(), roles)  # driver -> trainers
        metrics = StepMetrics(batch.num_sequences)
        with timer.phase("train"), timer.compilation_in_startup():
            denominator = float(batch.loss_mask_N.sum())  # the whole step's, whatever the micro-batch
            trainer.forward_backward(batch, partial(answer_objective, denominator=denominator), metrics)
            metrics.record(**trainer.optimizer_step())
            trainer.schedule.step()
        driver.log(step + 1, batch, metrics)
        recent_losses.append(metrics.means()["loss"])  # the same on all ranks
        if len(recent_losses) == 10 and sum(recent_losses) / 10 < config.stop_at_loss:
            break

    if config.checkpoint.export:
        export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", trainer.dtype)
    driver.finish()
    close_roles(roles)


def answer_objective(
    micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor, *, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One micro-batch's part of the mean negative log-prob of the answers' tokens."""
    return -logprobs_BT.where(micro.loss_mask_BT, 0).sum() / denominator, {}


class Driver:
    """Examples and the log, on rank 0; every rank calls its methods."""

    def __init__(self, config: SFTConfig, roles: Roles, timer: StepTimer):
        self.config, self.roles, self.timer = config, roles, timer

    @from_driver
    def start(self) -> str:
        """Refuse bad input before the model is loaded, open the run folder; returns the model's folder or hub name."""
        config = self.config
        with refuse_bad_input():
            data = config.data
            sources = load_sources(data, config.completion_column)
            inputs = (config.model.path, *(source.path for source in data.all_sources))
            check_run_folder(config.run_dir, SCRIPT, inputs, overwrite=config.overwrite)
            mark_run_folder(config.run_dir, SCRIPT)
            folder = toy.build_if_toy(config.model.path, config.run_dir, texts_of(sources), config.seed)
            folder = hf_folder.resolve_folder(folder)
            hf_folder.check_folder(folder, config.max_sequence_tokens, config.trainer.tensor_parallel)
            tokenizer = load_tokenizer(folder, data)
            check_template(tokenizer, data)
            self.stream = ChatStream(usable_chats(sources, config, tokenizer), config, tokenizer)
        begin_run(config.run_dir, SCRIPT, as_recipe(config), overwrite=config.overwrite)
        self.run_log = RunLog(config.metrics, config.run_dir, config.num_steps)
        print(f"{config.num_trainers} trainer ranks; {config.run_dir}", flush=True)
        return folder

    @on_driver
    def next_batch(self) -> TrainBatch:
        """The step's examples laid end to end; the answers' tokens count in the loss."""
        samples = []
        for prompt, answer in self.stream.draw(self.config.sequences_per_step):
            is_answer_T = torch.arange(len(prompt) + len(answer)) >= len(prompt)
            samples.append(Sample(torch.tensor([*prompt, *answer]), is_answer_T))
        return make_batch(samples)

    @on_driver
    def log(self, step: int, batch: TrainBatch, measured: StepMetrics) -> None:
        """The step's one log call."""
        metrics = measured.means() | self.timer.close_step()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["time/step"]
        self.run_log.log(step, metrics)

    @on_driver
    def finish(self) -> None:
        """Close the log."""
        self.run_log.close()
        print(f"done; everything is in {self.config.run_dir}", flush=True)


if __name__ == "__main__":
    run_rank(partial(main, CONFIG))
