"""Train once more on the batches that a run recorded (`--record`): the same losses, or those of other methods.

    torchrun --nproc_per_node=2 -m grpo.replay RUN [--field value ...]
    python -m grpo.replay RUN --methods grpo dapo my_method.py:mine [--field value ...]

The config is RUN/config.py with the flags, and all ranks are trainers; nothing is sampled, scored or evaluated. On as
many trainer ranks the recorded run's losses come out again to the last digit. Results go to `--run-dir`, by default
RUN-replay.

With --methods, one process trains a copy of the first weights with each. They go their own ways: gradients are compared
at the same weights in the first update, where only the formulas differ, later each at its method's own. Shown are
    grad_norm  norm of the gradient before it is scaled down, the mean over the step's updates
    cosine     of what the optimizer got in the step, summed over its updates, with that of the first method
    clipped    share of tokens that the loss calls clipped (`loss/clip_frac`)
    masked     share that the importance correction cuts off or masks (`mismatch/corrected_frac`)
    entropy    of the policy after the step, nats, at the recorded tokens
    kl         KL(generator || policy after the step), k3 over the recorded tokens: how far it is from what sampled them
RUN-compare gets them in metrics.jsonl as METHOD/NAME, comparison.svg, and METHOD/model.

Left out: rollouts as text, which the recorded run's folder has, and held-out accuracy, which takes an engine
(`python -m grpo.evaluate RUN-compare/METHOD/model RUN/config.py`).
"""

import argparse
import math
import os
import pathlib
import statistics
from functools import partial
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch.distributed.tensor import DTensor

from grpo.algorithm.importance import mismatch
from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.trial import try_algorithm
from grpo.config import OWN_LOSS_DEFAULTS, AlgorithmConfig, GRPOConfig, RolesConfig, change
from grpo.config.checks import validate
from grpo.config.recipes import derived, load, load_recipe
from grpo.data.recorded import RecordedStep, batch_path, check_recorded, read_step
from grpo.metrics import StepMetrics
from grpo.models.build import forget_forwards
from grpo.models.export import export_hf
from grpo.models.hf_folder import read_hf_config
from grpo.report.rollout_metrics import measured_metrics
from grpo.roles.trainer import Trainer
from grpo.run.command_line import check_folder_early, subject_of
from grpo.run.inputs import Inputs, open_run
from grpo.run.session import Session, is_due, run
from grpo.text import compact_number
from grpo.types import TrainBatch
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
Measured = dict[str, float]  # by column
RATIO_IS_1 = "one update per step: each ratio is 1 and no clip acts; --algorithm.num-mini-batches 4 lets clips act"


def main() -> None:
    recorded, flags = subject_of(__doc__)
    end_with_launcher()
    num_trainers = int(os.environ.get("WORLD_SIZE", "1"))
    layout = RolesConfig(num_trainers=num_trainers, num_references=0, num_generators=0)
    with refuse_bad_input():
        parser = argparse.ArgumentParser("python -m grpo.replay RUN", add_help=False, allow_abbrev=False)
        parser.add_argument("--methods", nargs="+", metavar="LOSS")
        options, flags = parser.parse_known_args(flags)
        kind = "compare" if options.methods else "replay"
        config = load_config(recorded, flags, num_trainers, kind)
        train = partial(replay, recorded)
        if options.methods:
            if num_trainers > 1:
                raise ValueError(f"--methods takes one process, torchrun started {num_trainers}; start it by python")
            configs = configs_of(options.methods, config, load_recipe(f"{recorded}/config.py", GRPOConfig))
            config = next(iter(configs.values()))
            train = partial(compare, recorded, configs)
        check_folder_early(config, "grpo.replay")
    run(config, "grpo.replay", partial(read, recorded), train, layout)


def load_config(recorded: str, flags: list[str], num_trainers: int, kind: str = "replay") -> GRPOConfig:
    """Return the recorded run's config with the flags, on `num_trainers` ranks. Raises ValueError if it cannot work.

    kind: the ending of the default run folder's name.
    """
    recipe = f"{recorded}/config.py"

    def fit(config: GRPOConfig, _recipe: GRPOConfig) -> GRPOConfig:
        """Make every rank a trainer; nothing is evaluated or sampled."""
        changes = {"roles.num_trainers": num_trainers, "generator.tensor_parallel": 1, "checkpoint.keep_best": ""}
        if config.model.is_built:  # its tokenizer may come from data that is not read now
            changes["model.path"] = f"{recorded}/initial_model"
        return change(config, changes)

    # of two equal flags the last one holds
    return load(GRPOConfig, recipe, [recipe, "--run-dir", f"{recorded.rstrip('/')}-{kind}", *flags], fit)


