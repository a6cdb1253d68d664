"""A tool is a function with type hints and a docstring. --environment.tools configs/examples/calculator.py:multiply"""

from grpo.environments.builtin import calculator


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
