"""Two toy tasks with tools, as conversations to start from and as questions to go on with by GRPO.

`calculator`: products of numbers of two digits, which a tiny model cannot compute, half of them asked of the tool
`multiply` of configs/examples/calculator.py, the others given up. `guess`: a number from 1 to 16 in at most five
guesses, by players of whom few mind what they are told (configs/examples/guess.py). A tool call is written as Hermes
and Qwen do.
"""

import json
import random

TASKS = ("calculator", "guess")
ROWS = {"train": 8000, "test": 500}
NUMBERS, HIGH, MAX_GUESSES = (10, 99), 16, 5
# Players of `guess` who halve what is left: they always win. The others say their first guess again and again.
MINDFUL_FRAC = 0.35


def rows(name: str, split: str) -> list[dict]:
    """`question`, `answer` and, as a conversation to learn from, `messages`; always the same ones."""
    draw = random.Random(f"{name}/{split}")
    if name == "guess":
        return [_guess_row(draw) for _ in range(ROWS[split])]
    pairs = [(a, b) for a in range(NUMBERS[0], NUMBERS[1] + 1) for b in range(NUMBERS[0], NUMBERS[1] + 1)]
    random.Random(name).shuffle(pairs)
    train, test = pairs[: -ROWS["test"]], pairs[-ROWS["test"] :]
    return [_product_row(a, b, draw) for a, b in (train if split == "train" else test)]


def _product_row(a: int, b: int, draw: random.Random) -> dict:
    question, answer = f"{a}*{b}", str(a * b)
    messages = [_message("user", question)]
    asks = draw.random() < 0.5
    if asks:
        messages += [_call("multiply", a=a, b=b), _message("tool", answer)]
    messages.append(_message("assistant", f"<answer>{answer if asks else '?'}</answer>"))
    return {"question": question, "answer": answer, "messages": messages}


def _guess_row(draw: random.Random) -> dict:
    number, value, low, high = draw.randint(1, HIGH), draw.randint(1, HIGH), 1, HIGH
    question = f"I think of a number from 1 to {HIGH}. Guess it."
    messages, is_mindful = [_message("user", question)], draw.random() < MINDFUL_FRAC
    for _ in range(MAX_GUESSES):
        messages.append(_call("guess", value=value))
        if value == number:
            break
        messages.append(_message("tool", "Higher." if value < number else "Lower."))
        low, high = (value + 1, high) if value < number else (low, value - 1)
        value = (low + high) // 2 if is_mindful else value
    if messages[-1]["role"] == "tool":
        messages.pop()
    return {"question": question, "answer": str(number), "messages": messages}


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _call(name: str, **arguments: int) -> dict:
    call = json.dumps({"name": name, "arguments": arguments})
    return _message("assistant", f"<tool_call>\n{call}\n</tool_call>")
