"""A script's command line as a checked config, and the process made ready, before anything slow is imported.

This needs only the standard library and tyro. Compilers keep their results in one folder, so that the next run starts
faster: `~/.cache/grpo`, or the folder in GRPO_CACHE_DIR. Ranks, runs and nodes share it, because an entry is named by a
hash of its source and GPU, and appears whole. vLLM and FlashAttention 4 leave out the GPU, so both have a folder for
each kind of GPU in it (vllm_engine.py, attention.py). All of it can be deleted at any time.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

from grpo.config.checks import check_model_path, check_world_size, num_processes
from grpo.config.fields import Config, GRPOConfig, SFTConfig
from grpo.config.recipes import SCRIPTS, differences, for_one_process, load
from grpo.folder.run_folder import check_run_folder
from grpo.watch.failures import refuse_bad_input, run_rank
from grpo.watch.stopping import end_with_launcher

RECIPES = Path(__file__).parents[2] / "configs"
# The recipe of a script or tool when the command line names none
DEFAULT_RECIPES = {
    GRPOConfig: str(RECIPES / "qwen3_1_7b_gsm8k.py"),
    SFTConfig: str(RECIPES / "sft_llama3_1_8b.py"),
}
# torch reads it when it is imported, and grpo.evaluate imports torch right after this module: NUMA binding
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
CACHE_VARIABLE = "GRPO_CACHE_DIR"
# Variable of a library -> its part of that folder
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}
# Logger (None is the root, which torchtitan uses) -> a part of messages that are not shown
KNOWN_NOISE = {
    None: "model.safetensors.index.json not found",  # torchtitan's own way of saving, which is not used
    "torch.distributed.tensor._redistribute": "_NormPartial",  # the gradient's norm, a scalar, in two reductions
    "torch._higher_order_ops.wrap": "context_fn is passed",  # selective checkpointing, of blocks without in-place ops
    "torch._inductor.codecache": "unable to serialize compiled graph",  # tensor parallelism; it is compiled again
    "vllm.triton_utils.importing": "Triton is installed",  # and finds no GPU on a CPU machine
}


def read_config(config_type: type[Config]) -> Config:
    """Read `[RECIPE.py] [--field value ...]` and check it, see `checked_config`.

    Ends the process with one message if it cannot work.
    """
    quiet_libraries()
    end_with_launcher()

    def read() -> Config:
        keep_caches()
        with refuse_bad_input():
            config = checked_config(config_type)
            check_folder_early(config, SCRIPTS[config_type])
            return config

    return run_rank(read)


def check_folder_early(config: Config, script: str) -> None:
    """Refuse a run folder or a model's folder that cannot be used, on rank 0, before anything slow.

    See `check_run_folder`. Whether the run would replace its own inputs is checked later, with the data.
    """
    if os.environ.get("RANK", "0") == "0":
        check_model_path(config.model.path)
        check_model_path(config.model.reference_path)
        check_model_path(config.reward.model)
        check_run_folder(
            config.run_dir,
            script,
            resume=config.resume,
            overwrite=config.overwrite,
        )


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
        lines = [line, *differences(fitted, config)]
        print("\n  ".join(lines))
    return fitted


def keep_caches() -> None:
    """Make the libraries use the folder; call it before they are used. Variables that are set already stay."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if inductor and os.environ.get("TORCHINDUCTOR_CACHE_DIR") == inductor.default_cache_dir():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]  # torch sets it to a folder in /tmp while it is imported
    path = os.environ.get(CACHE_VARIABLE, "~/.cache/grpo")
    folder = Path(path).expanduser().absolute()
    for variable, part in CACHES.items():
        os.environ.setdefault(variable, str(folder / part))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # it keeps nothing otherwise


def quiet_libraries() -> None:
    """Keep the libraries from printing noise; call it before they are imported. Variables that are set already stay."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # one bar for each local file
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    warnings.filterwarnings("ignore", message=r"Argument aux_data .* cannot be converted")  # flash-attn-4's compiler
    for name, noise in KNOWN_NOISE.items():
        logging.getLogger(name).addFilter(lambda record, noise=noise: noise not in record.getMessage())
