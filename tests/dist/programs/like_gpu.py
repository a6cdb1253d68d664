"""A program as it runs on GPUs, on CPUs: blocks and LM head compiled, flash attention's path with plain kernels.

    torchrun --nproc_per_node=2 tests/dist/programs/like_gpu.py BACKEND train_grpo.py RECIPE --field value ...

BACKEND: inductor, or aot_eager, which traces the same graphs and needs no C++ compiler. Each function that is compiled
is a line `compiled NAME`. Not in it: NCCL, streams, CUDA graphs.
"""

import os
import runpy
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "0"

import torch
from torch._dynamo.convert_frame import register_bytecode_hook

from grpo.models import attention, build
from tests import plain_attention


def main() -> None:
    build.compiles = lambda trainer, device: trainer.compile
    build.choose_attention = lambda model, device: "flash"
    attention.kernels = lambda: (plain_attention.forward, plain_attention.backward)
    compile_by_default = torch.compile
    backend = {"backend": sys.argv[1]}
    torch.compile = lambda *functions, **options: compile_by_default(*functions, **options | backend)
    register_bytecode_hook(lambda code, _: print(f"compiled {code.co_name}", flush=True))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
