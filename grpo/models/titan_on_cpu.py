"""Let torchtitan run without a GPU. Import this before anything of torchtitan: its modules copy these two names."""

import torch
import torchtitan.tools.utils as titan_utils

if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu
