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
from functools import partial
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
from grpo.run.session import Session, is_due, run
from grpo.text import compact_number
from grpo.types import TrainBatch
from grpo.watch.failures import refuse_bad_input, run_script
from grpo.watch.stopping import end_with_launcher, stop_reason
from train_grpo import add_advantages, update

# What is shown of a method, and by which name a step's metrics have it
COLUMNS = {
    "grad_norm": "grad_norm",
    "cosine": "cosine",
    "clipped": "loss/clip_frac",
    "masked": "mismatch/corrected_frac",
    "entropy": "entropy",
    "kl": "mismatch/kl",
}
WIDTH, HEIGHT = 220, 150  # of a panel of comparison.svg, pixels
Shown = dict[str, float]  # by column
RATIO_IS_1 = "one update per step: each ratio is 1 and no clip acts; --algorithm.num-mini-batches 4 lets clips act"


def main() -> None:
    recorded, flags = subject_of(__doc__)
    end_with_launcher()
    num_trainers = int(os.environ.get("WORLD_SIZE", "1"))
    layout = RolesConfig(num_trainers=num_trainers, num_references=0, num_generators=0)
    train = partial(replay, recorded)
    with refuse_bad_input():
        parser = argparse.ArgumentParser("python -m grpo.replay RUN", add_help=False, allow_abbrev=False)
        parser.add_argument("--methods", nargs="+", metavar="LOSS")
        methods, flags = parser.parse_known_args(flags)
        config = load_config(recorded, flags, num_trainers, "compare" if methods.methods else "replay")
        if losses := methods.methods:
            if num_trainers > 1:
                raise ValueError(f"--methods takes one process, torchrun started {num_trainers}; start it by python")
            configs = configs_of(losses, config, load_recipe(f"{recorded}/config.py", GRPOConfig))
            config, train = next(iter(configs.values())), partial(compare, recorded, configs)
        check_folder_early(config, "grpo.replay")
    run(config, "grpo.replay", partial(read, recorded), train, layout)


def load_config(recorded: str, flags: list[str], num_trainers: int, kind: str = "replay") -> GRPOConfig:
    """The recorded run's config with the flags, on so many trainers. Raises ValueError if that cannot work.

    kind: how the folder is called in which the results go, behind the recorded run's name.
    """
    recipe = f"{recorded}/config.py"
    if not any(flag.partition("=")[0] in ("--run-dir", "--run_dir") for flag in flags):
        flags = ["--run-dir", f"{recorded.rstrip('/')}-{kind}", *flags]

    def fit(config: GRPOConfig, _recipe: GRPOConfig) -> GRPOConfig:
        """Make every rank a trainer; nothing is evaluated or sampled."""
        changes = {"roles.num_trainers": num_trainers, "generator.tensor_parallel": 1, "checkpoint.keep_best": ""}
        if config.model.path.startswith("toy:"):  # its tokenizer may come from data that is not read now
            changes["model.path"] = f"{recorded}/initial_model"
        return change(config, changes)

    return load(GRPOConfig, recipe, [recipe, *flags], fit)


def read(recorded: str, session: Session) -> None:
    """Check the loss, the recorded batches and the model. On rank 0."""
    config, algorithm = session.config, session.config.algorithm
    try_algorithm(algorithm)
    session.open((str(batch_path(recorded, 1).parent),), config.trainer.tensor_parallel)
    coefficients = {"algorithm.kl_coef": algorithm.kl_coef, "algorithm.distill_coef": algorithm.distill_coef}
    needs_reference = " and ".join(f"{name}={value}" for name, value in coefficients.items() if value)
    steps = range(session.first_step + 1, config.num_steps + 1)
    check_recorded(recorded, steps, config.group_size, needs_reference, config.turns_earn, algorithm.echo_coef > 0)
    ranks = f"{session.layout.num_trainers} trainer ranks"
    print(f"replay of {recorded} on {ranks}, which neither samples nor evaluates", flush=True)


