"""Train once more on the batches that a run recorded (`--record`): the same losses, or those of other methods.

    torchrun --nproc_per_node=2 -m grpo.replay RUN [--field value ...]
    python -m grpo.replay RUN --methods grpo my.py:mine grpo+my.py:advantages grpo+clip_high=0.3 [--field value ...]

The config is RUN/config.py with the flags, and all ranks are trainers; nothing is sampled, scored or evaluated. On as
many trainer ranks the recorded run's losses come out again to the last digit. Results go to `--run-dir`, by default
RUN-replay.

With --methods, one process trains a copy of the first weights with each: a loss, LOSS+ADVANTAGES or LOSS+FIELD=VALUE, a
field of `algorithm`. They go their own ways: gradients are compared at the same weights in the first update, where only
the formulas differ, later each at its method's own. Shown are
    grad_norm  norm of the gradient before it is scaled down, the mean over the step's updates
    cosine     of what the optimizer got in the step, summed over its updates, with that of the first method
    clipped    share of tokens that the loss calls clipped (`loss/clip_frac`)
    masked     share that the importance correction cuts off or masks (`mismatch/corrected_frac`)
    entropy    of the policy in the step's updates, nats, at the recorded tokens
    kl         KL(generator || policy at the start of the step), k3 over these tokens: how far it is from their sampler
RUN-compare gets them in metrics.jsonl and TensorBoard as METHOD/NAME, and METHOD/model. `grpo.look RUN-compare` shows
their means.

Left out: rollouts as text, which the recorded run's folder has, and held-out accuracy, which takes an engine
(`python -m grpo.evaluate RUN-compare/METHOD/model RUN/config.py`).
"""

import argparse
import math
import pathlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo import features
from grpo.config import GRPO_DEFAULTS, GRPOConfig, RolesConfig, change
from grpo.config.checks import num_processes, validate
from grpo.config.recipes import as_json, derived, load, load_recipe
from grpo.data.recorded import RecordedStep, batch_path
from grpo.metrics import StepMetrics
from grpo.models.export import export_hf
from grpo.models.hf_folder import read_hf_config
from grpo.report.rollout_metrics import measured_metrics
from grpo.roles.trainer import Trainer
from grpo.run.command_line import begin_early
from grpo.run.policy import read_policy
from grpo.run.saved import find_saved
from grpo.run.session import Session, run
from grpo.run.start import Start
from grpo.run.steps import Steps
from grpo.text import compact_number
from grpo.tools.command import subject_of
from grpo.tools.look import summarize
from grpo.tools.recorded import check_recorded, read_step
from grpo.types import Scalars
from grpo.watch.failures import refuse_bad_input, run_script
from grpo.watch.stopping import end_with_launcher, stop_reason
from train_grpo import add_advantages, update

# Columns of the comparison, and the metrics of a step that they show
COLUMNS = {
    "grad_norm": "grad_norm",
    "cosine": "cosine",
    "clipped": "loss/clip_frac",
    "masked": "mismatch/corrected_frac",
    "entropy": "entropy",
    "kl": "mismatch/kl",
}
RATIO_IS_1 = "one update per step: each ratio is 1 and no clip acts; --algorithm.num-mini-batches 4 lets clips act"


def main() -> None:
    recorded, flags = subject_of(__doc__)
    end_with_launcher()
    num_trainers = num_processes()
    layout = RolesConfig(num_trainers=num_trainers, num_generators=0)
    with refuse_bad_input():
        parser = argparse.ArgumentParser(
            "python -m grpo.replay RUN",
            add_help=False,
            allow_abbrev=False,
        )
        parser.add_argument(
            "--methods",
            nargs="+",
            metavar="LOSS[+ADVANTAGES][+FIELD=VALUE]",
        )
        options, flags = parser.parse_known_args(flags)
        kind = "compare" if options.methods else "replay"
        config = load_config(recorded, flags, num_trainers, kind)
        train = partial(replay, recorded)
        if options.methods:
            if num_trainers > 1:
                raise ValueError(f"--methods takes one process, torchrun started {num_trainers}; start it by python")
            recorded_config = load_recipe(f"{recorded}/config.py", GRPOConfig)
            configs = configs_of(
                options.methods,
                config,
                recorded_config,
            )
            config = next(iter(configs.values()))
            train = partial(compare, recorded, configs)
        begin_early(config, "grpo.replay")
    run(config, "grpo.replay", partial(read, recorded), train, layout)


