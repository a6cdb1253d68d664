"""A recipe of nothing but defaults, for SFT."""

from grpo import config as c

config = c.SFTConfig()
