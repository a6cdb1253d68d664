"""Silence for what libraries print and users cannot act on; every other warning and error of theirs stays."""

import logging
import os
import warnings

# Logger (torchtitan's is the root): parts of messages that it need not print.
KNOWN_NOISE = {
    None: ("model.safetensors.index.json not found",),  # its own way of saving, which is not used
    "torch.distributed.tensor._redistribute": ("_NormPartial",),  # the gradient's norm, a scalar, in two reductions
    "torch._inductor.codecache": ("unable to serialize compiled graph",),  # of tensor parallelism; it is compiled anew
    "vllm.triton_utils.importing": ("Triton is installed",),  # there is none for a CPU
}


def quiet_libraries() -> None:
    """Call it before torch and transformers are imported, which read these variables; those already set stay."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # NUMA binding
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # one bar for each local file
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    warnings.filterwarnings("ignore", message=r"Argument aux_data .* cannot be converted")  # flash-attn-4's compiler
    for name, parts in KNOWN_NOISE.items():
        logging.getLogger(name).addFilter(lambda record, parts=parts: not any(p in record.getMessage() for p in parts))