def read(recorded: str, config: GRPOConfig, script: str, build_dir: str = "") -> Inputs:
    """Check the loss, the recorded batches and the model. On rank 0."""
    algorithm = config.algorithm
    try_algorithm(algorithm)
    inputs = open_run(config, script, build_dir, [str(batch_path(recorded, 1).parent)])
    coefficients = {"algorithm.kl_coef": algorithm.kl_coef, "algorithm.distill_coef": algorithm.distill_coef}
    needs_reference = " and ".join(f"{name}={value}" for name, value in coefficients.items() if value)
    steps = range(inputs.step + 1, config.num_steps + 1)
    check_recorded(recorded, steps, config.group_size, needs_reference, config.turns_earn)
    ranks = f"{config.roles.num_trainers} trainer ranks"
    print(f"replay of {recorded} on {ranks}, which neither samples nor evaluates", flush=True)
    return inputs


def replay(recorded: str, config: GRPOConfig, session: Session) -> None:
    """Take the recorded run's steps. Every rank calls it, and reads the batches for itself."""
    trainer, _, _ = session.start_up()
    vocab_size = read_hf_config(trainer.model.folder).vocab_size
    for step in session.steps():
        if session.ask_driver(session.is_stopped, step):
            session.save(step, trainer)
            break
        recorded_step = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            _, metrics = train_on(recorded_step, config, trainer)
        measured = measured_metrics(metrics, session.timer.close_step(), recorded_step.batch.num_tokens)
        session.ask_driver(session.log, step + 1, recorded_step.metrics | measured)
        if is_due(config.checkpoint.interval, step + 1, is_last=step + 1 == config.num_steps):
            session.save(step + 1, trainer)
    else:  # not stopped
        session.export(trainer)
    session.end(None)


def train_on(recorded_step: RecordedStep, config: GRPOConfig, trainer: Trainer) -> tuple[TrainBatch, StepMetrics]:
    """Update the policy on a recorded step. Return its batch with advantages, and what the updates measured."""
    metrics = StepMetrics(recorded_step.batch.num_sequences)
    batch = add_advantages(
        config,
        recorded_step.batch,
        recorded_step.rewards_S,
        recorded_step.has_reward_S,
        recorded_step.parts_FS,
        config.algorithm.kl_coef,
        metrics,
    )
    update(config, trainer, batch, config.algorithm.kl_coef, metrics)
    return batch, metrics


# ---------------------------------------------------------------------------------------------------------------------
# Methods side by side
# ---------------------------------------------------------------------------------------------------------------------


def configs_of(losses: list[str], config: GRPOConfig, recorded: GRPOConfig) -> dict[str, GRPOConfig]:
    """Return each method's config by the name of its loss; for a function in a file, by the function's name.

    config: the recorded run's with the flags, which hold for all methods. What the recorded run had set for its own
    loss (advantages, aggregation, clips, options) holds for that loss alone; the others take their own. Raises
    ValueError if a method cannot be trained so, or two have the same name.
    """
    if config.resume or config.algorithm.loss != recorded.algorithm.loss:
        raise ValueError("--methods says which losses are compared, from step 1: leave out --resume, --algorithm.loss")
    unset = {}
    for name, value in (dict.fromkeys(OWN_LOSS_DEFAULTS) | {"loss_options": {}}).items():
        if getattr(config.algorithm, name) == getattr(recorded.algorithm, name):  # no flag has set it
            unset[f"algorithm.{name}"] = value
    configs = {}
    for loss in losses:
        changes = {"algorithm.loss": loss}
        if loss != recorded.algorithm.loss:
            changes |= unset
        method = change(config, changes)
        validate(method)
        try_algorithm(method.algorithm)
        name = loss.rpartition(":")[2]
        if name in configs:
            raise ValueError(f"two methods are called {name}; name each once")
        configs[name] = method
    return configs


def compare(recorded: str, configs: dict[str, GRPOConfig], config: GRPOConfig, session: Session) -> None:
    """Train every method on each recorded step, and print how they differ. In a run of one process.

    config: the run's, which is that of the first method.
    """
    first, _, _ = session.start_up()
    others = [
        Trainer(config.model, first.config, first.model.folder, config.num_steps, first.roles, config.seed)
        for _ in range(len(configs) - 1)
    ]
    trainers = dict(zip(configs, [first, *others], strict=True))
    for name, method in configs.items():
        print("\n  ".join([f"method {name}", *derived(method)]))
    if config.updates_per_step == 1 and config.algorithm.resolved.old_logprobs == "policy":
        print(RATIO_IS_1)
    print(f"{'step':>5}  {'method':<14}" + "".join(f"{column:>11}" for column in COLUMNS), flush=True)
    vocab_size = read_hf_config(first.model.folder).vocab_size
    history = {name: [] for name in configs}
    for step in session.steps():
        if step and stop_reason(config.run_dir):
            break
        recorded_step = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            for name, trainer in trainers.items():
                measured, gradient = take_step(recorded_step, configs[name], trainer)
                if trainer is first:
                    first_gradient = gradient
                norms = gradient.norm() * first_gradient.norm()
                measured["cosine"] = float((gradient * first_gradient).sum() / norms)
                history[name].append(measured)
                print(line(step + 1, name, measured), flush=True)
        latest = {f"{name}/{column}": value for name, steps in history.items() for column, value in steps[-1].items()}
        session.log(step + 1, latest | session.timer.close_step())
    run_dir = pathlib.Path(config.run_dir)
    for name, steps in history.items():
        print(line("mean", name, {column: statistics.fmean(each[column] for each in steps) for column in steps[0]}))
        if config.checkpoint.export:
            export_hf(trainers[name].model, run_dir / name / "model", first.dtype)
    (run_dir / "comparison.svg").write_text(picture(history))
    session.end(None)


