"""One folder for what compilers keep: of torch.compile, Triton, vLLM and FlashAttention 4. The next run starts with it.

By default it is `grpo` in the user's cache folder, where torch alone would take /tmp, which machines empty. Ranks, runs
and nodes share it: entries are found by a hash of what was compiled, for which GPU, and appear whole. Those of vLLM and
of FlashAttention are not found by the GPU, so both have folders in it: one for each index of a GPU, and one for each
kind too (engine.py, attention.py). All of it can be deleted at any time.
"""

import os
import pathlib
import sys

VARIABLE = "GRPO_CACHE_DIR"
# Variables of the libraries, and each one's part of the folder
PARTS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",
}


def keep_caches() -> None:
    """Point the libraries to the folder, before they are used; one whose own variable is set stays where it is.

    Raises ValueError if the folder that GRPO_CACHE_DIR names cannot be written; the default one is then not used.
    """
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if inductor and os.environ.get("TORCHINDUCTOR_CACHE_DIR") == inductor.default_cache_dir():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]  # torch sets its default while it is imported
    chosen = os.environ.get(VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(chosen or f"{home}/grpo").absolute()
    parts = {variable: folder / part for variable, part in PARTS.items() if not os.environ.get(variable)}
    try:
        for part in parts.values():
            part.mkdir(parents=True, exist_ok=True)
            if not os.access(part, os.W_OK):
                raise PermissionError(f"{part} is not writable")
    except OSError as error:
        if chosen:
            raise ValueError(f"{VARIABLE}={chosen} cannot hold the compilers' caches: {error}; name another") from error
        return
    os.environ.update({variable: str(part) for variable, part in parts.items()})
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # it keeps nothing otherwise
