"""What a user sets. A recipe imports from here: `from grpo import config as c`, then `config = c.GRPOConfig(...)`.

Layer 0: the standard library only (and tyro, when there is a command line), so that bad input is refused before torch
is even loaded.
"""

# ruff: noqa: F401, F403

from grpo.config.fields import *
from grpo.config.recipes import change
