"""Greedy accuracy and pass@k of any Hugging Face folder on held-out prompts, without training.

    python -m grpo.evaluate MODEL [RECIPE.py] [--field value ...]
    torchrun --nproc_per_node=8 -m grpo.evaluate MODEL [RECIPE.py] [--field value ...]

The recipe, of GRPO or SFT, says which prompts (sections `data` and `evaluation`), rewards and sampling options
(`generator`); without one it is that of train_grpo.py. After training, `python -m grpo.evaluate RUN_DIR/model
RUN_DIR/config.py` repeats the last evaluation of the run. Every process holds an engine, or a part of one with
`generator.tensor_parallel`. Numbers go to the console and to metrics.jsonl in `--run-dir`, all completions to
evaluation.jsonl there, beside the config that names the model. Without `--run-dir` it is a new folder in runs/evaluate
each time.
"""

import dataclasses
import itertools
import os
import pathlib
import sys

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.checks import validate
from grpo.config.generation import generating
from grpo.config.recipes import as_recipe, load
from grpo.folder.run_folder import begin_run, check_run_folder, mark_run_folder
from grpo.models import hf_folder
from grpo.report.log import RunLog
from grpo.roles.comm import from_driver, on_driver
from grpo.roles.generator import Generator
from grpo.roles.process_groups import Roles, close_roles, setup_roles
from grpo.run.caches import keep_caches
from grpo.run.model_folder import open_model_folder
from grpo.run.scorer import Scorer, check_functions, evaluate, held_out_prompts
from grpo.types import Completion, Prompt
from grpo.watch.failures import BadInput, refuse_bad_input, run_script, set_place

DEFAULT_RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "qwen3_1_7b_gsm8k.py")
USAGE = "usage: python -m grpo.evaluate MODEL [RECIPE.py] [--field value ...]"
RUNS = pathlib.Path("runs/evaluate")
SCRIPT = "grpo.evaluate"  # as run.json names it


def main() -> None:
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(f"{USAGE}\n\n{__doc__}\nThe fields: python train_grpo.py --help")
        return
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise BadInput(f"the model's folder or hub name comes first; {USAGE}")
    with refuse_bad_input():
        keep_caches()
        config = load_config(sys.argv[1], sys.argv[2:], int(os.environ.get("WORLD_SIZE", "1")))
    roles = setup_roles(config)
    set_place(role=roles.name)
    driver = Driver(config, roles)
    folder, stop_token_ids, prompts = driver.start()
    folder = hf_folder.fetch_folder(folder, roles.control)
    generator = Generator(config.generator, config.model, config.data, config.seed, folder, stop_token_ids, roles)
    evaluate(driver, generator, prompts, config.evaluation, 0, roles)
    close_roles(roles, generator.close)


def load_config(model: str, arguments: list[str], world_size: int) -> GRPOConfig:
    """The recipe with this model, every process a generator and nothing to train."""
    config = load((GRPOConfig, SFTConfig), DEFAULT_RECIPE, arguments)
    given = any(argument.partition("=")[0] in ("--run-dir", "--run_dir") for argument in arguments)
    config = dataclasses.replace(
        generating(config, world_size),
        model=dataclasses.replace(config.model, path=model),
        run_dir=config.run_dir if given else "",  # the driver finds a new one
    )
    validate(config)
    return config


def new_folder(model: str) -> str:
    """`runs/evaluate/MODEL`, or the first of `MODEL-2`, `MODEL-3`, ... that is not there yet."""
    parts = [part for part in pathlib.Path(model).parts[-2:] if part not in ("/", "..")]
    first = RUNS / "-".join(parts).replace(":", "-")
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return str(next(folder for folder in itertools.chain([first], numbered) if not folder.exists()))


class Driver:
    """What rank 0 alone does: the prompts, the rewards, the report."""

    def __init__(self, config: GRPOConfig, roles: Roles):
        run_dir = config.run_dir or (new_folder(config.model.path) if roles.is_driver else "")
        self.config, self.roles = dataclasses.replace(config, run_dir=run_dir), roles

    @from_driver
    def start(self) -> tuple[str, list[int], list[Prompt]]:
        """Refuse bad input; returns the model's folder or hub name, its stop tokens and the held-out prompts."""
        config = self.config
        with refuse_bad_input():
            check_functions(config)
            inputs = (config.model.path, *(source.path for source in config.evaluation.held_out(config.data)))
            check_run_folder(config.run_dir, SCRIPT, inputs, overwrite=config.overwrite)
            mark_run_folder(config.run_dir, SCRIPT)
            folder, tokenizer = open_model_folder(config, config.generator.tensor_parallel)
            prompts = held_out_prompts(config, tokenizer)
            self.scorer = Scorer(config, folder, tokenizer)
        begin_run(config.run_dir, SCRIPT, as_recipe(config), overwrite=config.overwrite)
        return folder, self.scorer.stop_token_ids, prompts

    @on_driver
    def log_evaluation(
        self, prompts: list[Prompt], greedy: list[Completion], samples: list[Completion], step: int
    ) -> None:
        """Score, write and print."""
        metrics = dataclasses.replace(self.config.metrics, tensorboard=False, wandb_project="")
        run_log = RunLog(metrics, self.config.run_dir, num_steps=0)
        self.scorer.log_evaluation(run_log, prompts, greedy, samples, step)
        run_log.close()
        self.scorer.pool.close()
        print(f"{len(prompts)} prompts; every completion is in {self.config.run_dir}/evaluation.jsonl", flush=True)


if __name__ == "__main__":
    run_script(main)
