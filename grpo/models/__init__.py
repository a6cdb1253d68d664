"""Models. What is imported from here finds torchtitan ready to run without a GPU, too.

torchtitan's modules copy two names from its tools as they are imported, so these are set before any of them is. Whoever
imports torchtitan itself, without a module of this folder, imports `grpo.models` first.
"""

import torch
import torchtitan.tools.utils as titan_utils

if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu


def own_config(module: type) -> type:
    """Give a kind of torchtitan's module a `Config` with the fields of its parent's, which builds this kind."""
    module.Config = type("Config", (module.Config,), {"__slots__": (), "_owner": module})
    return module
