"""Several methods on the batches that a run recorded, side by side: `python -m grpo.replay RUN --methods ...`.

Each method begins with the recorded run's first weights, trains on the same batches and goes its own way: gradients are
compared at the same weights in the first update, where only the formulas differ, later each at its method's own.

It shows of each step and method
    grad_norm  norm of the gradient before it is scaled down, the mean over the step's updates
    cosine     of what the optimizer got in the step, summed over its updates, with that of the first method
    clipped    share of tokens that the loss calls clipped (`loss/clip_frac`)
    masked     share that the importance correction cuts off or masks (`mismatch/corrected_frac`)
    entropy    of the policy after the step, nats, at the recorded tokens
    kl         KL(generator || policy after the step), k3 over the recorded tokens: how far it is from what sampled them

The run folder gets them in metrics.jsonl as METHOD/NAME, comparison.svg, and METHOD/model. All methods are in memory at
once. Left out: held-out accuracy, which takes an engine (`python -m grpo.evaluate RUN_DIR/METHOD/model RUN/config.py`).
"""

import math
import pathlib
from xml.sax.saxutils import escape

import torch
from torch.distributed.tensor import DTensor

from grpo.algorithm.importance import mismatch
from grpo.algorithm.inputs import LossInputs
from grpo.algorithm.trial import try_algorithm
from grpo.config import OWN_LOSS_DEFAULTS, AlgorithmConfig, GRPOConfig, change
from grpo.config.checks import validate
from grpo.config.recipes import derived
from grpo.data.recorded import RecordedStep, read_step
from grpo.models.build import forget_forwards
from grpo.models.export import export_hf
from grpo.models.hf_folder import read_hf_config
from grpo.roles.metrics import StepMetrics
from grpo.roles.trainer import Trainer
from grpo.run.session import Session
from grpo.text import compact_number
from grpo.types import TrainBatch
from grpo.watch.stopping import stop_reason
from train_grpo import add_advantages, update

# What is shown, and by which name a step's metrics have it
COLUMNS = {
    **{"grad_norm": "grad_norm", "cosine": "cosine", "clipped": "loss/clip_frac", "masked": "mismatch/corrected_frac"},
    **{"entropy": "entropy", "kl": "mismatch/kl"},
}
RATIO_IS_1 = (
    "one update per step, and the policy's own old log-probs: each ratio is 1 and no clip acts, so losses differ by "
    "their gradient at ratio 1, advantages and averages alone; --algorithm.num-mini-batches 4 lets clips act"
)


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
    if config.updates_per_step == 1 and config.algorithm.old_logprobs == "policy":
        print(RATIO_IS_1)
    print(line("step", "method", {name: name for name in COLUMNS}), flush=True)
    for step in session.steps():
        if rows and stop_reason(config.run_dir):
            break
        found = read_step(recorded, step + 1, vocab_size)
        with session.timer.phase("train"):
            taken = {name: take_step(configs[name], trainer, found) for name, trainer in trainers.items()}
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


def take_step(config: GRPOConfig, trainer: Trainer, found: RecordedStep) -> tuple[dict[str, float], torch.Tensor]:
    """Train on a recorded batch; returns what is shown of it and the gradient, summed over updates, [0] without any."""
    gradient, metrics, kl_coef = torch.zeros(1), StepMetrics(found.batch.num_sequences), config.algorithm.kl_coef

    def add(optimizer: torch.optim.Optimizer, *_) -> None:
        nonlocal gradient
        grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        full = (g.full_tensor() if isinstance(g, DTensor) else g for g in grads)
        gradient = gradient + torch.cat([part.flatten().double().cpu() for part in full])

    hook = trainer.optimizer.optimizers[0].register_step_pre_hook(add)
    batch = add_advantages(config, found.batch, found.rewards_S, found.has_reward_S, kl_coef, metrics)
    update(config, trainer, batch, kl_coef, metrics)
    hook.remove()
    means = metrics.means() | policy_metrics(trainer, batch, config.algorithm)
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


def picture(rows: list[tuple[int, str, dict[str, float]]]) -> str:
    """Return an SVG that stands alone, of steps, methods and their values: a panel a column, a line a method."""
    names = list(dict.fromkeys(name for _, name, _ in rows))
    colors = {name: f"hsl({360 * i / len(names):.0f} 80% 35%)" for i, name in enumerate(names)}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="430" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="900" height="430" fill="white"/>')
    for i, name in enumerate(names):
        parts.append(f'<text x="{40 + 120 * i}" y="24" fill="{colors[name]}">{escape(name)}</text>')
    first, last = rows[0][0], rows[-1][0]
    for number, column in enumerate(COLUMNS):
        known = [(step, name, v[column]) for step, name, v in rows if math.isfinite(v.get(column, math.nan))]
        low, high = (pick((value for _, _, value in known), default=0.0) for pick in (min, max))
        title = f"{column}: {compact_number(low)} to {compact_number(high)}, steps {first} to {last}"
        parts.append(f'<g transform="translate({40 + number % 3 * 290} {64 + number // 3 * 200})" fill="none">')
        parts.append(f'<text y="-6" fill="black">{title}</text><rect width="250" height="150" stroke="#999"/>')
        for name in names:
            of_method = ((step - first, high - value) for step, other, value in known if other == name)
            scaled = ((250 * x / (last - first or 1), 150 * y / (high - low or 1)) for x, y in of_method)
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
            parts.append(f'<polyline points="{points}" stroke="{colors[name]}"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])