def load_config(
    recorded: str,
    flags: list[str],
    num_trainers: int,
    kind: str = "replay",
) -> GRPOConfig:
    """Return the recorded run's config with the flags, on `num_trainers` ranks. Raises ValueError if it cannot work.

    kind: the ending of the default run folder's name.
    """
    recipe = f"{recorded}/config.py"

    def fit(config: GRPOConfig, recorded_config: GRPOConfig) -> GRPOConfig:
        """Make every rank a trainer, without evaluations. Upload where the flags say so, not where that run did."""
        changes = {
            "roles.num_trainers": num_trainers,
            "generator.tensor_parallel": 1,
            "checkpoint.keep_best": "",
        }
        if config.checkpoint.push_to_hub == recorded_config.checkpoint.push_to_hub:  # not a flag's
            changes["checkpoint.push_to_hub"] = ""
        if config.model.is_built:  # its tokenizer may come from data that is not read now
            changes["model.path"] = f"{recorded}/initial_model"
        return change(config, changes)

    run_dir = f"{recorded.rstrip('/')}-{kind}"
    words = [recipe, "--run-dir", run_dir, *flags]  # of two equal flags the last one holds
    return load(GRPOConfig, recipe, words, fit)


def read(
    recorded: str,
    config: GRPOConfig,
    script: str,
    build_dir: str,
) -> Start:
    """Check the loss and the recorded batches, on rank 0. Returns the model, and the checkpoint if it is resumed."""
    algorithm = config.algorithm
    features.call(config, "try_algorithm", algorithm)
    batches_dir = batch_path(recorded, 1).parent
    saved = find_saved(config, script, [str(batches_dir)])
    policy = read_policy(config, build_dir=build_dir)
    coefs = {name: getattr(algorithm, name) for name in ("kl_coef", "distill_coef")}
    needs_reference = [f"algorithm.{name}={value}" for name, value in coefs.items() if value]
    steps = range(saved.step + 1, config.num_steps + 1)
    reasons = " and ".join(needs_reference)
    check_recorded(
        recorded,
        steps,
        config.group_size,
        reasons,
        config.turns_earn,
    )
    num_trainers = config.roles.num_trainers
    print(f"replay of {recorded} on {num_trainers} trainer ranks, which neither samples nor evaluates")
    return Start(saved, policy)


def replay(
    recorded: str,
    config: GRPOConfig,
    session: Session,
) -> None:
    """Take the recorded run's steps. Every rank calls it, and reads the batches for itself."""
    trainer, _, _ = session.start_up()
    driver = Steps(session)
    vocab_size = read_hf_config(trainer.model.folder).vocab_size
    for step in session.steps():
        if session.ask_driver(driver.is_stopped, step):
            session.save(step, trainer)
            break
        recorded_step = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            measured = train_on(recorded_step, config, trainer)
        times = session.timer.close_step()
        metrics = measured_metrics(
            measured,
            times,
            recorded_step.batch.num_tokens,
        )
        session.ask_driver(
            driver.log_step,
            step + 1,
            recorded_step.metrics | metrics,
        )
        if driver.is_due(config.checkpoint.interval, step + 1):
            session.save(step + 1, trainer)
    else:  # not stopped
        session.export(trainer)
    session.end()


def train_on(
    recorded_step: RecordedStep,
    config: GRPOConfig,
    trainer: Trainer,
) -> StepMetrics:
    """Update the policy on a recorded step. Return what the updates measured."""
    config = replace(config, algorithm=config.algorithm.resolved)
    metrics = StepMetrics(recorded_step.batch.num_sequences)
    batch = add_advantages(
        config,
        recorded_step.batch,
        config.algorithm.kl_coef,
        metrics,
    )
    update(config, trainer, batch, config.algorithm.kl_coef, metrics)
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# Methods side by side
# ---------------------------------------------------------------------------------------------------------------------