def replay(recorded: str, config: GRPOConfig, session: Session) -> None:
    """Take the recorded run's steps. Every rank calls it, and reads the batches for itself."""
    trainer, _, _ = session.start_up()
    vocab_size = read_hf_config(trainer.model.folder).vocab_size
    for step in session.steps():
        if session.ask_driver(session.is_stopped, step):
            session.save(step, trainer)
            break
        found = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            _, metrics = train_on(found, config, trainer)
        measured = measured_metrics(metrics, session.timer.close_step(), found.batch.num_tokens)
        session.ask_driver(session.log, step + 1, found.metrics | measured)
        if is_due(config.checkpoint.interval, step + 1, is_last=step + 1 == config.num_steps):
            session.save(step + 1, trainer)
    else:  # not stopped
        session.export(trainer)
    session.end(None)


def train_on(found: RecordedStep, config: GRPOConfig, trainer: Trainer) -> tuple[TrainBatch, StepMetrics]:
    """Take a recorded step; returns its batch with advantages, and what the updates measured."""
    metrics, kl_coef = StepMetrics(found.batch.num_sequences), config.algorithm.kl_coef
    rewards = found.rewards_S, found.has_reward_S, found.parts_FS
    batch = add_advantages(config, found.batch, *rewards, kl_coef, metrics)
    update(config, trainer, batch, kl_coef, metrics)
    return batch, metrics


# ---------------------------------------------------------------------------------------------------------------------
# Methods side by side
# ---------------------------------------------------------------------------------------------------------------------


def configs_of(losses: list[str], config: GRPOConfig, recorded: GRPOConfig) -> dict[str, GRPOConfig]:
    """Return each method's config by the name of its loss, of a function in a file by the function's.

    config: the recorded run's with the flags, which hold for all methods. What the recorded run had set for its own
    loss (advantages, aggregation, clips, options) holds for that loss alone: another one brings its own. Raises
    ValueError if a method cannot be trained so, or two have the same name.
    """
    if config.resume or config.algorithm.loss != recorded.algorithm.loss:
        raise ValueError("--methods says which losses are compared, from step 1: leave out --resume, --algorithm.loss")
    configs: dict[str, GRPOConfig] = {}
    left_open = dict.fromkeys(OWN_LOSS_DEFAULTS) | {"loss_options": {}}
    own = {n: value for n, value in left_open.items() if getattr(config.algorithm, n) == getattr(recorded.algorithm, n)}
    for loss in losses:
        others = own if loss != recorded.algorithm.loss else {}
        method = change(config, {f"algorithm.{n}": value for n, value in (others | {"loss": loss}).items()})
        validate(method)
        try_algorithm(method.algorithm)
        if configs.setdefault(loss.rpartition(":")[2], method) is not method:
            raise ValueError(f"two methods are called {loss.rpartition(':')[2]}; name each once")
    return configs


def compare(recorded: str, configs: dict[str, GRPOConfig], config: GRPOConfig, session: Session) -> None:
    """Train all methods on each recorded step, tell after each step and at the end. In a run of one process.

    configs: of each method; `config`, the run's, is the first one's.
    """
    first, _, _ = session.start_up()
    like_first = config.model, first.config, first.model.folder, config.num_steps, first.roles, config.seed
    trainers = {name: first if c is config else Trainer(*like_first) for name, c in configs.items()}
    vocab_size, rows = read_hf_config(first.model.folder).vocab_size, []
    for name, of_method in configs.items():
        print("\n  ".join([f"method {name}", *derived(of_method)]))
    if config.updates_per_step == 1 and config.algorithm.resolved.old_logprobs == "policy":
        print(RATIO_IS_1)
    print(line("step", "method", {name: name for name in COLUMNS}), flush=True)
    for step in session.steps():
        if rows and stop_reason(config.run_dir):
            break
        found = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            taken = {name: take_step(found, configs[name], trainer) for name, trainer in trainers.items()}
        _, of_first = next(iter(taken.values()))
        for name, (values, gradient) in taken.items():
            values["cosine"] = float((gradient * of_first).sum() / (gradient.norm() * of_first.norm()))
            rows.append((step + 1, name, values))
            print(line(step + 1, name, values), flush=True)
        by_method = {f"{name}/{column}": v for name, (values, _) in taken.items() for column, v in values.items()}
        session.log(step + 1, by_method | session.timer.close_step())
    for name, trainer in trainers.items():
        of_method = [values for _, other, values in rows if other == name]
        print(line("mean", name, {c: sum(v[c] for v in of_method) / len(of_method) for c in of_method[0]}))
        if config.checkpoint.export:
            export_hf(trainer.model, pathlib.Path(config.run_dir) / name / "model", trainer.dtype)
    (pathlib.Path(config.run_dir) / "comparison.svg").write_text(picture(rows))
    session.end(None)


