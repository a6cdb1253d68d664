"""Tools that come with it: `--environment.tools calculator python`."""

import ast
import decimal
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from grpo.config import EnvironmentConfig
from grpo.workers.programs import Limits, run_python

# Of an expression, so that its nesting stays shallow.
MOST_CHARACTERS = 500
# Of a number's numerator and denominator: 3,000 digits.
MOST_BITS = 10_000
# Significant digits of what is no whole number.
DIGITS = 12
# Of environment.call_seconds, so that a program that loops is told so before its process is killed.
PROGRAM_TIME = 0.8

# Its folder has another name each time, and the same program shall print the same.
IN_PROGRAM = re.compile(r'File "[^"\n]*program\.py"')


def calculator(expression: str) -> str:
    """Calculate exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 2*(3+4).
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MOST_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip().replace("×", "*").replace("÷", "/"), mode="eval").body
        return _written(_value(tree))
    except SyntaxError as error:
        raise ValueError(f"this is no expression of numbers ({error.msg})") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def python_tool(config: EnvironmentConfig) -> Callable[[str], str]:
    """The tool `python`, whose programs run confined, as those of code_reward do, within the limits of `config`."""
    limits = Limits(config.call_seconds * PROGRAM_TIME, config.memory_gib)

    def python(code: str) -> str:
        """Run a Python program, and see what it prints.

        Args:
            code: The program.
        """
        outcome = run_python(code, "", limits)
        ends = {
            "failed": IN_PROGRAM.sub('File "program.py"', outcome.stderr).strip(),
            "timeout": f"It took longer than {limits.timeout_seconds:g} s.",
            "killed": "It was killed.",
            "output": f"It printed more than {limits.output_bytes} bytes.",
        }
        return outcome.stdout + ends.get(outcome.status, "")

    return python


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) * _bits(base) > MOST_BITS:
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


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))  # 0.1 as it is written, not as a float has it
    operation = OPERATIONS.get(type(getattr(node, "op", None)))
    if operation is None:
        raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    parts = (getattr(node, name) for name in ("left", "right", "operand") if hasattr(node, name))
    value = Fraction(operation(*map(_value, parts)))
    if _bits(value) > MOST_BITS:
        raise ValueError("the number has too many digits")
    return value


def _bits(value: Fraction) -> int:
    return max(abs(value.numerator), value.denominator).bit_length()


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value)
    return str(decimal.Context(prec=DIGITS).divide(*value.as_integer_ratio()).normalize())
