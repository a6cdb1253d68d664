"""The way into a run and out of it, for every script: `Session`, of which every rank holds one.

Rank 0 reads what the run starts from (start.py), and opens the run folder and the log. Then every rank loads the models
of its roles.
"""

import contextlib
import gc
import inspect
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo import features
from grpo.config import RolesConfig
from grpo.config.checks import check_world_size, describe_roles, num_processes, validate
from grpo.config.fields import REWARD_MODEL, Config
from grpo.config.recipes import as_recipe, written_fields
from grpo.config.user_files import own_files
from grpo.folder import checkpoint
from grpo.folder.run_folder import CONFIG, FILES, SCRIPT, begin_run
from grpo.folder.was_read import READ, checksum_of
from grpo.models.export import export_hf
from grpo.models.hf_folder import ChatForm, fetch_folder, has_config_alone
from grpo.report.log import RunLog
from grpo.report.rollout_metrics import evaluation_metrics
from grpo.roles.comm import from_driver, gather_rollouts, on_driver, wait_for_all
from grpo.roles.engine.generator import Generator
from grpo.roles.engine.vllm_engine import import_vllm
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.roles.reference import Reference
from grpo.roles.trainer import Trainer
from grpo.roles.weight_sync import check_version, sync_weights
from grpo.run.policy import read_shape
from grpo.run.saved import Saved, warn_of_secrets
from grpo.run.scorer import passing_parts
from grpo.run.start import Start
from grpo.types import Prompt, Requests, Rollout
from grpo.watch.failures import BadInput, here, refuse_bad_input, set_place, show_lines_at_once
from grpo.watch.step_timer import StepTimer
from grpo.watch.stopping import forget_old_stop, hold_signals
from grpo.watch.watchdog import watched

Read = Callable[[Config, str, str], Start]
"""Config, the script's name, the folder in which a dry run may build a model -> what the run starts from."""


@dataclass(frozen=True)
class Shared:
    """What every rank must know of the start. It is small, and can be pickled."""

    config: Any
    """The run's, with what it leaves to the machine decided."""
    checkpoint: pathlib.Path | None
    """The one to continue from."""
    step: int
    """Number of steps that were done when it was saved."""
    models: dict[str, str]
    """Folder or hub name of `policy`, `reference` and `reward model`, empty if there is none."""
    form: ChatForm
    stop_token_ids: Sequence[int]
    held_out: Sequence[Prompt]


def run(
    config: Config,
    script: str,
    read: Read,
    train: Callable[[Config, "Session"], None],
    layout: RolesConfig | None = None,
) -> None:
    """Run a script on this rank: `train`, or with `dry_run` its checks alone.

    script: its name in run.json. layout: which ranks do what, by default as the config says.
    """
    show_lines_at_once()
    if config.dry_run:
        if os.environ.get("RANK", "0") == "0":
            fits = dry_run(config, script, read)
            raise SystemExit(0 if fits else 1)
        return
    with refuse_bad_input():  # a notebook's config has met no check yet
        validate(config)
        if layout is None:
            check_world_size(config, num_processes())
    gc.collect()  # a notebook's run before may have left cycles with groups, in whose end a fork of this one would hang
    roles = setup_roles(
        layout or config.roles,
        needs_reference=config.needs_reference and layout is None,
        engine_ranks=config.generator.tensor_parallel,
        deadline_minutes=config.deadline_minutes,
        needs_reward_model=bool(config.reward.model) and layout is None,
    )
    set_place(role=roles.name, run_dir=config.run_dir)
    with watched(roles, config.deadline_minutes) as watchdog:
        session = Session(config, script, read, layout or config.roles, roles, text_around(train))
        try:
            train(config, session)
        except BaseException:
            if here.goes_on:  # so that the next run of a notebook can begin
                session.held.close()
                session.leave()
            raise
    if session.repository and session.is_exported:  # here no rank waits, however long it takes
        print(*features.call(config, "push", config, session.repository))
    watchdog.exit_if_interrupted()


def text_around(function: Callable) -> str:
    """Return the text of the file in which a function is written; "" if it is in none, as in a notebook."""
    try:
        return pathlib.Path(inspect.getsourcefile(function)).read_text("utf-8")
    except (TypeError, OSError):
        return ""


