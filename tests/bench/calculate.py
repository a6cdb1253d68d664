"""The calculator of `tests/bench/tools.py`, with and without a wait, for both sides."""

import functools
import time


def calculate(expression: str) -> str:
    """Carry out the first addition of a sum.

    Args:
        expression: A sum such as 12+34+56.
    """
    first, second, *rest = expression.split("+")
    return "+".join([str(int(first) + int(second)), *rest])


@functools.wraps(calculate)
def after_100_ms(expression: str) -> str:
    """Answer as `calculate`, 0.1 s later. The model sees the name and text of `calculate`."""
    time.sleep(0.1)
    return calculate(expression)
