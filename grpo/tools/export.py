"""Any checkpoint of a run as a Hugging Face folder, which transformers, vLLM and `--model.path` load.

    python -m grpo.export RUN_DIR [--step latest] [--to FOLDER]

`--step` is a number, `latest`, or `best` by the metric that `checkpoint.keep_best` named. The folder is
RUN_DIR/model-step-N unless `--to` names another. The model of the run's config must still be where it was: tokenizer
and config.json come from there. One process needs memory for the weights in float32; for a large model start
`torchrun --nproc_per_node=4 -m grpo.export ...`, which distributes them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from tyro.conf import Positional

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from grpo.data.chat import load_tokenizer
from grpo.folder.checkpoint import best_checkpoint, check_checkpoint, load_model
from grpo.folder.run_folder import step_folders, step_of
from grpo.models.build import build_model
from grpo.models.export import adapters_folder, export_hf
from grpo.models.hf_folder import fetch_folder
from grpo.roles.comm import broadcast
from grpo.roles.process_groups import close_roles, setup_trainers
from grpo.run.policy import learned_form
from grpo.watch.failures import refuse_bad_input, run_rank


@dataclass(frozen=True)
class Options:
    """The command line."""

    run_dir: Positional[Path]
    step: str = "latest"
    """A number, latest or best."""
    to: Path | None = None


def main(arguments: list[str] | None = None) -> None:
    options = tyro.cli(
        Options,
        prog="python -m grpo.export",
        description=__doc__,
        args=arguments,
    )
    run_dir = options.run_dir
    with refuse_bad_input():
        if not (run_dir / "config.py").is_file():
            raise ValueError(f"{run_dir} has no config.py; name the folder of a run")
        config = load_recipe(
            str(run_dir / "config.py"),
            GRPOConfig,
            SFTConfig,
        )
        checkpoint = find_checkpoint(
            run_dir,
            options.step,
            config.checkpoint.keep_best,
        )
        check_checkpoint(checkpoint)
        target = options.to or run_dir / f"model-{checkpoint.name}"
        written = [target]
        if config.trainer.lora_rank:
            written.append(adapters_folder(target))
        for folder in written:
            if folder.exists():
                raise ValueError(f"{folder} exists; remove it or choose another folder with --to")
    roles = setup_trainers()
    # a run that goes on may have saved another checkpoint since the first rank looked
    checkpoint, target = broadcast((checkpoint, target), roles.control)
    model_path = config.model.path
    if config.model.is_built:
        model_path = str(run_dir / "initial_model")
    folder = fetch_folder(model_path, roles.control)
    trainer = replace(
        config.trainer, data_replicas=1, context_parallel=1, expert_parallel=1
    )  # however the run was sharded
    model = build_model(
        config.model,
        trainer,
        folder,
        device=roles.device,
        tensor_parallel=1,
    )
    load_model(checkpoint, model)
    form = learned_form(config, load_tokenizer(folder, config.data))
    export_hf(model, target, getattr(torch, config.model.dtype), form)
    if roles.is_driver:
        print(f"{checkpoint} -> {target}")
    close_roles(roles)


def find_checkpoint(
    run_dir: Path,
    step: str,
    metric: str,
) -> Path:
    """Return the checkpoint of `step`: a number, `latest`, or `best` by the held-out `metric`. ValueError if none."""
    folders = step_folders(run_dir)
    checkpoints = {str(step_of(folder)): folder for folder in folders}
    if folders:
        checkpoints["latest"] = folders[-1]
    if metric:
        best = best_checkpoint(run_dir, metric)
        if best:
            checkpoints["best"] = best
    if step not in checkpoints:
        raise ValueError(
            f"{run_dir} has no checkpoint of step {step}; there are: {', '.join(checkpoints) or 'none'} (best is by "
            f"checkpoint.keep_best, which is {metric!r})"
        )
    return checkpoints[step]


if __name__ == "__main__":
    run_rank(main)
