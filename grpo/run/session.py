"""The way into a run and out of it, for every script: `Session`, of which every rank holds one.

Rank 0 opens the run folder, the model's folder and the log; then every rank loads the models of its roles. A check that
every run needs belongs in `Session.open`; what one script alone checks and reads is in inputs.py.
"""

import gc
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.config import GRPOConfig, RolesConfig, SFTConfig
from grpo.config.checks import check_world_size, describe_roles, validate
from grpo.config.fields import MAX_NUM_SEQS, Config
from grpo.data import toy
from grpo.data.chat import check_template, load_tokenizer
from grpo.folder import checkpoint
from grpo.folder.run_folder import begin_run
from grpo.models import hf_folder
from grpo.models.export import export_hf
from grpo.models.hf_folder import ChatForm, fetch_folder
from grpo.models.lora import adapted_places
from grpo.report.log import RunLog
from grpo.report.rollout_metrics import evaluation_metrics
from grpo.roles.comm import from_driver, gather_completions, on_driver, wait_for_all
from grpo.roles.engine.episodes import Episodes
from grpo.roles.engine.generator import Generator
from grpo.roles.engine.vllm_engine import import_vllm
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.reward_model import RewardModel
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import sync_weights
from grpo.run.machine import fit_to_machine, tell_what_fits
from grpo.run.scorer import Scorer, check_version
from grpo.run.step_timer import StepTimer, profile_step
from grpo.types import Completion, Prompt
from grpo.watch.failures import BadInput, refuse_bad_input, set_place
from grpo.watch.stopping import forget_old_stop, obey_stop, repeat_behind_launcher, stop_reason
from grpo.watch.watchdog import watched

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SKIPPED = 3  # steps in a row without an update, which end the run
Result = TypeVar("Result")


@dataclass(frozen=True)
class Start:
    """What every rank must know before the first step. What is not needed is empty."""

    step: int
    fitted: GRPOConfig | SFTConfig  # the config, with what it leaves to the machine decided
    model_folder: str
    reference_folders: list[str]
    reward_model: str
    checkpoint: pathlib.Path | None
    stop_token_ids: list[int]
    eval_prompts: list[Prompt]


def run(
    config: Config,
    script: str,
    read: Callable[["Session"], None],
    train: Callable[[Config, "Session"], None],
    layout: RolesConfig | None = None,
) -> None:
    """Run a script on this rank: `train`, or with `dry_run` its checks alone, which `read` makes on rank 0.

    script: its name in run.json. layout: which ranks do what, by default as the config says.
    """
    if config.dry_run:
        if os.environ.get("RANK", "0") == "0":
            with refuse_bad_input(), tempfile.TemporaryDirectory() as toy_dir:
                session = Session(config, script, read, toy_dir=toy_dir)
                if hf_folder.has_config_alone(config.model.path):
                    print(f"{config.model.path} has no weights or no tokenizer: data and rewards are not checked")
                    fits = tell_what_fits(config, config.model.path)
                else:
                    read(session)
                    fits = tell_what_fits(config, session.model_folder, session.reward_folder)
            if session.scorer:
                session.scorer.pool.close()
            raise SystemExit(0 if fits else 1)
        return
    with refuse_bad_input():  # a notebook's config has met no check yet
        validate(config)
        if layout is None:
            check_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    engine_ranks, minutes = config.generator.tensor_parallel, config.deadline_minutes
    needed = (config.needs_reference and not layout, engine_ranks, minutes, bool(config.reward.model and not layout))
    gc.collect()  # a notebook's run before may have left cycles with groups, in whose end a fork of this one would hang
    roles = setup_roles(layout or config.roles, *needed)
    set_place(role=roles.name)
    with watched(roles, config.deadline_minutes):
        train(config, Session(config, script, read, layout, roles))


