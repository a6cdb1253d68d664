"""Supervised fine-tuning in one torchrun: the shape of `train_grpo.py` with one role.

    torchrun --nproc_per_node=2 train_sft.py [RECIPE.py] [--field value ...]

Every rank is a trainer; rank 0, the driver, draws the examples and logs. The loss is the mean negative log-prob of the
answers' tokens over the whole step. Left out so far: LoRA, validation, resume.
"""

import collections
import os
import pathlib

import torch

from grpo.config import SFTConfig
from grpo.config.layout import check_world_size
from grpo.config.recipes import as_recipe, load
from grpo.data import streams as data
from grpo.data import toy
from grpo.data.packing import MicroBatch, make_batch
from grpo.models import build as models
from grpo.roles.comm import on_driver, send_batch, share
from grpo.roles.process_groups import Roles, close_roles, setup_trainers
from grpo.roles.trainer import LossFunction, Trainer
from grpo.run import checkpoint
from grpo.run.failures import refuse_bad_input, run_rank, set_place
from grpo.run.log import Ledger, RunLog
from grpo.types import TrainBatch

DEFAULT_RECIPE = str(pathlib.Path(__file__).parent / "configs" / "toy_sft.py")


def main() -> None:
    with refuse_bad_input():
        config = load(SFTConfig, DEFAULT_RECIPE)
        check_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    roles = setup_trainers(config)
    set_place(role=roles.name)
    train(config, roles)


def train(config: SFTConfig, roles: Roles) -> None:
    """Run `config.num_steps` supervised steps. Every rank calls it."""
    driver = on_driver(roles, Driver, config)
    folder = models.fetch_folder(share(driver.folder if roles.is_driver else None, roles), roles.control)
    trainer = Trainer(config.model, config.trainer, folder, config.num_steps, roles)

    ledger, recent_losses = Ledger(), collections.deque(maxlen=10)
    for step in range(config.num_steps):
        batch = send_batch(on_driver(roles, Driver.next_batch, driver), roles)  # driver -> trainers
        with ledger.phase("train"):
            stats = trainer.step(batch, answer_loss(batch)).all_metrics
            trainer.end_step()
        on_driver(roles, Driver.log, driver, step + 1, batch, stats, ledger)
        recent_losses.append(stats["loss"])  # the same on all ranks
        if len(recent_losses) == 10 and sum(recent_losses) / 10 < config.stop_at_loss:
            break

    if config.checkpoint.export:
        models.export_hf(trainer.model, pathlib.Path(config.run_dir) / "model", getattr(torch, config.model.dtype))
    on_driver(roles, Driver.finish, driver)
    close_roles(roles)


def answer_loss(batch: TrainBatch) -> LossFunction:
    """Mean negative log-prob of the answers' tokens; the denominator is the whole step's, whatever the micro-batch."""
    denominator = float(batch.num_completion_tokens)

    def loss(micro: MicroBatch, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor):
        mask_BT = micro.completion_mask_BT
        return -logprobs_BT.where(mask_BT, 0).sum() / denominator, mask_BT, {}

    return loss


class Driver:
    """Examples and the log, on rank 0. Its constructor refuses bad input before the model is loaded."""

    def __init__(self, config: SFTConfig):
        self.config = config
        with refuse_bad_input():
            rows = data.load_rows(config.data.path, config.data.name, config.data.split)
            data.check_columns(rows, [config.data.prompt_column, config.completion_column], config.data.path)
            checkpoint.find_run(config.run_dir, overwrite=config.overwrite)
            self.folder = models.resolve_folder(toy.build_if_toy(config.model.path, config.run_dir, rows, config.seed))
            models.check_folder(self.folder, config.max_sequence_tokens, config.trainer.tensor_parallel)
            self.stream = data.ChatStream(
                config.data,
                config.completion_column,
                data.load_tokenizer(self.folder),
                config.max_sequence_tokens,
                config.seed,
            )
        checkpoint.begin_run(config.run_dir, as_recipe(config), fresh=config.overwrite)
        self.run_log = RunLog(config.metrics, config.run_dir, config.num_steps)
        print(f"{as_recipe(config)}\n{config.num_trainers} trainer ranks; {config.run_dir}", flush=True)

    def next_batch(self) -> TrainBatch:
        """The step's examples laid end to end."""
        prompts, answers = zip(*self.stream.draw(self.config.sequences_per_step), strict=True)
        return make_batch(prompts, answers)

    def log(self, step: int, batch: TrainBatch, stats: dict[str, float], ledger: Ledger) -> None:
        """The step's one log call."""
        metrics = stats | ledger.close_step()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["time/step"]
        self.run_log.log(step, metrics)

    def finish(self) -> None:
        """Close the log."""
        self.run_log.close()
        print(f"done; everything is in {self.config.run_dir}", flush=True)


if __name__ == "__main__":
    run_rank(main)
