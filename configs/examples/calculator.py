"""A tool is a function with type hints and a docstring. --environment.tools configs/examples/calculator.py:multiply"""


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b