class Session:
    """One run, from its first check to its last line."""

    def __init__(
        self,
        config: GRPOConfig | SFTConfig,
        script: str,
        read: Callable[["Session"], None],
        layout: RolesConfig | None = None,
        roles: Roles | None = None,
        toy_dir: str = "",
    ) -> None:
        """See `run`. toy_dir: of a dry run, without roles, the one place where it may write."""
        self.config, self.script, self.roles, self.toy_dir = config, script, roles, toy_dir
        # not bound to this object: a notebook's next run would fork a child that collects the cycle, and hangs in it
        self.read, self.layout = read, layout or config.roles
        self.timer = StepTimer(roles is not None and roles.is_driver)
        # on rank 0, what `read` finds; the prompts later on all ranks
        self.saved_state: dict[str, Any] = {}  # the driver's, in the checkpoint to continue from
        self.scorer: Scorer | None = None
        self.saver: checkpoint.CheckpointSaver | None = None  # of every trainer, once its model is loaded
        self.reward_model: RewardModel | None = None  # of every learner, once it is loaded
        self.stream: Any = None  # which training draws from
        self.validation: dict[str, Any] = {}
        self.eval_prompts: list[Prompt] = []
        self.reference_folders: list[str] = []  # that of each teacher, if there are several
        self.form = ChatForm()  # of the exported folder

    # ---- before the first step, on rank 0 -------------------------------------------------------------------------

    def open(self, inputs: Iterable[str], tensor_parallel: int, texts: Iterable[str] = ()) -> None:
        """Check the run folder, find the checkpoint to continue from, open the model's folder and tokenizer.

        inputs: paths and hub names that the run reads besides its model. See `open_run_folder` and `open_model_folder`
        for the rest and for what raises ValueError.
        """
        config, read = self.config, (self.config.model.path, *inputs)
        self.checkpoint, self.saved_state = checkpoint.open_run_folder(config, self.script, read)
        self.first_step = self.saved_state.get("step", 0)
        self.model_folder, self.tokenizer = open_model_folder(config, tensor_parallel, texts, self.toy_dir)

    def start(self) -> Start:
        """Refuse bad input, then begin to write: only here may an earlier run be deleted."""
        config, trains = self.config, self.layout.num_trainers > 0
        with refuse_bad_input():
            self.read(self)
            step = self.first_step
            self.lock = begin_run(config, self.script, step)  # another run may have begun there meanwhile
            forget_old_stop(config.run_dir)
            told = replace(config, algorithm=config.algorithm.resolved) if isinstance(config, GRPOConfig) else config
            num_steps = config.num_steps if trains else 0
            self.run_log = RunLog(config.metrics, config.run_dir, num_steps, step, asdict(told))  # W&B may refuse
        self.num_skipped = 0  # in a row
        self.last_line = f"done; everything is in {config.run_dir}"
        fitted = fit_to_machine(config, self.layout, self.model_folder, self.reward_folder)
        print(f"{describe_roles(self.layout)} ranks; {config.run_dir}, starting at step {step}", flush=True)
        folders = self.model_folder, self.reference_folders, config.reward.model if self.reward_folder else ""
        stops = self.scorer.stop_token_ids if self.scorer else []
        return Start(step, fitted, *folders, self.checkpoint, stops, self.eval_prompts)

    @property
    def reward_folder(self) -> str:
        """Of the reward model, where its scores are asked for; empty elsewhere and on other ranks than 0."""
        return self.scorer.reader.folder if self.scorer and self.scorer.reader else ""

    # ---- before the first step, on every rank -----------------------------------------------------------------------

    def start_up(self) -> tuple[Trainer | None, Reference | None, Generator | None]:
        """Check everything on rank 0, then load the models of this rank's roles and the checkpoint.

        Held-out prompts are completed before the first step. Collective over `roles.control`.
        """
        config, roles, timer = self.config, self.roles, self.timer
        trainer = reference = generator = None
        if roles.generates and not roles.is_driver:  # which is busy with the checks that follow
            with timer.startup("importing vLLM"):
                import_vllm(roles)
        rewards = ", starting the reward processes" if roles.replicas else ""
        with timer.startup(f"checking data, tokenizer and model{rewards}"):
            begun = self.ask_driver(self.start)
            folder = fetch_folder(begun.model_folder, roles.control)
            reference_folders = [fetch_folder(path, roles.control) for path in begun.reference_folders]
            if begun.reward_model:
                reward_folder = fetch_folder(begun.reward_model, roles.control, scores=True)
        self.first_step = self.saved_step = begun.step
        self.eval_prompts = begun.eval_prompts
        if roles.generates:  # first, because vLLM sizes its KV cache from the free memory
            with timer.startup("starting vLLM"):
                generator = self._start_engine(begun.fitted, folder, begun.stop_token_ids)
        with timer.startup("loading the models"):
            if roles.trains:
                trainer = Trainer(config.model, begun.fitted.trainer, folder, config.num_steps, roles, config.seed)
                self.saver = checkpoint.CheckpointSaver(config)
            if roles.references and roles.has_reference:
                policy = None if config.reference_has_model else trainer.model
                ranks = config.reference_tensor_parallel
                shared = policy, config.algorithm.teacher == "policy"
                reference = Reference(config.model, config.trainer, reference_folders, ranks, roles, *shared)
            if begun.reward_model and roles.learns:
                self.reward_model = RewardModel(config.model, config.trainer, reward_folder, roles)
                if self.scorer:
                    self.scorer.reward_model = self.reward_model
        with timer.startup("waiting for the other ranks"):
            wait_for_all(roles)
        if begun.checkpoint is not None:
            with timer.startup("loading the checkpoint"):
                if trainer:
                    checkpoint.load_checkpoint(begun.checkpoint, trainer)
                if roles.replicas:
                    sync_weights(trainer, generator, begun.step, roles)
        if begun.eval_prompts and begun.step == 0:
            with timer.startup("evaluating before the first step" if roles.trainer_ranks else "evaluating"):
                self.evaluate(generator, 0)
        return trainer, reference, generator

    def _start_engine(self, config: Config, folder: str, stop_token_ids: list[int]) -> Generator:
        roles, episodes = self.roles, None
        if config.environment.enabled:
            variables, most = config.reward.environment, min(config.generator.max_num_seqs, MAX_NUM_SEQS)
            where = folder, stop_token_ids, most, variables, roles, config.turns_earn
            episodes = Episodes(config.environment, config.data, *where)
        engine = config.generator, config.model, config.data, config.seed
        return Generator(*engine, folder, stop_token_ids, roles, episodes)

    @from_driver
    def ask_driver(self, decide: Callable[..., Result], *arguments: Any) -> Result:
        """What `decide(*arguments)` says on rank 0, for every rank. Collective over `roles.control`."""
        return decide(*arguments)

    # ---- steps --------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """The steps to do, each the number of those done before; the one that `profile` names leaves a trace."""
        steps = range(self.first_step, self.config.num_steps)
        for step in profile_step(steps, self.config.profile, self.config.run_dir, self.roles):
            if self.saver and self.roles.is_driver:  # if it raises, torchrun ends the other ranks
                self.saver.raise_failure()
            yield step
            self.timer.enter("other")  # on ranks that do not log, too

    def is_stopped(self, step: int) -> bool:
        """Whether the run was asked to end after `step` steps, by a signal or a file. On rank 0 alone."""
        if reason := stop_reason(self.config.run_dir):
            self.last_line = obey_stop(reason, step, self.config.run_dir)
        return bool(reason)

    def save(self, step: int, trainer: Trainer | None, driver_state: Callable[[], dict[str, Any]] = dict) -> None:
        """Begin to save what `step` steps made, unless that was done. Training goes on meanwhile.

        `driver_state`: what else to hold, called on rank 0. Every rank calls it, last in a step: dying before the
        checkpoint is complete repeats steps, their log lines too.
        """
        if trainer and step > self.saved_step:
            with self.timer.phase("save"):
                state = {"step": step, **driver_state()} if self.roles.is_driver else None
                self.saver.save(step, trainer, state)
        self.saved_step = step

    def evaluate(self, generator: Generator | None, step: int) -> None:
        """Complete the held-out prompts, score and log; training does not notice. Collective over `roles.control`."""
        local = generator.evaluate(self.eval_prompts, self.config.evaluation) if generator else (None, None)
        self._log_evaluation([gather_completions(part, self.roles) for part in local], step)

    @partial(on_driver, scores=True)
    def _log_evaluation(self, completions: list[list[Completion]], step: int) -> None:
        """Write metrics and completions, greedy and sampled, of the weights after `step` steps."""
        scorer, scored = self.scorer, []
        for kind, of_kind in zip(("greedy", "sample"), completions, strict=True):
            scored.append([])
            if of_kind:  # perhaps no samples were asked for
                check_version(of_kind, step)
                scorer.submit(self.eval_prompts, of_kind, step)
                scored[-1] = scorer.collect("evaluation: ")
                self.run_log.evaluation_completions(step, kind, scored[-1], scorer.prompt_texts(scored[-1]))
        settings = self.config.evaluation.num_samples, scorer.pass_function, scorer.answer_format
        metrics = evaluation_metrics(*scored, *settings, self.config.reward.pass_value)
        self.run_log.log_held_out(step, metrics)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The one log call of the `step`-th step, which tells of a skipped update. On rank 0.

        Raises BadInput after MOST_SKIPPED such steps in a row.
        """
        self.run_log.log(step, metrics)
        causes = ", ".join(name.removeprefix("skipped/") for name in metrics if name.startswith("skipped/"))
        self.num_skipped = self.num_skipped + 1 if causes else 0
        if not causes:
            return
        told = f"step {step} skipped {metrics['skipped_frac']:.0%} of its update, because not finite: {causes}"
        if self.num_skipped == MOST_SKIPPED:
            raise BadInput(
                f"{told}; so did the {MOST_SKIPPED - 1} before it. The weights are those before them: lower "
                "trainer.learning_rate, or look at earlier metrics, and continue with --resume (--record keeps batches)"
            )
        print(f"warning: {told}", flush=True)

    # ---- after the last step ------------------------------------------------------------------------------------

    def export(self, trainer: Trainer | None) -> None:
        """Write the model's folder, if the run is to leave one. Collective over the trainers."""
        if self.config.checkpoint.export and trainer:
            export_hf(trainer.model, pathlib.Path(self.config.run_dir) / "model", trainer.dtype, self.form)

    def end(self, generator: Generator | None) -> None:
        """Wait for the last checkpoint, close the log and leave the groups. Collective over `roles.control`."""
        with self.timer.phase("save"):
            if self.saver:
                self.saver.finish()
        self._finish()
        close_roles(self.roles, generator.close if generator else None)

    @on_driver
    def _finish(self) -> None:
        if self.scorer:
            self.scorer.pool.close()
        self.run_log.close()
        os.close(self.lock)
        print(self.last_line, flush=True)
        repeat_behind_launcher(self.last_line)