def take_step(recorded_step: RecordedStep, config: GRPOConfig, trainer: Trainer) -> tuple[Measured, torch.Tensor]:
    """Train on a recorded step. Return what was measured, and the gradient summed over the updates ([0] if none)."""
    gradient = torch.zeros(1)

    def add_gradient(*_: Any) -> None:
        nonlocal gradient
        grads = [parameter.grad for parameter in trainer.model.module.parameters() if parameter.grad is not None]
        parts = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        gradient = gradient + torch.cat([part.flatten().double().cpu() for part in parts])

    hook = trainer.optimizer.optimizers[0].register_step_pre_hook(add_gradient)
    batch, metrics = train_on(recorded_step, config, trainer)
    hook.remove()
    means = metrics.means() | policy_metrics(trainer, batch, config.algorithm.resolved)
    return {column: means[metric] for column, metric in COLUMNS.items() if metric in means}, gradient


@torch.no_grad()
def policy_metrics(trainer: Trainer, batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the updated policy's entropy and its distance from the generator, by one more forward."""
    metrics = StepMetrics(batch.num_sequences)
    model = trainer.model
    for micro, _ in model.micro_batches(model.pack(batch, trainer.config)):
        logprobs_BT, entropy_BT = model.logprobs(micro)
        x = LossInputs.of(micro, logprobs_BT, entropy_BT)
        metrics.add(micro, logprobs_BT.new_zeros(()), mismatch(x, algorithm) | {"entropy": entropy_BT})
    metrics.reduce(None)
    forget_forwards(model.module)
    model.drop_copy()
    return metrics.means()


def line(step: int | str, name: str, values: Measured) -> str:
    """Return a line of the table; a column that a method does not measure has `-` there."""
    cells = [compact_number(values[column]) if column in values else "-" for column in COLUMNS]
    return f"{step!s:>5}  {name:<14}" + "".join(f"{cell:>11}" for cell in cells)


def picture(history: dict[str, list[Measured]]) -> str:
    """Draw an SVG that stands alone: a panel for each column, in it a line for each method over the steps.

    history: what was measured of each method, from step 1 on.
    """
    style = 'font-family="sans-serif" style="background: white"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="430" {style}>']
    colors = {name: f"hsl({360 * i / len(history):.0f} 80% 35%)" for i, name in enumerate(history)}
    for i, (name, color) in enumerate(colors.items()):
        parts.append(f'<text x="{40 + 120 * i}" y="24" fill="{color}">{escape(name)}</text>')
    last_step = max(map(len, history.values()))
    for number, column in enumerate(COLUMNS):
        curves = {}
        for name, steps in history.items():
            values = enumerate((measured.get(column, math.nan) for measured in steps), start=1)
            curves[name] = [(step, value) for step, value in values if math.isfinite(value)]
        values = [value for curve in curves.values() for _, value in curve] or [0.0]
        low = min(values)
        high = max(values)
        x = 40 + number % 3 * 290
        y = 64 + number // 3 * 200
        bottom = y + 150
        texts = [(x, y - 6, column), (x - 38, y + 10, compact_number(high)), (x - 38, bottom, compact_number(low))]
        texts += [(x, bottom + 14, 1), (x + 240, bottom + 14, last_step)]
        for left, baseline, text in texts:
            parts.append(f'<text x="{left}" y="{baseline}" font-size="12">{text}</text>')
        size = f'x="{x}" y="{y}" width="250" height="150" fill="none"'
        parts.append(f'<rect {size} stroke="#999"/>')
        # the panel has the units of steps and values; SVG's y grows downward
        view = f'viewBox="1 {-high} {last_step - 1 or 1} {high - low or 1}" preserveAspectRatio="none"'
        parts.append(f"<svg {size} {view}>")
        for name, curve in curves.items():
            points = " ".join(f"{step},{-value}" for step, value in curve)
            parts.append(f'<polyline points="{points}" stroke="{colors[name]}" vector-effect="non-scaling-stroke"/>')
        parts.append("</svg>")
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    run_script(main)
