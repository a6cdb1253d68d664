"""What a user sets. A recipe imports from here: `from grpo import config as c`, then `config = c.GRPOConfig(...)`.

This folder needs the standard library only (and tyro, where there is a command line).
"""

# ruff: noqa: F401, F403

from grpo.config.fields import *
from grpo.config.recipes import change
