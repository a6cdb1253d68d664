"""A recipe of the run that STOP describes, in whose middle one rank gets SIGTERM; nothing else is changed.

STOP is JSON: recipe, script (grpo or sft), rank (of torchrun), phase and step (counted from 1).
"""

import json
import os
import signal
import time

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from grpo.run.step_timer import StepTimer

# Until the driver has heard of a signal at another rank, which takes up to two seconds
HEARD_SECONDS = 3.0

stop = json.loads(os.environ["STOP"])
config = load_recipe(stop["recipe"], {"grpo": GRPOConfig, "sft": SFTConfig}[stop["script"]])


def arm(phase: str, step: int) -> None:
    """Send this process SIGTERM in the middle of a phase that each step has once."""
    enter, begun = StepTimer.enter, []

    def enter_with_signal(self: StepTimer, name: str) -> None:
        enter(self, name)
        if name == phase:
            begun.append(name)
            if len(begun) == step:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(HEARD_SECONDS)

    StepTimer.enter = enter_with_signal


if os.environ["RANK"] == str(stop["rank"]):
    arm(stop["phase"], stop["step"])
