"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K with a calculator: turns, every role on one GPU.

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k_tool.py

As qwen2_5_coder_0_5b_gsm8k.py. The chat template asks for calls in <tool_call> tags, and the model writes them in a
```json block, so the system prompt shows one and `environment.calls` reads it.

Only a right answer after a call is rewarded. With plain rewards this model drops the tool within 20 steps, because it
is right more often in words (docs/evidence/results.md).

What to expect, weights from a 5-bit file, one seed: 0.07 of the 1,319 held-out questions are right after a call before
training (greedy), 0.25 after 25 steps, 0.26 after 50, 0.29 after 75 and 0.27 after 100 (standard error 0.012), with 1.1
calls a conversation. In words alone the same model comes to 0.40. 13 minutes on an H200 beside two other runs, 6 s a
step. Two other system prompts failed on the same model: "step by step, leave every calculation to the tool" gave no
call in 12 conversations, and "reply with the call alone" gave calls in nearly all and no right answer in 48.
"""

from grpo import config as c
from grpo.config import change

SYSTEM_PROMPT = """\
Say in a few words what to calculate, then call the tool calculate with one expression that gives the answer. This is a
reply to "A box of 4 pens costs 3 dollars. How much are 20 pens?":

20 pens are 20/4 boxes, and each box costs 3 dollars.

```json
{"name": "calculate", "arguments": {"expression": "20/4*3"}}
```

When you get the result, 15, reply with \\boxed{15}."""

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data.system_prompt": SYSTEM_PROMPT,
        "reward.functions": {"configs/examples/calculator.py:right_by_tool": 1.0},
        "environment": c.EnvironmentConfig(
            tools=("configs/examples/calculator.py:calculate",), calls="fence", max_turns=4
        ),
        "run_dir": "runs/qwen2_5_coder_0_5b_gsm8k_tool",
    },
)