def take_step(found: RecordedStep, config: GRPOConfig, trainer: Trainer) -> tuple[Shown, torch.Tensor]:
    """Train on a recorded batch; returns what is shown of it and the gradient, summed over updates, [0] without any."""
    gradient = torch.zeros(1)

    def add(optimizer: torch.optim.Optimizer, *_) -> None:
        nonlocal gradient
        grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        full = (g.full_tensor() if isinstance(g, DTensor) else g for g in grads)
        gradient = gradient + torch.cat([part.flatten().double().cpu() for part in full])

    hook = trainer.optimizer.optimizers[0].register_step_pre_hook(add)
    batch, metrics = train_on(found, config, trainer)
    hook.remove()
    means = metrics.means() | policy_metrics(trainer, batch, config.algorithm.resolved)
    return {name: means[there] for name, there in COLUMNS.items() if there in means}, gradient


@torch.no_grad()
def policy_metrics(trainer: Trainer, batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return entropy and distance from the generator of the policy as it is, by a forward of its own."""
    metrics, model = StepMetrics(batch.num_sequences), trainer.model
    for micro, _ in model.micro_batches(model.pack(batch, trainer.config)):
        logprobs_BT, entropy_BT = model.logprobs(micro)
        x = LossInputs.of(micro, logprobs_BT, entropy_BT)
        metrics.add(micro, logprobs_BT.new_zeros(()), mismatch(x, algorithm) | {"entropy": entropy_BT})
    metrics.reduce(None)
    forget_forwards(model.module)
    model.drop_copy()
    return metrics.means()


def line(step: int | str, name: str, values: dict[str, float | str]) -> str:
    """Return a line of the table; a method that does not measure something has `-` there."""
    shown = (values.get(column, "-") for column in COLUMNS)
    cells = (value if isinstance(value, str) else compact_number(value) for value in shown)
    return f"{step!s:>5}  {name:<14}" + "".join(f"{cell:>11}" for cell in cells)


def picture(rows: list[tuple[int, str, Shown]]) -> str:
    """Return an SVG that stands alone, of steps, methods and their values: a panel a column, a line a method."""
    names = list(dict.fromkeys(name for _, name, _ in rows))
    colors = {name: f"hsl({360 * i / len(names):.0f} 80% 35%)" for i, name in enumerate(names)}
    size, font = 'width="900" height="430"', 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}><rect {size} fill="white"/>']
    for i, name in enumerate(names):
        parts.append(f'<text x="{40 + 120 * i}" y="24" fill="{colors[name]}">{escape(name)}</text>')
    first, last = rows[0][0], rows[-1][0]
    for number, column in enumerate(COLUMNS):
        known = [(step, name, v[column]) for step, name, v in rows if math.isfinite(v.get(column, math.nan))]
        values = [value for _, _, value in known] or [0.0]
        low, high = min(values), max(values)
        title = f"{column}: {compact_number(low)} to {compact_number(high)}, steps {first} to {last}"
        parts.append(f'<g transform="translate({60 + number % 3 * 290} {64 + number // 3 * 200})" fill="none">')
        parts.append(f'<text y="-6" fill="black">{title}</text><rect width="{WIDTH}" height="{HEIGHT}" stroke="#999"/>')
        for step in sorted({first, (first + last) // 2, last}):
            x = WIDTH * (step - first) / (last - first or 1)
            parts.append(f'<path d="M{x:.1f} {HEIGHT}v5" stroke="#999"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT + 17}" fill="#666" text-anchor="middle">{step}</text>')
        for value in sorted({low, (low + high) / 2, high}):
            y = HEIGHT * (high - value) / (high - low or 1)
            parts.append(f'<path d="M0 {y:.1f}h-5" stroke="#999"/>')
            label = compact_number(value)
            parts.append(f'<text x="-7" y="{y + 4:.1f}" fill="#666" text-anchor="end">{label}</text>')
        for name in names:
            of_method = ((step - first, high - value) for step, other, value in known if other == name)
            scaled = ((WIDTH * x / (last - first or 1), HEIGHT * y / (high - low or 1)) for x, y in of_method)
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
            parts.append(f'<polyline points="{points}" stroke="{colors[name]}"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    run_script(main)
