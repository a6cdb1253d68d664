"""A program as it runs on GPUs, on CPUs: blocks and LM head compiled, flash attention's path with plain kernels.

    torchrun --nproc_per_node=2 tests/dist/programs/like_gpu.py train_grpo.py RECIPE --field value ...

Each function that is compiled is a line `compiled NAME`. Not in it: NCCL, streams, CUDA graphs.
"""

import os
import runpy
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "0"

from torch._dynamo.convert_frame import register_bytecode_hook

from grpo.models import attention, build
from tests import plain_attention


def main() -> None:
    build.compiles = lambda trainer, device: trainer.compile
    build.choose_attention = lambda model, device: "flash"
    attention.kernels = lambda: (plain_attention.forward, plain_attention.backward)
    register_bytecode_hook(lambda code, _: print(f"compiled {code.co_name}", flush=True))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
