"""Teach a toy policy to guess numbers as players do who seldom mind the answers: the start for `toy_guess.py`.

torchrun --nproc_per_node=2 train_sft.py configs/toy_guess_sft.py
"""

from grpo.config import change

config = change(
    "toy_tools_sft.py",
    {
        "model.path": "configs/examples/toys.py:guess_model",
        "data.path": "configs/examples/toys.py:guess",
        "run_dir": "runs/toy_guess_sft",
        "num_steps": 300,
    },
)
