"""Qwen3-8B learns the chats of UltraChat: one node of 8 GPUs of 80 GB.

    torchrun --nproc_per_node=8 train_sft.py configs/sft_qwen3_8b.py

As sft_llama3_1_8b.py. Qwen3's own chat template forgets the thoughts of earlier turns, so several answers of a chat
cannot be learned with it; examples/qwen3_chat.jinja writes all turns like the last one. The model that is left
has that template.

Memory per GPU (`--dry-run --gpus 8` with this recipe): 16 bytes per parameter, 8.2e9 x 16 / 8 ranks = 15 GiB; with the
activations of 16384 tokens and the rest about 55 GiB.
"""

import pathlib

from grpo.config import change

config = change(
    "sft_llama3_1_8b.py",
    {
        "model.path": "Qwen/Qwen3-8B",
        "data.prompt_template": str(pathlib.Path(__file__).parent / "examples" / "qwen3_chat.jinja"),
        "run_dir": "runs/sft_qwen3_8b",
    },
)
