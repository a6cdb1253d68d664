"""A script's command line as a checked config, and the process made ready, before anything slow is imported.

Only the standard library and tyro are needed for it. What compilers keep goes into one folder, with which the next run
starts: `~/.cache/grpo`, or what GRPO_CACHE_DIR names. Ranks, runs and nodes share it: entries are found by a hash of
what was compiled, for which GPU, and appear whole. Those of vLLM and FlashAttention 4 are not found by the GPU, so both
have folders of their own in it for each (vllm_engine.py, attention.py). All of it can be deleted at any time.
"""

import importlib.util
import logging
import os
import pathlib
import sys
import warnings
from functools import partial

from grpo.config.checks import check_world_size
from grpo.config.fields import Config, GRPOConfig, SFTConfig
from grpo.config.recipes import differences, for_one_process, load
from grpo.folder.run_folder import check_run_folder
from grpo.watch.failures import refuse_bad_input, run_rank
from grpo.watch.stopping import end_with_launcher

RECIPES = pathlib.Path(__file__).parents[2] / "configs"
# What a script or tool takes without a recipe
DEFAULT_RECIPES = {
    GRPOConfig: str(RECIPES / "qwen3_1_7b_gsm8k.py"),
    SFTConfig: str(RECIPES / "sft_llama3_1_8b.py"),
}
SCRIPTS = {GRPOConfig: "train_grpo.py", SFTConfig: "train_sft.py"}
CACHE_VARIABLE = "GRPO_CACHE_DIR"
# Variables of the libraries, and each one's part of that folder
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}
# Logger (torchtitan's is the root): parts of messages that it need not print.
KNOWN_NOISE = {
    None: ("model.safetensors.index.json not found",),  # its own way of saving, which is not used
    "torch.distributed.tensor._redistribute": ("_NormPartial",),  # the gradient's norm, a scalar, in two reductions
    "torch._inductor.codecache": ("unable to serialize compiled graph",),  # of tensor parallelism; it is compiled anew
    "vllm.triton_utils.importing": ("Triton is installed",),  # there is none for a CPU
}


def read_config(config_type: type[Config]) -> Config:
    """Read `[RECIPE.py] [--field value ...]`, checked as what will run; see `checked_config`.

    Ends the process with one message if that cannot work.
    """
    quiet_libraries()
    end_with_launcher()
    return run_rank(partial(_read, config_type))


def _read(config_type: type[Config]) -> Config:
    keep_caches()
    with refuse_bad_input():
        config = checked_config(config_type)
        check_folder_early(config, SCRIPTS[config_type])
        return config


def check_folder_early(config: Config, script: str) -> None:
    """Refuse a run folder that cannot be taken, on rank 0, before anything slow; see `check_run_folder`.

    Whether the run reads from it is checked with the data.
    """
    if os.environ.get("RANK", "0") == "0":
        check_run_folder(config.run_dir, script, (), resume=config.resume, overwrite=config.overwrite)


def checked_config(config_type: type[Config], words: list[str] | None = None) -> Config:
    """Return the config of a script's command line, after the checks that need no file.

    words: by default those of this process. Without torchrun, or in a dry run for one GPU, the layout becomes that of
    one process. Raises ValueError if torchrun started another number of processes, or anything else cannot work.
    """
    config = load(config_type, DEFAULT_RECIPES[config_type], words, _fit_to_processes)
    if config.gpus:  # of another machine
        return config
    check_world_size(config, int(os.environ.get("WORLD_SIZE", "1")))
    if (project := config.metrics.wandb_project) and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"metrics.wandb_project={project!r} needs a package: pip install wandb, or leave it empty")
    return config


def _fit_to_processes(config: Config, recipe: Config) -> Config:
    """Return the config of one process where there is to be only one. Prints what that changes."""
    if config.gpus:
        is_alone, why = config.gpus == 1, "one GPU"
    else:
        is_alone, why = "RANK" not in os.environ, "no torchrun"
    fitted = for_one_process(config, recipe) if is_alone else config
    if fitted != config:
        said = f"{why}: one process has all roles of the {config.num_ranks} ranks configured"
        if config.dry_run and not config.gpus:
            said += f", which --gpus {config.num_ranks} judges"
        print("\n  ".join([said, *differences(fitted, config)]), flush=True)
    return fitted


def subject_of(doc: str, words: list[str] | None = None) -> tuple[str, list[str]]:
    """The first word of a tool's command line, what the tool is about, and the words behind it.

    With --help, or where no word comes first, it prints the tool's docstring and ends the process.
    """
    words = sys.argv[1:] if words is None else words
    if not words or words[0].startswith("-"):
        print(doc)
        raise SystemExit(0 if words[:1] in (["--help"], ["-h"]) else 2)
    quiet_libraries()
    keep_caches()
    return words[0], words[1:]


def tool_config(words: list[str]) -> GRPOConfig:
    """Return the config of a tool's `[RECIPE.py] [--field value ...]`, with all roles in one process."""
    return load(GRPOConfig, DEFAULT_RECIPES[GRPOConfig], words, for_one_process)


def keep_caches() -> None:
    """Point the libraries to the folder, before they are used; one whose own variable is set stays where it is."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if inductor and os.environ.get("TORCHINDUCTOR_CACHE_DIR") == inductor.default_cache_dir():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]  # torch, which would take /tmp, sets it while it is imported
    folder = pathlib.Path(os.environ.get(CACHE_VARIABLE, "~/.cache/grpo")).expanduser().absolute()
    for variable, part in CACHES.items():
        os.environ.setdefault(variable, str(folder / part))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # it keeps nothing otherwise


def quiet_libraries() -> None:
    """Set what torch and transformers read while they are imported, so call it before; variables that are set stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # NUMA binding
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # one bar for each local file
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    warnings.filterwarnings("ignore", message=r"Argument aux_data .* cannot be converted")  # flash-attn-4's compiler
    for name, parts in KNOWN_NOISE.items():
        logging.getLogger(name).addFilter(lambda record, parts=parts: not any(p in record.getMessage() for p in parts))
