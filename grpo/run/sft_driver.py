"""What rank 0 alone does in supervised fine-tuning: draw examples, score held-out completions, log.

As in driver.py, every rank holds one.
"""

import pathlib
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from grpo.config import SFTConfig, TrainerConfig
from grpo.config.generation import generating
from grpo.config.recipes import change
from grpo.data.batches import make_batch
from grpo.data.draw_ahead import DrawAhead
from grpo.data.held_out import load_validation
from grpo.data.prepare import load_chat_sources, texts_of, usable_chats
from grpo.data.show import show_chat
from grpo.data.streams import ChatStream, Labelled
from grpo.folder.resume import begin, open_run_folder, resumed_stream
from grpo.folder.run_folder import unlock_run_folder
from grpo.models import hf_folder
from grpo.models.hf_folder import ChatForm
from grpo.report.log import RunLog
from grpo.roles import gpu_memory
from grpo.roles.comm import from_driver, on_driver
from grpo.roles.metrics import StepMetrics
from grpo.roles.process_groups import Roles
from grpo.run.machine import fit_to_machine
from grpo.run.model_folder import learned_form, open_model_folder
from grpo.run.profiler import check_profile
from grpo.run.scorer import Scorer, check_functions, held_out_prompts
from grpo.run.skipped import SkippedSteps
from grpo.run.step_timer import StepTimer
from grpo.types import Completion, Prompt, Sample, TrainBatch
from grpo.watch.failures import refuse_bad_input
from grpo.watch.stopping import forget_old_stop, obey_stop, stop_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRIPT = "train_sft.py"  # as run.json names it


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step."""

    step: int
    trainer: TrainerConfig
    """The config's, fitted to the machine."""
    model_folder: str
    held_out: list[str]
    """Names of the validation sets; one empty name if there is only one, none without validation."""
    recent_losses: list[float]
    """Of the steps before, see `stop_at_loss`."""
    form: ChatForm
    """For the exported folder."""
    eval_prompts: list[Prompt]
    """Empty without evaluation, and so are these:"""
    stop_token_ids: list[int]
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
            validates, evaluates = config.validation.interval > 0, config.evaluation.interval > 0
            if evaluates:
                check_functions(generating(config, config.num_trainers))
            sources = load_chat_sources(config)
            read = [*config.data.all_sources, *(config.validation.held_out(config.data) if validates else [])]
            read += config.evaluation.held_out(config.data) if evaluates else []
            inputs = (config.model.path, *(source.path for source in read))
            opened = open_run_folder(config, SCRIPT, inputs)
            folder, tokenizer = open_model_folder(config, config.trainer.tensor_parallel, texts_of(sources))
            form = learned_form(config, tokenizer)
            rows = usable_chats(sources, config, tokenizer)
            stream = resumed_stream(lambda: ChatStream(rows, config, tokenizer), opened, config.allow_changes)
            self.stream = DrawAhead(stream)
            self.validation = load_validation(config, tokenizer) if validates else {}
            check_profile(config.profile, opened.step)
            self.scorer, eval_prompts = open_evaluation(config, folder, tokenizer, form) if evaluates else (None, [])
        # only now that nothing is refused any more may an earlier run be deleted
        begin(config, SCRIPT, opened)
        trainer = fit_to_machine(config, folder)
        forget_old_stop(config.run_dir)
        self.last_line = f"done; everything is in {config.run_dir}"
        self.run_log = RunLog(
            config.metrics, config.run_dir, config.num_steps, opened.step, config.warnings, asdict(config)
        )
        self.skipped = SkippedSteps(config.run_dir)
        print(f"{config.num_trainers} trainer ranks; {config.run_dir}, starting at step {opened.step}", flush=True)
        return Start(
            step=opened.step,
            trainer=trainer,
            model_folder=folder,
            held_out=list(self.validation),
            recent_losses=opened.state.get("recent_losses", []),
            form=form,
            eval_prompts=eval_prompts,
            stop_token_ids=self.scorer.stop_token_ids if self.scorer else [],
            checkpoint=opened.checkpoint,
        )

    @on_driver
    def held_out_batch(self, name: str) -> TrainBatch:
        """A validation set laid end to end."""
        return batch_of(self.validation[name])

    @from_driver
    def stops(self, step: int) -> bool:
        """Whether the run was asked to stop after `step` steps."""
        if reason := stop_reason(self.config.run_dir):
            self.last_line = obey_stop(reason, step, self.config.run_dir)
        return bool(reason)

    @on_driver
    def next_batch(self) -> TrainBatch:
        """The step's examples laid end to end; their labels count in the loss. Those of the next are read meanwhile."""
        with refuse_bad_input():  # rows that are streamed are checked as they come
            examples = self.stream.draw(self.config.sequences_per_step)
        self.stream.begin(self.config.sequences_per_step)
        return batch_of(examples)

    def state(self, step: int, recent_losses: list[float]) -> dict[str, Any] | None:
        """What a checkpoint after `step` steps must hold of the driver; None on other ranks. Not collective."""
        if not self.roles.is_driver:
            return None
        return {"step": step, "data": self.stream.state_dict(), "recent_losses": recent_losses}

    @on_driver
    def log(self, step: int, batch: TrainBatch, measured: StepMetrics) -> None:
        """The step's one log call, after `step` steps."""
        metrics = measured.means() | self.stream.metrics() | self.timer.close_step()
        if self.config.too_long == "truncate":
            metrics["data/truncated_frac"] = batch.truncated_S.float().mean().item()
        metrics["tokens_per_second"] = batch.num_tokens / metrics["time/step"]
        if torch.cuda.is_available():
            metrics["memory/peak_gib"] = gpu_memory.peak_bytes() / 2**30
        self.run_log.log(step, metrics)
        self.skipped.look(step, metrics, batch)

    @on_driver
    def log_validation(self, step: int, losses: dict[str, float]) -> None:
        """Log the loss of each validation set, and of several also their plain mean."""
        metrics = {f"validation/{name}/loss": loss for name, loss in losses.items() if name}
        metrics["validation/loss"] = sum(losses.values()) / len(losses)
        self.run_log.log_validation(step, metrics)

    @on_driver
    def log_evaluation(
        self, prompts: list[Prompt], greedy: list[Completion], samples: list[Completion], step: int
    ) -> None:
        """Score held-out completions and log them."""
        self.scorer.log_evaluation(self.run_log, prompts, greedy, samples, step)

    @on_driver
    def finish(self) -> None:
        """Close the log and end the reward processes."""
        if self.scorer:
            self.scorer.pool.close()
        self.run_log.close()
        unlock_run_folder(self.config.run_dir)
        print(self.last_line, flush=True)


def open_evaluation(
    config: SFTConfig, folder: str, tokenizer: "PreTrainedTokenizerBase", form: ChatForm
) -> tuple[Scorer, list[Prompt]]:
    """What scores held-out completions, and their prompts; answers end as those of the exported folder (`form`).

    Raises ValueError if there are no rows that rewards can judge, or the model is too short for the lengths.
    """
    generation, data = generating(config, config.num_trainers), config.data
    hf_folder.check_folder(folder, generation.max_sequence_tokens, generation.generator.tensor_parallel)
    ends = (*generation.generator.stop_token_ids, *form.end_token_ids)
    try:
        prompts = held_out_prompts(generation, tokenizer)
    except ValueError as error:
        raise ValueError(
            f"evaluation reads rows as GRPO does, prompts from data.prompt_column={data.prompt_column} and what "
            f"rewards get from data.answer_column={data.answer_column} and data.columns: {error}"
        ) from error
    return Scorer(change(generation, {"generator.stop_token_ids": ends}), folder, tokenizer), prompts


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
