"""A program as it runs on GPUs, on CPUs: blocks and LM head compiled, flash attention's path with plain kernels.

    torchrun --nproc_per_node=2 tests/dist/programs/like_gpu.py train_grpo.py RECIPE --field value ...

Each compilation is a line `compiled`. Not in it: NCCL, streams, CUDA graphs.
"""

import os
import runpy
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "0"

from torch._dynamo.callback import on_compile_end

from grpo.models import attention, build
from tests import plain_attention


def main() -> None:
    build.compiles = lambda trainer, device: trainer.compile
    build.choose_attention = lambda model, device: "flash"
    attention.kernels = lambda: (plain_attention.forward, plain_attention.backward)
    on_compile_end(lambda what: print(f"compiled {what.callback_trigger.name} {what.compile_id}", flush=True))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
