"""A recipe of the run that STOP describes, in whose middle one rank gets SIGTERM; nothing else is changed.

STOP is JSON: recipe, script (grpo or sft), rank (of torchrun), phase and step (counted from 1), and heard, a file that
appears when the driver has heard of the signal.
"""

import json
import os
import pathlib
import signal
import time

from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from grpo.watch import stopping
from grpo.watch.step_timer import StepTimer

stop = json.loads(os.environ["STOP"])
heard, ask_to_stop = pathlib.Path(stop["heard"]), stopping.ask_to_stop
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
                while not heard.exists():
                    time.sleep(0.05)

    StepTimer.enter = enter_with_signal


def ask_and_tell(reason: str) -> None:
    ask_to_stop(reason)
    heard.touch()


stopping.ask_to_stop = ask_and_tell
if os.environ["RANK"] == str(stop["rank"]):
    arm(stop["phase"], stop["step"])