def dry_run(config: Config, script: str, read: Read) -> bool:
    """Check and read the inputs, and print whether the run fits the machine. Returns whether it does."""
    folder = config.model.path
    reward_model = ""
    with refuse_bad_input(), tempfile.TemporaryDirectory() as build_dir:
        if has_config_alone(folder):
            print(f"{folder} has no weights or no tokenizer: data, rewards and formulas are not checked")
            read_shape(config, folder)
        else:
            start = read(config, script, build_dir)
            folder = start.policy.folder
            reward_model = start.reward_model
            if start.scorer:
                start.scorer.pool.close()
        _, num_problems = fit_to_machine(config, config.roles, folder, reward_model)
    print(f"dry run: nothing was written; memory may be 20 % off; problems: {num_problems}")
    return not num_problems


def fit_to_machine(config: Config, layout: RolesConfig, folder: str, reward_model: str) -> tuple[Config, int]:
    """Decide what the config leaves to the machine, and judge whether the run fits, by grpo/features/machine.

    layout: which ranks do what. Returns the config and the number of problems. Without that folder they are the given
    config and 0: "auto" rows then take what a batch needs, and checkpointing is selective.
    """
    results = features.call(config, "fit_to_machine", config, layout, folder, reward_model)
    return results[0] if results else (config, 0)


