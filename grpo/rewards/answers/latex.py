"""Whether two LaTeX expressions are equal, by math-verify, without letting a text run code.

math-verify parses LaTeX into sympy expressions. What stands inside an accent (`\\hat{..}`), a text or a subscript
becomes the name of a symbol as it is, and sympy's numerical evaluation of a sum prints the names of symbols into Python
source that it compiles (`hypsum` and `lambdify`). So a completion of nothing but LaTeX can run Python wherever an
expression is evaluated, which happens while comparing, and for intervals and binomials already while parsing. Two
checks stand against that, for references too, because a data set may be poisoned: `is_plain` of the very text that the
parser reads, and `_is_harmless` of every expression before it is compared.

The parser, the comparison and their time limits (SIGALRM, so the process's main thread) are the libraries'. sympy takes
a second to load: they are imported where an expression is first needed.
"""

import functools
import math
import re
from typing import Any

# Longest LaTeX answer compared as an expression, and seconds for each parse and comparison: policies do write
# 9^{9^{9^9}} and thousands of open brackets.
LATEX_CHARACTERS = 300
LATEX_SECONDS = 2
# Digits of the largest number that an expression may be worth on the way; Python's powers of integers cannot be
# interrupted by an alarm.
LATEX_DIGITS = 2000


def same_expression(given: str, reference: str, tolerance: float) -> bool:
    """Whether math-verify takes two LaTeX texts as equal. Numbers must also agree within `tolerance`, relative.

    False for a text that is no expression, too long, too large, or has names that are not plain.
    """
    expected = parse_expression(reference)
    found = None if expected is None else parse_expression(given)
    return found is not None and bool(_within_seconds(_equal, found, expected, tolerance))


@functools.lru_cache(maxsize=1024)  # the completions of a group have one reference
def parse_expression(text: str) -> Any | None:
    """The sympy expression that a LaTeX text is; None if it is none, too long, or not safe to evaluate."""
    if len(text) > LATEX_CHARACTERS:
        return None
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # The library's own clean-up first, so that the text checked here is the text parsed. Without its list of units,
    # by which "5t" is 5.
    cleanup = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    text = normalize_latex(text, cleanup)
    if not text or not is_plain(text):
        return None
    expression = _within_seconds(
        latex2sympy,
        text,
        is_real=not should_treat_as_complex(text),
        convert_degrees=False,
        normalization_config=None,
    )
    return expression if _is_harmless(expression) else None


def _within_seconds(function: Any, *arguments: Any, **options: Any) -> Any | None:
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    try:
        return timeout(LATEX_SECONDS)(function)(*arguments, **options)
    # The parser raises plain Exception for a syntax error, and sympy nearly any class for what it cannot handle: all of
    # them mean that the text is no expression, or not comparable.
    except (Exception, TimeoutException) as error:
        if isinstance(error, ValueError) and "main thread" in str(error):
            raise
        return None


# ---------------------------------------------------------------------------------------------------------------------
# What may be parsed

# The commands whose braces' content becomes a symbol's name (ACCENT in the parser's grammar), and plain content.
_ACCENT = (
    r"\\+(?:acute|bar|overline|breve|(?:wide)?check|d?dot|grave|(?:wide)?hat|(?:wide)?tilde|vec|overrightarrow|bm|"
    r"boldsymbol|text[a-z]*|math[a-z]+|mbox|variable)"
)
_PLAIN_ACCENT = re.compile(_ACCENT + r"\s?\{[\w ,+\\-]*\}")
_ANY_ACCENT = re.compile(_ACCENT + r"[^a-zA-Z]*\{|\\variable")
# Subscripts become part of a name too, except those of operators.
_OPERATOR_SUBSCRIPT = re.compile(r"\\(?:sum|prod|int|lim|log|ln|max|min)\s*_")
_PLAIN_SUBSCRIPT = re.compile(r"_\s*(?:\\?[a-zA-Z0-9]+|\{[\w ,+=\\-]*\})")
# Functions by name: only those that are cheap. eigenvals, zeros(10^9, 10^9) and the like are not.
_OPERATOR_NAME = re.compile(r"\\operatorname\s*\{\s*(?:gcd|lcm|floor|ceil|ar(?:c)?(?:sin|cos|tan)h|rank|trace|tr)\s*\}")
_REFUSED = re.compile(
    r"\\operatorname|__|[\"`@]"
    r"|\\over(?![a-z])"  # "f(\over line{..})": blanks fall out of arguments, which are parsed a second time
    r"|\\(?:binom|tbinom|dbinom|choose)(?=.*[0-9]{4})|[0-9]{5}.*!"  # evaluated while parsing, however large
)