def configs_of(
    methods: list[str],
    config: GRPOConfig,
    recorded: GRPOConfig,
) -> dict[str, GRPOConfig]:
    """Return each method's config by its name, in which a function in a file is the function's name alone.

    config: the recorded run's with the flags, which hold for all methods. What the recorded run had set for its own
    loss (advantages, aggregation, clips, options) holds for that loss alone; the others take their own. Raises
    ValueError if a method cannot be trained so, or two have the same name.
    """
    if config.resume or config.algorithm.loss != recorded.algorithm.loss:
        raise ValueError("--methods says which losses are compared, from step 1: leave out --resume, --algorithm.loss")
    defaults = dict.fromkeys(GRPO_DEFAULTS)
    defaults["loss_options"] = {}
    unset = {}
    for name, default in defaults.items():
        if getattr(config.algorithm, name) == getattr(recorded.algorithm, name):  # no flag has set it
            unset[f"algorithm.{name}"] = default
    configs = {}
    for method in methods:
        loss, *parts = method.split("+")
        changes = {"algorithm.loss": loss}
        if loss != recorded.algorithm.loss:
            changes |= unset
        for part in parts:
            name, _, value = part.rpartition("=")
            changes[f"algorithm.{name or 'advantages'}"] = as_json(value)
        method_config = change(config, changes)
        validate(method_config)
        features.call(method_config, "try_algorithm", method_config.algorithm)
        name = "+".join(part.rpartition(":")[2] for part in method.split("+"))
        if name in configs:
            raise ValueError(f"two methods are called {name}; name each once")
        configs[name] = method_config
    return configs


def compare(
    recorded: str,
    configs: dict[str, GRPOConfig],
    config: GRPOConfig,
    session: Session,
) -> None:
    """Train every method on each recorded step, and print how they differ. In a run of one process.

    config: the run's, which is that of the first method.
    """
    first, _, _ = session.start_up()
    driver = Steps(session)
    trainers = {}
    for name, method in configs.items():
        if trainers:
            trainers[name] = Trainer(
                config.model,
                first.config,
                first.model.folder,
                config.num_steps,
                first.roles,
                config.seed,
            )
        else:
            trainers[name] = first
        print("\n  ".join([f"method {name}", *derived(method)]))

    if config.updates_per_step == 1 and config.algorithm.resolved.old_logprobs == "policy":
        print(RATIO_IS_1)
    print(table_line("step", "method", COLUMNS))

    vocab_size = read_hf_config(first.model.folder).vocab_size
    for step in session.steps():
        if step and stop_reason(config.run_dir):
            break
        recorded_step = read_step(recorded, step + 1, vocab_size)
        metrics = {}
        with session.timer.phase("train"):
            for name, trainer in trainers.items():
                measured, gradient = take_step(
                    recorded_step,
                    configs[name],
                    trainer,
                )
                if trainer is first:
                    first_gradient = gradient
                norms = gradient.norm() * first_gradient.norm()
                dot_product = (gradient * first_gradient).sum()
                if norms > 0:  # groups of equal rewards have no gradient
                    measured["cosine"] = float(dot_product / norms)
                cells = [
                    compact_number(measured.get(column, math.nan)) for column in COLUMNS
                ]  # - for what is not there
                print(table_line(step + 1, name, cells))
                metrics |= {f"{name}/{column}": value for column, value in measured.items()}
        driver.log_step(step + 1, metrics | session.timer.close_step())

    print(summarize([pathlib.Path(config.run_dir)]))
    if config.checkpoint.export:
        for name, trainer in trainers.items():
            model_dir = pathlib.Path(config.run_dir, name, "model")
            export_hf(
                trainer.model,
                model_dir,
                first.dtype,
                session.shared.form,
            )
    session.end()


def take_step(
    recorded_step: RecordedStep,
    config: GRPOConfig,
    trainer: Trainer,
) -> tuple[Scalars, Tensor]:
    """Train on a recorded step. Return what was measured, and the gradient summed over the updates ([0] if none)."""
    gradient = torch.zeros(1)

    def add_gradient(*_: Any) -> None:
        nonlocal gradient
        gradients = []
        for parameter in trainer.model.module.parameters():
            of_parameter = parameter.grad
            if of_parameter is None:
                continue
            if isinstance(of_parameter, DTensor):
                of_parameter = of_parameter.full_tensor()
            gradients.append(of_parameter.flatten().double().cpu())
        gradient = gradient + torch.cat(gradients)

    hook = trainer.optimizer.optimizers[0].register_step_pre_hook(add_gradient)
    means = train_on(recorded_step, config, trainer).means()
    hook.remove()
    measured = {column: means[metric] for column, metric in COLUMNS.items() if metric in means}
    return measured, gradient


def table_line(
    step: int | str,
    name: str,
    cells: Iterable[str],
) -> str:
    """Return a line of the table from the texts in it."""
    return f"{step!s:>5}  {name:<14}" + "".join(f"{cell:>11}" for cell in cells)


if __name__ == "__main__":
    run_script(main)