@dataclass(eq=False)
class Session:
    """One run, from its first check to its last line. `run` makes it; nothing is read yet."""

    config: Any
    script: str
    # not bound to this object: a notebook's next run would fork a child that collects the cycle, and hangs in it
    read: Read
    layout: RolesConfig
    roles: Roles
    script_text: str
    """The script, as users edit it."""
    start: Start = Start()
    """On rank 0, once it is read."""
    run_log: RunLog | None = None
    """On rank 0, once it is open."""
    repository: str = ""
    """On rank 0: the one at the hub that gets the exported model."""
    is_exported: bool = False
    saver: checkpoint.CheckpointSaver | None = None
    """On trainers, once their model is loaded."""
    reward_model: Any = None
    """On learners, once it is loaded."""
    close_engine: Callable[[], None] | None = None
    """On generators, once it has started."""

    def __post_init__(self) -> None:
        """Start the clock."""
        self.timer = StepTimer(self.roles.is_driver)
        self.held = contextlib.ExitStack()  # on rank 0: reward processes, run folder and log, until the run ends

    # ---- before the first step ------------------------------------------------------------------------------------

    def start_up(self) -> tuple[Trainer | None, Reference | None, Generator | None]:
        """Check everything on rank 0, then load the models of this rank's roles and the checkpoint.

        Held-out prompts are completed before the first step. Collective over `roles.control`.
        """
        if self.roles.generates and not self.roles.is_driver:  # which reads the inputs meanwhile
            with self.timer.startup("importing vLLM"):
                import_vllm(self.roles)
        rewards = ", starting the reward processes" if self.roles.replicas else ""
        with self.timer.startup(f"checking data, tokenizer and model{rewards}"):
            self.shared = self.ask_driver(self.read_on_driver)
            self.saved_step = self.shared.step
            self.folders = self.fetch_folders()
        generator = self.start_engine()  # first, because vLLM sizes its KV cache from the free memory
        trainer, reference = self.load_models()
        with self.timer.startup("waiting for the other ranks"):
            wait_for_all(self.roles)
        self.load_checkpoint(trainer, generator)
        self.evaluate_first(generator)
        return trainer, reference, generator

    def read_on_driver(self) -> Shared:
        """Refuse bad input, then begin to write: only here may an earlier run be deleted. On rank 0."""
        config = self.config
        with refuse_bad_input():
            start = self.read(config, self.script, "")
            if start.scorer:
                self.held.callback(start.scorer.pool.close)
            self.repository = "".join(features.call(config, "open_repository", config))
            self.begin_to_write(start.saved)
        self.start = start
        fitted, _ = fit_to_machine(config, self.layout, start.policy.folder, start.reward_model)
        print(f"{describe_roles(self.layout)} ranks; {config.run_dir}, starting at step {start.saved.step}")
        return Shared(
            config=fitted,
            checkpoint=start.saved.checkpoint,
            step=start.saved.step,
            models={
                "policy": start.policy.folder,
                "reference": start.reference,
                "reward model": start.reward_model,
            },
            form=start.policy.form,
            stop_token_ids=start.policy.stop_token_ids,
            held_out=start.held_out,
        )

    def begin_to_write(self, saved: Saved) -> None:
        """Take the run folder and open the log."""
        config = self.config
        texts = {f"{FILES}/{name}": text for name, text in own_files(config).items()}
        if self.script_text:
            texts[SCRIPT] = self.script_text
        saved.read.note(FILES, {name: checksum_of(text) for name, text in texts.items()})
        warn_of_secrets(config)
        lock = begin_run(  # another run may have begun there meanwhile
            config.run_dir,
            self.script,
            written_fields(config),
            texts | {CONFIG: as_recipe(config)},
            resume=config.resume,
            overwrite=config.overwrite,
        )
        self.held.callback(os.close, lock)
        forget_old_stop(config.run_dir)
        self.run_log = RunLog(
            config.metrics,
            config.run_dir,
            num_steps=config.num_steps if self.layout.num_trainers else 0,
            start_step=saved.step,
            trackers=features.call(config, "open_tracker", config, saved.step),
        )
        self.held.callback(self.run_log.close)

    def fetch_folders(self) -> dict[str, str]:
        """Return the folder of each model on this node, downloaded from the hub if need be. Collective over control."""
        folders = {}
        for name, path in self.shared.models.items():
            if path:
                folders[name] = fetch_folder(path, self.roles.control, scores=name == "reward model")
        return folders

    def start_engine(self) -> Generator | None:
        """Start vLLM on the generators. Collective over them."""
        if not self.roles.generates:
            return None
        config = self.shared.config
        stop_token_ids = self.shared.stop_token_ids
        folder = self.folders["policy"]
        with self.timer.startup("starting vLLM"):
            episodes = features.call(config, "open_episodes", config, folder, stop_token_ids, self.roles)
            generator = Generator(
                config.generator,
                config.model,
                config.data,
                config.seed,
                folder,
                stop_token_ids,
                self.roles,
                *episodes,
            )
            self.close_engine = generator.close
        # Python's resource tracker, which comes with shared memory, unblocked SIGTERM in this thread, which would not
        # obey it while it waits in vLLM's code for a rank that is gone
        hold_signals()
        return generator

    def load_models(self) -> tuple[Trainer | None, Reference | None]:
        """Load the models of this rank's roles, except the engine's. Collective over each role."""
        config = self.config
        roles = self.roles
        trainer = None
        reference = None
        with self.timer.startup("loading the models"):
            if roles.trains:
                trainer = Trainer(
                    config.model,
                    self.shared.config.trainer,
                    self.folders["policy"],
                    config.num_steps,
                    roles,
                    config.seed,
                )
                self.saver = checkpoint.CheckpointSaver(config.run_dir, config.checkpoint, config.deadline_minutes)
            if roles.references and roles.has_reference:
                reference = Reference(
                    config.model,
                    config.trainer,
                    self.folders["reference"],
                    config.reference_tensor_parallel,
                    roles,
                    policy=None if config.reference_has_model else trainer.model,
                    moves=config.reference_moves,
                )
            if reference and config.reference_moves:
                algorithm = config.algorithm
                trainer.lead(reference.model, algorithm.reference_interval, algorithm.reference_mixture)
            if "reward model" in self.folders and roles.learns:
                (self.reward_model,) = features.call(config, "load", config, self.folders["reward model"], roles)
                if self.start.scorer:
                    self.start.scorer.parts[REWARD_MODEL].model = self.reward_model
            if trainer and config.checkpoint.interval:
                self.saver.make_room(trainer)
        return trainer, reference

    def load_checkpoint(self, trainer: Trainer | None, generator: Generator | None) -> None:
        """Load the checkpoint that the run goes on from, if there is one. Collective over trainers and generators."""
        saved = self.shared.checkpoint
        if saved is None:
            return
        with self.timer.startup("loading the checkpoint"):
            if trainer:
                checkpoint.load_checkpoint(saved, trainer)
            if self.roles.replicas:
                sync_weights(trainer, generator, self.shared.step, self.roles)

    def evaluate_first(self, generator: Generator | None) -> None:
        """Complete the held-out prompts before the first step, unless the run is resumed behind it."""
        if self.shared.step > 0 or not self.shared.held_out:
            return
        what = "evaluating before the first step" if self.roles.trainer_ranks else "evaluating"
        with self.timer.startup(what):
            self.evaluate(generator, 0)

    @from_driver
    def ask_driver(self, decide: Callable, *arguments: Any) -> Any:
        """Return what `decide(*arguments)` returns on rank 0, on every rank. Collective over `roles.control`."""
        return decide(*arguments)

    # ---- steps --------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield for each step the number of steps before it."""
        for step in range(self.shared.step, self.config.num_steps):
            if self.saver and self.roles.is_driver:  # if it raises, torchrun ends the other ranks
                self.saver.raise_failure()
            yield step
            self.timer.enter("other")  # also on ranks that do not log

    def save(
        self,
        step: int,
        trainer: Trainer | None,
        driver_state: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Begin to save what `step` steps made, unless that was done. Training goes on meanwhile.

        driver_state: returns what else to save, called on rank 0. Every rank calls `save`, last in a step: if the run
        dies before the checkpoint is complete, steps are repeated, and so are their lines in the log.
        """
        if trainer and step > self.saved_step:
            with self.timer.phase("save"):
                state = None
                if self.roles.is_driver:
                    state = {"step": step, READ: self.start.saved.read.facts, **driver_state()}
                self.saver.save(step, trainer, state)
        self.saved_step = step

    def evaluate(self, generator: Generator | None, step: int) -> None:
        """Complete the held-out prompts, score and log, without any effect on training.

        Collective over `roles.control`.
        """
        evaluation = self.config.evaluation
        kinds = {"greedy": (1, 0.0), "sample": (evaluation.num_samples, evaluation.temperature)}
        gathered = {}
        for kind, (num_samples, temperature) in kinds.items():
            requests = Requests.of(self.shared.held_out, num_samples)
            rollouts = None
            if generator:
                rollouts = generator.generate(requests, temperatures=(temperature,), held_out=True)
            gathered[kind] = gather_rollouts(rollouts, requests, self.roles)
        if generator:
            generator.forget_prefixes()
        self._log_evaluation(gathered, step)

    @partial(on_driver, scores=True)
    def _log_evaluation(self, gathered: dict[str, list[Rollout]], step: int) -> None:
        """Score and write the completions of the held-out prompts by the weights after `step` steps."""
        scorer = self.start.scorer
        num_prompts = len(self.shared.held_out)
        scored = {}
        for kind, rollouts in gathered.items():
            scored[kind] = rollouts
            if rollouts:  # else no samples were asked for
                check_version(rollouts, step)
                scorer.submit(rollouts, len(rollouts) // num_prompts, step)
                scored[kind] = scorer.collect("evaluation: ")
                prompts = scorer.prompt_texts(rollouts)
                self.run_log.completions(step, scored[kind], prompts, held_out=kind)
        metrics = evaluation_metrics(
            scored["greedy"],
            scored["sample"],
            self.config.evaluation.num_samples,
            passing_parts(self.config),
            scorer.answer_format,
            self.config.reward.pass_value,
        )
        self.run_log.log_held_out(step, metrics)
        best = self.config.checkpoint.keep_best.removeprefix("eval/")
        if best and f"eval/{best}" not in metrics:
            raise BadInput(f"checkpoint.keep_best={best} is none of the held-out metrics {', '.join(metrics)}")

    # ---- after the last step ------------------------------------------------------------------------------------

    def export(self, trainer: Trainer | None) -> None:
        """Write the model's folder, unless `checkpoint.export` is off. Collective over the trainers."""
        if self.config.checkpoint.export and trainer:
            model_dir = pathlib.Path(self.config.run_dir) / "model"
            export_hf(trainer.model, model_dir, trainer.dtype, self.shared.form)
            self.is_exported = True

    def end(self) -> None:
        """Wait for the last checkpoint, close the log and leave the groups. Collective over `roles.control`."""
        with self.timer.phase("save"):
            if self.saver:
                self.saver.finish()
        self._finish()
        self.leave()

    def leave(self) -> None:
        """Close the engine and the groups. Collective over `roles.control`."""
        close_roles(
            self.roles,
            self.close_engine,
            process_goes_on=here.goes_on,
        )

    @on_driver
    def _finish(self) -> None:
        self.held.close()
        print(self.run_log.last_line)
