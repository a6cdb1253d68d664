"""Qwen2.5-Coder-0.5B-Instruct learns GSM8K with a calculator: turns, every role on one GPU.

    torchrun --nproc_per_node=1 train_grpo.py configs/qwen2_5_coder_0_5b_gsm8k_tool.py

As qwen2_5_coder_0_5b_gsm8k.py. The chat template asks for calls in <tool_call> tags, and the model writes them in a
```json block, so the system prompt shows one and `environment.calls` reads it. Any other tool or several: see
configs/ENVIRONMENTS.md.

What to expect: accuracy at the start and after 100 steps, calls per episode (`environment/calls`), and minutes on an
H100: not measured yet.
"""

from grpo import config as c
from grpo.config import change

SYSTEM_PROMPT = """\
Call the tool calculate with one expression that gives the answer. Reply with the call alone, in this form:

```json
{"name": "calculate", "arguments": {"expression": "12*(3+4)"}}
```

When you get the result, put it within \\boxed{}."""

config = change(
    "qwen2_5_coder_0_5b_gsm8k.py",
    {
        "data.system_prompt": SYSTEM_PROMPT,
        "environment": c.EnvironmentConfig(
            tools=("configs/examples/calculator.py:calculate",), calls="fence", max_turns=4
        ),
        "run_dir": "runs/qwen2_5_coder_0_5b_gsm8k_tool",
    },
)
