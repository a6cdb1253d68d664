"""A script's command line as a checked config, before anything slow is imported: the standard library and tyro only."""

import os
import pathlib
from functools import partial

from grpo.config.checks import validate
from grpo.config.fields import Config, GRPOConfig
from grpo.config.layout import check_world_size, for_one_process, for_replay
from grpo.config.recipes import load
from grpo.report.wandb_log import check_wandb
from grpo.run.caches import keep_caches
from grpo.run.quiet import quiet_libraries
from grpo.watch.failures import refuse_bad_input, run_rank
from grpo.watch.stopping import end_with_launcher


def read_config(config_type: type[Config], default_recipe: pathlib.Path) -> Config:
    """Read `[RECIPE.py] [--field value ...]`, checked also against the number of processes that torchrun started.

    Without torchrun the layout becomes that of one process; a replay takes all processes as trainers. Ends the process
    with one message if that cannot work.
    """
    quiet_libraries()
    end_with_launcher()
    return run_rank(partial(_read, config_type, default_recipe))


def _read(config_type: type[Config], default_recipe: pathlib.Path) -> Config:
    with refuse_bad_input():
        keep_caches()
        config = load(config_type, str(default_recipe))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if isinstance(config, GRPOConfig) and config.replay:
            config = for_replay(config, world_size)
            validate(config)
        if "RANK" not in os.environ and config.num_ranks > 1:
            print(f"no torchrun: one process has all roles of the {config.num_ranks} ranks configured", flush=True)
            config = for_one_process(config)
            validate(config)
        check_world_size(config, world_size)
        check_wandb(config.metrics.wandb_project)
    return config
