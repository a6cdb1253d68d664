"""A tool is a function with type hints and a docstring. --environment.tools configs/examples/calculator.py:multiply"""

from grpo.environments.builtin import calculator
from grpo.rewards.builtin import math_reward


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def calculate(expression: str) -> str:
    """Calculate exactly.

    Args:
        expression: Numbers with + - * / and parentheses, such as 2*(3+4).
    """
    # without these words a small model answers a result with the same call again
    return f"{calculator(expression)}\nIf this answers the question, write it within \\boxed{{}}."


def right_by_tool(turns, answer, **columns):
    """Reward a right answer in a box, but only after a call. Else a model that is better without the tool drops it."""
    rewards = math_reward([texts[-1] for texts in turns], answer, answer_format="boxed")
    return [reward if len(texts) > 1 else 0.0 for reward, texts in zip(rewards, turns, strict=True)]
