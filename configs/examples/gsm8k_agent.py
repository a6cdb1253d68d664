"""An agent of the openai client that solves word problems with a calculator: see qwen2_5_coder_0_5b_gsm8k_agent.py."""

import json

import openai

from configs.examples.calculator import calculate

SYSTEM_PROMPT = """\
Please reason step by step, and put your final answer within \\boxed{}. For a calculation you may end your reply with a
call of the tool calculate, and go on when you get its result:

```json
{"name": "calculate", "arguments": {"expression": "20/4*3"}}
```"""
EXPRESSION = {"type": "string", "description": "Numbers with + - * / and parentheses, such as 2*(3+4)."}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate exactly.",
        "parameters": {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]},
        "return": {"type": "string"},
    },
}
MAX_TURNS = 4
# Opening one takes 50 ms, and the agents that play in one process can share it
CLIENT = openai.OpenAI(api_key="of the episode")


def run(row, base_url, api_key, model):
    """Answer the question of a row. Returns no reward, so that `reward.functions` judge the last answer."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer_of(call.function)})


def answer_of(function):
    """Return what the tool says to a call, or what is wrong with the call."""
    try:
        return calculate(**json.loads(function.arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
