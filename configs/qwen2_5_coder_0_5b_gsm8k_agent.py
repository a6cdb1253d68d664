"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K as an agent of the openai client, with a calculator that it may use.

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k_agent.py

As qwen2_5_coder_0_5b_gsm8k.py; the agent is examples/gsm8k_agent.py. The same turns without an endpoint, by a tool of
the run, with the same prompts and rewards:

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k_agent.py --environment.agent "" \\
        --environment.tools configs/examples/calculator.py:calculate --run-dir runs/qwen2_5_coder_0_5b_gsm8k_turns

A right answer is rewarded with a call or without. On an H200 accuracy went from 0.23 to 0.39 in 50 steps of 5.9 s, and
from 0.22 to 0.37 in steps of 3.6 s without the endpoint. Both soon call the calculator hardly ever.
"""

from configs.examples.gsm8k_agent import MAX_TURNS, SYSTEM_PROMPT
from grpo import config as c
from grpo.config import change

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data.system_prompt": SYSTEM_PROMPT,  # of the run without the endpoint; the agent writes its own messages
        "environment": c.EnvironmentConfig(
            agent="configs/examples/gsm8k_agent.py:run", calls="fence", max_turns=MAX_TURNS
        ),
        "run_dir": "runs/qwen2_5_coder_0_5b_gsm8k_agent",
    },
)
