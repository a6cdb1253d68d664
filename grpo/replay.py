"""Train once more on the batches that a run recorded (`--record`): the same losses, or those of another algorithm.

    torchrun --nproc_per_node=2 -m grpo.replay RUN [--field value ...]
    python -m grpo.replay RUN --methods grpo dapo my_loss.py:mine [--field value ...]

With --methods, one process trains several side by side (compare.py), and results go to RUN-compare. The config is
RUN/config.py with the flags, and all ranks are trainers; nothing is sampled, scored or evaluated. On as many trainer
ranks the recorded run's losses come out again to the last digit. Results go to `--run-dir`, by default RUN-replay. Left
out: rollouts as text, which the recorded run's folder has.
"""

import argparse
import os
from functools import partial

from grpo.algorithm.trial import try_algorithm
from grpo.compare import compare, configs_of
from grpo.config import GRPOConfig, RolesConfig, change
from grpo.config.checks import validate
from grpo.config.recipes import load, load_recipe
from grpo.data.recorded import batch_path, check_recorded, read_step
from grpo.models.hf_folder import read_hf_config
from grpo.report.rollout_metrics import measured_metrics
from grpo.roles.metrics import StepMetrics
from grpo.run.command_line import subject_of
from grpo.run.session import Session, is_due, run
from grpo.watch.failures import refuse_bad_input, run_script
from grpo.watch.stopping import end_with_launcher
from train_grpo import add_advantages, update


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
    run(config, "grpo.replay", partial(read, recorded), train, layout)


def load_config(recorded: str, flags: list[str], num_trainers: int, kind: str = "replay") -> GRPOConfig:
    """The recorded run's config with the flags, on so many trainers. Raises ValueError if that cannot work.

    kind: how the folder is called in which the results go, behind the recorded run's name.
    """
    if not any(flag.partition("=")[0] in ("--run-dir", "--run_dir") for flag in flags):
        flags = ["--run-dir", f"{recorded.rstrip('/')}-{kind}", *flags]
    config = load(GRPOConfig, f"{recorded}/config.py", [f"{recorded}/config.py", *flags])
    changes = {"roles.num_trainers": num_trainers, "checkpoint.keep_best": ""}
    if config.model.path.startswith("toy:"):  # its tokenizer may come from data that is not read now
        changes["model.path"] = f"{recorded}/initial_model"
    config = change(config, changes)
    validate(config)
    return config


def read(recorded: str, session: Session) -> None:
    """Check the loss, the recorded batches and the model. On rank 0."""
    config, algorithm = session.config, session.config.algorithm
    try_algorithm(algorithm)
    session.open((str(batch_path(recorded, 1).parent),), config.trainer.tensor_parallel)
    coefficients = {"algorithm.kl_coef": algorithm.kl_coef, "algorithm.distill_coef": algorithm.distill_coef}
    needs_reference = " and ".join(f"{name}={value}" for name, value in coefficients.items() if value)
    steps = range(session.first_step + 1, config.num_steps + 1)
    check_recorded(recorded, steps, config.group_size, needs_reference, config.turns_earn)
    ranks = f"{session.layout.num_trainers} trainer ranks"
    print(f"replay of {recorded} on {ranks}, which neither samples nor evaluates", flush=True)


def replay(recorded: str, config: GRPOConfig, session: Session) -> None:
    """Take the recorded run's steps. Every rank calls it, and reads the batches for itself."""
    timer, kl_coef = session.timer, config.algorithm.kl_coef
    trainer, _, _ = session.start_up()
    vocab_size = read_hf_config(trainer.model.folder).vocab_size
    for step in session.steps():
        if session.ask_driver(session.is_stopped, step):
            session.save(step, trainer)
            break
        found = read_step(recorded, step + 1, vocab_size)
        metrics = StepMetrics(found.batch.num_sequences)
        with timer.phase("train"):
            batch = add_advantages(config, found.batch, found.rewards_S, found.has_reward_S, kl_coef, metrics)
            update(config, trainer, batch, kl_coef, metrics)
        measured = measured_metrics(metrics, timer.close_step(), batch.num_tokens)
        session.ask_driver(session.log, step + 1, found.metrics | measured)
        if is_due(config.checkpoint.interval, step + 1, is_last=step + 1 == config.num_steps):
            session.save(step + 1, trainer)
    else:  # not stopped
        session.export(trainer)
    session.end(None)


if __name__ == "__main__":
    run_script(main)
