"""A script's command line as a checked config, before anything slow is imported.

This needs only the standard library and tyro.
"""

import gc
import os
from pathlib import Path

from grpo.config.checks import check_model_path, check_world_size, num_processes
from grpo.config.fields import Config, GRPOConfig, SFTConfig
from grpo.config.recipes import SCRIPTS, differences, for_one_process, load
from grpo.folder.run_folder import check_run_folder
from grpo.libraries import keep_caches, quiet_libraries
from grpo.rewards import loading
from grpo.watch.failures import refuse_bad_input, run_rank
from grpo.watch.stopping import end_with_launcher

RECIPES = Path(__file__).parents[2] / "configs"
# The recipe of a script or tool when the command line names none
DEFAULT_RECIPES = {
    GRPOConfig: str(RECIPES / "qwen3_1_7b_gsm8k.py"),
    SFTConfig: str(RECIPES / "sft_llama3_1_8b.py"),
}


def read_config(config_type: type[Config]) -> Config:
    """Read `[RECIPE.py] [--field value ...]` and check it, see `checked_config`.

    Ends the process with one message if it cannot work.
    """
    gc.disable()  # until `run_script`: what is imported stays, and looking through it takes a fifth of the time
    quiet_libraries()
    end_with_launcher()

    def read() -> Config:
        keep_caches()
        with refuse_bad_input():
            config = checked_config(config_type)
            begin_early(config, SCRIPTS[config_type])
            return config

    return run_rank(read)


def begin_early(config: Config, script: str) -> None:
    """Refuse a run folder or a model's folder that cannot be used, on rank 0, before anything slow.

    See `check_run_folder`. Whether the run would replace its own inputs is checked later, with the data. The reward
    processes of GRPO start here, because they load for as long as this process imports torch.
    """
    if os.environ.get("RANK", "0") == "0":
        for path in (config.model.path, config.model.reference_path, config.reward.model):
            check_model_path(path)
        check_run_folder(
            config.run_dir,
            script,
            resume=config.resume,
            overwrite=config.overwrite,
        )
        if script == SCRIPTS[GRPOConfig] and not config.dry_run:
            loading.start_early(config.reward, config.generator.max_completion_tokens)


def checked_config(config_type: type[Config], words: list[str] | None = None) -> Config:
    """Return the config of a script's command line, after the checks that need no file.

    words: the arguments, by default those of this process. Without torchrun, or in a dry run for one GPU, the layout
    becomes that of one process. Raises ValueError if torchrun started another number of processes, or if anything else
    cannot work.
    """
    config = load(
        config_type,
        DEFAULT_RECIPES[config_type],
        words,
        _fit_to_processes,
    )
    if not config.gpus:  # else a dry run for another machine
        check_world_size(config, num_processes())
    return config


def _fit_to_processes(config: Config, recipe: Config) -> Config:
    """Return the config for one process if there is only one, and print what that changes."""
    has_torchrun = "RANK" in os.environ
    if config.gpus > 1 or (has_torchrun and not config.gpus):
        return config
    fitted = for_one_process(config, recipe)
    if fitted != config:
        reason = "one GPU" if config.gpus else "no torchrun"
        line = f"{reason}: one process has all roles of the {config.num_ranks} ranks configured"
        if config.dry_run and not config.gpus:
            line += f", which --gpus {config.num_ranks} judges"
        print("\n  ".join([line, *differences(fitted, config)]))
    return fitted
