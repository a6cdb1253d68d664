"""A recipe of nothing but defaults: 4 trainers, 4 generators, 32 prompts of 8 completions."""

from grpo import config as c

config = c.GRPOConfig()
