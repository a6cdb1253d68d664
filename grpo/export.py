"""Any checkpoint of a run as a Hugging Face folder, that transformers, vLLM and `--model.path` load.

    python -m grpo.export RUN_DIR [--step latest] [--to FOLDER]

`--step` is a number, `latest`, or `best` by the metric that `checkpoint.keep_best` named. The folder is
RUN_DIR/model-step-N unless `--to` names another. The model of the run's config must still be where it was: tokenizer
and config.json come from there. One process needs room for the weights in float32; for a large model start
`torchrun --nproc_per_node=4 -m grpo.export ...`, which shares them out.
"""

import argparse
import dataclasses
import pathlib

import torch

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from grpo.data.chat import load_tokenizer
from grpo.folder.checkpoint import best_checkpoint, check_checkpoint, load_model
from grpo.folder.run_folder import step_folders, step_of
from grpo.models.build import build_model
from grpo.models.export import export_hf
from grpo.models.hf_folder import fetch_folder
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.run.inputs import learned_form
from grpo.watch.failures import refuse_bad_input, run_rank


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    parser.add_argument("--step", default="latest", help="a number, latest or best")
    parser.add_argument("--to", type=pathlib.Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    with refuse_bad_input():
        if not (given.run_dir / "config.py").is_file():
            raise ValueError(f"{given.run_dir} has no config.py; name the folder of a run")
        config = load_recipe(str(given.run_dir / "config.py"), GRPOConfig, SFTConfig)
        checkpoint = find_checkpoint(given.run_dir, given.step, config.checkpoint.keep_best)
        check_checkpoint(checkpoint)
        target = given.to or given.run_dir / f"model-{checkpoint.name}"
        if target.exists():
            raise ValueError(f"{target} exists; remove it or choose another folder with --to")
    roles = setup_trainers()
    is_toy = config.model.is_built
    folder = fetch_folder(str(given.run_dir / "initial_model") if is_toy else config.model.path, roles.control)
    trainer = dataclasses.replace(config.trainer, data_replicas=1)  # however the run was sharded
    model = build_model(config.model, trainer, folder, device=roles.device, tensor_parallel=1)
    load_model(checkpoint, model)
    form = learned_form(config, load_tokenizer(folder, config.data))
    export_hf(model, target, getattr(torch, config.model.dtype), form)
    if roles.is_driver:
        print(f"{checkpoint} -> {target}", flush=True)
    close_roles(roles)


def find_checkpoint(run_dir: pathlib.Path, step: str, metric: str) -> pathlib.Path:
    """The checkpoint that `step` names: a number, `latest`, or `best` by the held-out `metric`; ValueError if none."""
    there = {str(step_of(folder)): folder for folder in step_folders(run_dir)}
    if there:
        there["latest"] = list(there.values())[-1]
    if step == "best" and metric and (best := best_checkpoint(run_dir, metric)):
        there["best"] = best
    if step not in there:
        named, by = ", ".join(there) or "none", f"checkpoint.keep_best, which is {metric!r}"
        raise ValueError(f"{run_dir} has no checkpoint of step {step}; there are: {named} (best is by {by})")
    return there[step]


if __name__ == "__main__":
    run_rank(main)
