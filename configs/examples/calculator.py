"""A tool is a function with type hints and a docstring. --environment.tools configs/examples/calculator.py:calculate"""

import ast
import decimal
import operator
from fractions import Fraction

from grpo.rewards.builtin import math_reward

# Longest expression, so that its nesting stays shallow
MAX_CHARACTERS = 500
# Longest numerator and denominator: 3,000 digits
MAX_BITS = 10_000
# Largest power of ten of a number in the expression
MAX_EXPONENT = 308
# Significant digits of a number that is not whole
DIGITS = 12


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def calculator(expression: str) -> str:
    """Calculate exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 2*(3+4).
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    try:
        source = expression.strip().replace("×", "*").replace("÷", "/")
        value = _value(ast.parse(source, mode="eval").body, source)
    except SyntaxError as error:
        raise ValueError(f"this is no expression of numbers ({error.msg})") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if value.denominator == 1:
        return str(value)
    context = decimal.Context(prec=DIGITS)
    rounded = context.divide(value.numerator, value.denominator)
    return str(rounded.normalize())


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


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    num_bits = abs(exponent) * _bits(base)
    if exponent.denominator != 1 or num_bits > MAX_BITS:
        raise ValueError("the exponent must be a whole number, and the result must not have too many digits")
    return base ** int(exponent)


OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _value(node: ast.expr, source: str) -> Fraction:
    """Calculate a part of an expression, which is written in `source`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.Constant) and type(node.value) is float:
        number = decimal.Decimal(ast.get_source_segment(source, node))  # as it is written, not the float next to it
        if abs(number.adjusted()) > MAX_EXPONENT:
            raise ValueError("the number has too many digits")
        return Fraction(number)
    operator_node = getattr(node, "op", None)
    operation = OPERATIONS.get(type(operator_node))
    if operation is None:
        raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if isinstance(node, ast.UnaryOp):
        value = Fraction(operation(_value(node.operand, source)))
    else:
        left = _value(node.left, source)
        right = _value(node.right, source)
        value = Fraction(operation(left, right))
    if _bits(value) > MAX_BITS:
        raise ValueError("the number has too many digits")
    return value


def _bits(value: Fraction) -> int:
    longer = max(abs(value.numerator), value.denominator)
    return longer.bit_length()
