"""Guess a number in at most five turns, told higher or lower: a tiny model learns to listen, on a laptop.

    torchrun --nproc_per_node=2 train_grpo.py configs/toy_guess.py

Starts from what `train_sft.py configs/toy_guess_sft.py` leaves, which hardly listens.
"""

from grpo import config as c
from grpo.config import change

config = change(
    "toy_calculator.py",
    {
        "model.path": "runs/toy_guess_sft/model",
        "data": c.DataConfig(
            path="configs/examples/toys.py:seeds",
            answer_column="",
            columns={"seed": "seed"},
            system_prompt="",
            max_prompt_tokens=48,
        ),
        "environment": c.EnvironmentConfig(name="configs/examples/guess.py:Guess", calls="hermes", max_turns=5),
        "reward": c.RewardConfig(functions={}, num_workers=1),
        "generator.max_completion_tokens": 128,
        "run_dir": "runs/toy_guess",
        "num_steps": 60,
    },
)
