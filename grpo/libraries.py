"""The process made ready for torch, vLLM and the others, before they are imported. Standard library alone.

Compilers keep their results in one folder, so that the next run starts faster: `~/.cache/grpo`, or the folder in
GRPO_CACHE_DIR. Ranks, runs and nodes share it, because an entry is named by a hash of its source and GPU, and appears
whole. vLLM and FlashAttention 4 leave out the GPU, so both have a folder for each kind of GPU in it (vllm_engine.py,
attention.py). All of it can be deleted at any time.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

# Before torch is imported, which grpo.evaluate does right after this module. It would warn of NUMA binding
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Large tensors on the host lie in huge pages: to pin a checkpoint's copy takes half as long
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
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
