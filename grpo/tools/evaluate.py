"""Greedy accuracy and pass@k of any Hugging Face folder on held-out prompts, without training.

    python -m grpo.evaluate MODEL [RECIPE.py] [--field value ...]
    torchrun --nproc_per_node=8 -m grpo.evaluate MODEL [RECIPE.py] [--field value ...]

The recipe, of GRPO or SFT, names the prompts (sections `data` and `evaluation`), the rewards and the sampling options
(`generator`); by default it is that of train_grpo.py. `python -m grpo.evaluate RUN_DIR/model RUN_DIR/config.py` repeats
the last evaluation of a run. Every process holds an engine, or a part of one with `generator.tensor_parallel`. Numbers
go to the console and to metrics.jsonl in `--run-dir`, by default a new folder in runs/evaluate; all completions go to
evaluation.jsonl there.
"""

import itertools
import pathlib

from grpo.config import GRPOConfig, RolesConfig, SFTConfig, change
from grpo.config.checks import num_processes
from grpo.config.fields import Config
from grpo.config.recipes import load
from grpo.run.command_line import DEFAULT_RECIPES, begin_early
from grpo.run.policy import read_policy
from grpo.run.saved import find_saved
from grpo.run.scorer import check_functions
from grpo.run.session import Session, run
from grpo.run.start import Start, read_evaluation
from grpo.tools.command import subject_of
from grpo.watch.failures import refuse_bad_input, run_script

RUNS = pathlib.Path("runs/evaluate")


def main() -> None:
    model, words = subject_of(__doc__)
    num_ranks = num_processes()
    with refuse_bad_input():
        config = load_config(model, words, num_ranks)
        begin_early(config, "grpo.evaluate")
    # no rank trains; rank 0 is the driver nevertheless
    layout = RolesConfig(num_trainers=0, num_generators=num_ranks)
    run(config, "grpo.evaluate", read, evaluate, layout)


def load_config(
    model: str,
    words: list[str],
    num_ranks: int,
) -> Config:
    """Return the recipe with this model and nothing to train.

    Raises ValueError if the ranks do not make whole engines, or a reward model is to score.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in words]
    has_run_dir = "--run-dir" in flags

    def fit(config: Config, _recipe: Config) -> Config:
        """Give every rank an engine. A GRPO config must name a trainer too."""
        changes = {
            "model.path": model,
            "metrics.tensorboard": False,
            "metrics.wandb_project": "",
            "resume": False,
            "evaluation.interval": 1,
            "checkpoint.keep_best": "",
            "checkpoint.push_to_hub": "",
            "generator.sleep": False,
            "trainer.tensor_parallel": 1,
            "trainer.context_parallel": 1,
            "trainer.expert_parallel": 1,
            "trainer.data_replicas": 1,
            "trainer.micro_batch_tokens": "auto",
        }
        if isinstance(config, SFTConfig):
            changes["num_trainers"] = num_ranks
        else:
            changes["roles"] = RolesConfig(num_trainers=1, num_generators=num_ranks)
        if not has_run_dir:
            changes["run_dir"] = new_folder(model)
        return change(config, changes)

    config = load(
        (GRPOConfig, SFTConfig),
        DEFAULT_RECIPES[GRPOConfig],
        words,
        fit,
    )
    if config.reward.model:
        raise ValueError(
            f"reward.model={config.reward.model} needs ranks that train, and here all sample; --reward.model '' leaves "
            "it out, and train_grpo.py --evaluation.interval 1 evaluates with it before its first step"
        )
    return config


def new_folder(model: str) -> str:
    """Return `runs/evaluate/MODEL`, or the first of `MODEL-2`, `MODEL-3`, ... that does not exist yet."""
    last_parts = pathlib.Path(model).parts[-2:]
    names = [part for part in last_parts if part not in ("/", "..")]
    name = "-".join(names).replace(":", "-")
    folder = RUNS / name
    for number in itertools.count(2):
        if not folder.exists():
            return str(folder)
        folder = RUNS / f"{name}-{number}"


def read(config: Config, script: str, build_dir: str) -> Start:
    """Check the rewards, the model and the held-out rows. On rank 0."""
    check_functions(config)
    paths = [source.path for source in config.evaluation.held_out(config.data)]
    saved = find_saved(config, script, paths)
    policy = read_policy(config, build_dir=build_dir)
    held_out, scorer = read_evaluation(config, policy)
    return Start(saved, policy, held_out=held_out, scorer=scorer)


def evaluate(config: Config, session: Session) -> None:
    """Start the engines, complete the held-out prompts, score and log. Every rank calls it."""
    session.start_up()  # evaluates once everything is there
    num_prompts = len(session.shared.held_out)
    if session.run_log:
        session.run_log.last_line = f"{num_prompts} prompts; every completion is in {config.run_dir}/evaluation.jsonl"
    session.end()


if __name__ == "__main__":
    run_script(main)
