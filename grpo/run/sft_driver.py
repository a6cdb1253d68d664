"""What rank 0 alone does in supervised fine-tuning: draw examples and log. As in driver.py, every rank holds one."""

import pathlib
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from grpo.config import SFTConfig
from grpo.config.recipes import as_recipe
from grpo.data.batches import make_batch
from grpo.data.held_out import load_validation
from grpo.data.prepare import load_chat_sources, texts_of, usable_chats
from grpo.data.show import show_chat
from grpo.data.streams import ChatStream, Labelled
from grpo.roles.comm import from_driver, on_driver
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.run import checkpoint
from grpo.run.failures import refuse_bad_input
from grpo.run.log import RunLog
from grpo.run.model_folder import open_model_folder
from grpo.run.run_folder import begin_run, check_run_folder, mark_run_folder
from grpo.run.step_timer import StepTimer
from grpo.types import Sample, TrainBatch

SCRIPT = "train_sft.py"  # as run.json names it


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step."""

    step: int
    model_folder: str
    held_out: list[str]
    """Names of the validation sets; one empty name if there is only one, none without validation."""
    recent_losses: list[float]
    """Of the steps before, see `stop_at_loss`."""
    checkpoint: pathlib.Path | None


class Driver:
    """Examples, decisions and the log."""

    def __init__(self, config: SFTConfig, roles: Roles, timer: StepTimer):
        self.config, self.roles, self.timer = config, roles, timer

    @from_driver
    def start(self) -> Start:
        """Refuse bad input before the model is loaded, open the run folder."""
        config = self.config
        with refuse_bad_input():
            validates = config.validation.interval > 0
            sources = load_chat_sources(config)
            read = [*config.data.all_sources, *(config.validation.held_out(config.data) if validates else [])]
            inputs = (config.model.path, *(source.path for source in read))
            starts = {"resume": config.resume, "overwrite": config.overwrite}
            check_run_folder(config.run_dir, SCRIPT, inputs, **starts)
            resume_from = checkpoint.latest_checkpoint(config.run_dir) if config.resume else None
            mark_run_folder(config.run_dir, SCRIPT)
            folder, tokenizer = open_model_folder(config, config.trainer.tensor_parallel, texts_of(sources))
            self.stream = ChatStream(usable_chats(sources, config, tokenizer), config, tokenizer)
            self.validation = load_validation(config, tokenizer) if validates else {}
            state = {"step": 0, "recent_losses": []}
            if resume_from is not None:
                state = checkpoint.read_driver_state(resume_from)
                checkpoint.check_adapters(resume_from, config.trainer)
                self.stream.load_state_dict(state["data"])
        # only now that nothing is refused any more may an earlier run be deleted
        begin_run(config.run_dir, SCRIPT, as_recipe(config), **starts)
        self.run_log = RunLog(config.metrics, config.run_dir, config.num_steps, start_step=state["step"])
        print(f"{config.num_trainers} trainer ranks; {config.run_dir}, starting at step {state['step']}", flush=True)
        return Start(
            step=state["step"],
            model_folder=folder,
            held_out=list(self.validation),
            recent_losses=state["recent_losses"],
            checkpoint=resume_from,
        )

    @on_driver
    def held_out_batch(self, name: str) -> TrainBatch:
        """A validation set laid end to end."""
        return batch_of(self.validation[name])

    @on_driver
    def next_batch(self) -> TrainBatch:
        """The step's examples laid end to end; their labels count in the loss."""
        with refuse_bad_input():  # rows that are streamed are checked as they come
            return batch_of(self.stream.draw(self.config.sequences_per_step))

    def state(self, step: int, recent_losses: list[float]) -> dict[str, Any] | None:
        """What a checkpoint after `step` steps must hold of the driver; None on other ranks. Not collective."""
        if not self.roles.is_driver:
            return None
        return {"step": step, "data": self.stream.state_dict(), "recent_losses": recent_losses}

    @on_driver
    def log(self, step: int, batch: TrainBatch, measured: StepMetrics) -> None:
        """The step's one log call, after `step` steps."""
        metrics = measured.means() | self.stream.left_out | self.timer.close_step()
        if self.config.too_long == "truncate":
            metrics["data/truncated_frac"] = batch.truncated_S.float().mean().item()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["time/step"]
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.run_log.log(step, metrics)

    @on_driver
    def log_validation(self, step: int, losses: dict[str, float]) -> None:
        """Log the loss of each validation set, and of several also their plain mean."""
        metrics = {f"validation/{name}/loss": loss for name, loss in losses.items() if name}
        metrics["validation/loss"] = sum(losses.values()) / len(losses)
        self.run_log.log_validation(step, metrics)

    @on_driver
    def finish(self) -> None:
        """Close the log."""
        self.run_log.close()
        print(f"done; everything is in {self.config.run_dir}", flush=True)


def batch_of(examples: list[Labelled]) -> TrainBatch:
    """Examples laid end to end."""
    return make_batch([Sample(torch.tensor(e.ids), torch.tensor(e.mask), truncated=e.truncated) for e in examples])


def show_examples(config: SFTConfig) -> None:
    """Print the first `config.show` examples that a run would draw, labels in colour; no run folder is touched."""
    with refuse_bad_input(), tempfile.TemporaryDirectory() as toy_dir:
        sources = load_chat_sources(config)
        _, tokenizer = open_model_folder(config, config.trainer.tensor_parallel, texts_of(sources), toy_dir)
        examples = ChatStream(usable_chats(sources, config, tokenizer), config, tokenizer).draw(config.show)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for number, (ids, mask, _) in enumerate(examples, start=1):
        console.rule(f"example {number}: {len(ids)} tokens, {sum(mask)} of them labels", align="left")
        console.print(show_chat(ids, mask, tokenizer))