def is_plain(text: str) -> bool:
    """Whether all names in a LaTeX text are plain words, so that parsing it evaluates nothing but mathematics."""
    if not text.isprintable():
        return False
    rest = _OPERATOR_NAME.sub("", _PLAIN_ACCENT.sub("x", text))
    if _ANY_ACCENT.search(rest) or _REFUSED.search(rest):
        return False
    return "_" not in _PLAIN_SUBSCRIPT.sub("", _OPERATOR_SUBSCRIPT.sub("", rest))


# ---------------------------------------------------------------------------------------------------------------------
# What may be evaluated

# No call, attribute, string or item can be written with these.
_PLAIN_NAME = re.compile(r"[\w{}\\, +-]*")
# One letter, or a command such as \alpha. Longer ones could be functions of Python's: exit(5).
_PLAIN_FUNCTION = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+ ?)(?:_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]+\}))?")


def _is_harmless(expression: Any) -> bool:
    """Whether every name anywhere in an expression is plain, and no number on the way has more than LATEX_DIGITS."""
    from sympy import Basic, MatrixBase
    from sympy.core.function import UndefinedFunction

    if not isinstance(expression, Basic | MatrixBase):
        return False  # None, or what some functions return: lists, dicts, booleans
    waiting = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, MatrixBase):
            waiting += node.flat()
        elif not isinstance(node, Basic):
            return False
        kind = type(node)
        if isinstance(kind, UndefinedFunction) and not _PLAIN_FUNCTION.fullmatch(kind.__name__):
            return False
        # Symbols, dummies, matrix symbols, indexed ones and strings all have a name or are one.
        for name in (getattr(node, "name", ""), getattr(node, "label", "")):
            if isinstance(name, str) and not _PLAIN_NAME.fullmatch(name):
                return False
        if isinstance(node, Basic):
            waiting += [*node.args, *getattr(node, "_unsorted_args", ())]
    return isinstance(expression, MatrixBase) or _digits(expression) <= LATEX_DIGITS


def _digits(node: Any) -> float:
    """An upper bound of the decimal digits, before the point, of what an expression and its parts are worth."""
    from sympy import Number, Pow, factorial

    if isinstance(node, Number):
        return math.log10(min(abs(node), 10**300) + 1) if node.is_finite else 1.0
    parts = [_digits(part) for part in node.args]
    if isinstance(node, Pow):
        base, exponent = parts
        exponent = 0.0 if node.exp.free_symbols else exponent
        return max(*parts, (base + 1) * (10**exponent if exponent < 10 else math.inf))
    if isinstance(node, factorial):
        return math.inf if parts[0] > 3 else 10 ** parts[0] * max(parts[0], 1.0)
    return sum(parts) + len(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def _equal(given: Any, reference: Any, tolerance: float) -> bool:
    from math_verify.grader import sympy_expr_eq
    from sympy import Eq, simplify

    if isinstance(given, Eq) and isinstance(reference, Eq):
        # The library compares solutions, and no solution equals no solution.
        ratio = simplify((given.lhs - given.rhs) / (reference.lhs - reference.rhs))
        return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
    # What math_verify.verify does with one expression a side, within a time limit of its own: six decimals, 15 digits.
    same = sympy_expr_eq(reference, given, float_rounding=6, numeric_precision=15)
    return same and _close(given, reference, tolerance)


def _close(given: Any, reference: Any, tolerance: float) -> bool:
    """False for two numbers that math-verify rounded to the same six decimals, but that differ by more."""
    from sympy import Expr

    if not all(isinstance(side, Expr) and side.is_number for side in (given, reference)):
        return True
    distance, size = abs((given - reference).evalf(30)), abs(reference.evalf(30))
    return not (distance.is_Number and size.is_Number) or bool(distance <= max(tolerance, 1e-12) * size)