def is_due(interval: int, step: int, is_last: bool) -> bool:
    """Whether what happens every `interval` steps, and at the end, follows the `step`-th step; 0 is never."""
    return interval > 0 and (is_last or step % interval == 0)


def open_model_folder(
    config: GRPOConfig | SFTConfig, tensor_parallel: int, texts: Iterable[str] = (), toy_dir: str = ""
) -> tuple[str, "PreTrainedTokenizerBase"]:
    """The folder (or hub name) of `model.path`, and its tokenizer, whose template was tried.

    tensor_parallel: what its heads and vocabulary must divide by. A toy model is built in `toy_dir`, by default the run
    folder; its tokenizer may need `texts`, those of the data. Raises ValueError if the folder, its model, its number of
    positions, its tokenizer or template cannot be used, or it lacks a layer that should get an adapter.
    """
    folder = toy.build_if_toy(config.model.path, toy_dir or config.run_dir, texts, config.seed)
    folder = hf_folder.resolve_folder(folder)
    hf_folder.check_folder(folder, config.max_sequence_tokens, tensor_parallel)
    adapted_places(hf_folder.read_hf_config(folder), config.trainer)
    tokenizer = load_tokenizer(folder, config.data)
    hf_folder.check_vocabulary(folder, tokenizer)
    check_template(tokenizer, config.data)
    return folder, tokenizer
