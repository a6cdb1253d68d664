"""Compare two LaTeX expressions by math-verify. A text can neither run code nor pass by restating its question.

To evaluate a sum, sympy compiles Python source into which it prints the names of symbols, and LaTeX can make anything a
name (`\\hat{..}`). So a completion could run Python wherever an expression is evaluated, even while it is parsed. Two
measures prevent that, for references too, because a data set may be poisoned. `load_math_verify` takes the compiler
away from sympy. `is_plain` allows only numbers, short names and a list of commands, without those for sums.

The libraries take a second to load, so they are imported when the first expression needs them. Their time limit is CPU
time of the process, which does not depend on how busy the machine is. It uses SIGPROF, hence the main thread.
"""

import contextlib
import functools
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

# Longest answer that is compared as an expression
LATEX_CHARACTERS = 300
# CPU time for all parses and comparisons of one answer together
LATEX_SECONDS = 2
# Most digits of a number that occurs in a calculation: no alarm interrupts Python's powers of integers.
LATEX_DIGITS = 2000


class OutOfTime(BaseException):
    """Comparing an answer took LATEX_SECONDS. It is not an Exception, because the libraries catch those."""


@functools.cache
def load_math_verify() -> None:
    """Import math-verify and sympy, and keep sympy from compiling texts from then on."""
    import math_verify  # noqa: F401
    import sympy.core.evalf
    from latex2sympy2_extended import latex2sympy

    # what `hypsum` sums is substituted, term by term, instead of compiled
    sympy.core.evalf.lambdify = lambda name, expression: lambda k: int(expression.subs(name, k))
    latex2sympy(r"\frac{x}{2}").equals(latex2sympy("x"))  # the first use takes longer, which no answer should pay for


@contextlib.contextmanager
def cpu_limit() -> Iterator[None]:
    """Raise OutOfTime when the body has taken LATEX_SECONDS of CPU time. ValueError outside of the main thread."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    earlier = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LATEX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)


def same_expression(answer: str, reference: str, tolerance: float) -> bool:
    """Decide by math-verify whether two clean LaTeX texts are equal. Numbers must agree within a relative `tolerance`.

    A text is equal to nothing if it is no expression, too long, too large or not plain. The two must have the same
    words, equals signs, brackets around lists and case of symbols. And `answer` must not state the question instead of
    answering it: it may leave no more work of any kind than the reference, and must be solved for the same symbols.
    Call it within `cpu_limit`.
    """
    if _shape(answer) != _shape(reference) or not _has_one_case(f"{answer} {reference}"):
        return False
    if not _have_same_words(answer, reference):
        return False
    if _has_division(answer) and not _has_division(reference):
        return False
    functions = _FUNCTION.findall(reference)
    if not set(functions).issuperset(_FUNCTION.findall(answer)):  # the parser makes x of e^{\ln x}
        return False
    expected = parse_expression(reference)
    if expected is None:
        return False
    expression = parse_expression(answer)
    if expression is None:
        return False
    try:
        return _equal(expression, expected, tolerance) and _is_as_worked_out(expression, expected)
    except Exception:  # sympy raises nearly any class
        return False


@functools.lru_cache(maxsize=1024)  # the completions of a group have one reference
def parse_expression(text: str) -> Any | None:
    """Parse a LaTeX text into a sympy expression. None if it is none, too long, or not safe to evaluate."""
    if len(text) > LATEX_CHARACTERS or _UNREAD.search(text) or _SLASH_AND_FACTORS.search(text):
        return None
    load_math_verify()
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex
    from sympy import MatrixBase

    # the library's own clean-up comes first, so that the text that is checked is the text that is parsed; without its
    # units, because of which "5t" would be 5
    cleanup = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",
    )
    text = normalize_latex(text, cleanup).replace("\\\\", "\\\\ ")  # a letter behind the end of a row is no command
    if not text or not is_plain(text):
        return None
    options = {"is_real": not should_treat_as_complex(text), "convert_degrees": False, "normalization_config": None}
    try:
        expression = latex2sympy(text, **options)
    except Exception:  # the parser raises plain Exception for a syntax error, and sympy nearly any class
        return None
    if not _is_small(expression):
        return None
    if isinstance(expression, MatrixBase):
        return expression.as_immutable()  # the parser's own cannot be an entry of a set
    return expression


# ---------------------------------------------------------------------------------------------------------------------
# What may be parsed

_COMMAND = re.compile(r"\\[a-zA-Z]+")
# Commands that may be parsed; accents, \operatorname, \sum, \binom and others may not.
_NOTATION = frozenset(
    _COMMAND.findall(
        r"\frac \sqrt \cdot \times \pi \infty \emptyset \le \leq \ge \geq \lt \gt \cup \cap \in \lbrace \rbrace "
        r"\begin \end \alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu "
        r"\xi \rho \sigma \tau \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Phi \Psi \Omega "
        r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \log \ln \exp"
    )
)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-zA-Z])|\\(?:log|ln)(?![a-zA-Z])")
# The parser reads 7(8) as the mixed number 15, and 7e3 as 21 e.
_MIXED = re.compile(r"[0-9] ?\)? ?\( ?-?[0-9. /]+\)|[0-9]e[0-9]")
# The first of two letters that are surely a product, because they touch a digit or a power: 2yx, ba^2
_FACTOR = re.compile(r"(?<=[0-9])[a-zA-Z](?=[a-zA-Z](?![a-zA-Z]))|(?<![a-zA-Z])[a-zA-Z](?=[a-zA-Z]\^)")
_MATRIX = re.compile(r"\\(?:begin|end)\{[bp]?matrix\}")
# What the library drops: primes (f'(2) would be f(2)), dollars, dots, an exponent T, which may be a number. And two
# signs in a row, which may mean plus or minus, and the zeros in the thousands of 1,000.
_UNREAD = re.compile(r"(?<![0-9.])0 ?[0-9]|['\"$]|\\ldots|\^ ?(?:T|\{ ?T ?\})|[-+] ?[-+]")
# What follows a slash belongs below the line or not: 1/2x, \pi/4\sqrt{2}, x/2(x+1). The same for \sin x/2.
_OPERAND = r"(?:[0-9.]+(?![0-9.])|[a-zA-Z]|\\[a-zA-Z]+(?![a-zA-Z])(?: ?\{[^{}]*\})?|\([^()]*\))(?:\^(?:\w|\{\w+\}))?"
_SLASH_AND_FACTORS = re.compile(
    rf"/ ?{_OPERAND} ?(?:[a-zA-Z(]|\\(?!cdot|times|l[et]|g[et]|cup|cap|in(?:fty)?\b|[{{}}\\]|end\b))"
    r"|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp)h?(?:\^\w)? ?[\w\\ ]+/"
)
# Subscripts become part of a name. After a digit they would be the base of a number.
_PLAIN = re.compile(  # each text matches in one way only, since possessive groups match too little before Python 3.11.4
    r"(?:[0-9a-zA-Z+\-*/^=<>|()\[\]{}.,;& ]|\\[a-zA-Z]+(?![a-zA-Z])|\\[{}\\]"
    r"|(?<=[a-zA-Z])_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]{1,2}\}))*"
)


def is_plain(text: str) -> bool:
    """Check that a LaTeX text has nothing but numbers, one-letter names and known commands."""
    return (
        bool(_PLAIN.fullmatch(text))
        and not _MIXED.search(text)
        and _NOTATION.issuperset(_COMMAND.findall(text))
        and not any(len(word) > 2 for word in _words(text))  # the parser would read it as a product
        and _has_one_case(text)
    )


def _has_one_case(text: str) -> bool:
    """Check that no symbol is a capital in one place and small in another, which are the same to the parser."""
    text = _MATRIX.sub(" ", text)
    symbols = set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text))
    return len(set(map(str.lower, symbols))) == len(symbols)


def _has_division(text: str) -> bool:
    """Look for a fraction of digits that is not in lowest terms. The parser would make a number of it."""
    for fraction in re.findall(r"\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}", text):
        top, bottom = map(int, fraction)
        if bottom == 1 or math.gcd(top, bottom) > 1:
            return True
    return False


def _words(text: str) -> list[str]:
    """Find the letters that are next to each other in a text, without commands and products such as `2yx`."""
    text = _COMMAND.sub(" ", _MATRIX.sub(" ", text))
    return re.findall("[a-zA-Z]+", _FACTOR.sub(r"\g<0> ", text))


def _have_same_words(answer: str, reference: str) -> bool:
    """Compare the words of two texts (`on` is not `no`), or else all their letters in a row (`3 x y` is `3xy`)."""
    words = _words(answer)
    expected = _words(reference)
    if "".join(words) == "".join(expected):
        return True
    long_words = [word for word in words if len(word) > 1]
    expected_words = [word for word in expected if len(word) > 1]
    return sorted(long_words) == sorted(expected_words)


def _shape(text: str) -> tuple[int, int, bool, str]:
    """Return what math-verify ignores: the number of equals signs and of items, and the brackets around the items."""
    num_items = len(re.findall("[,;]", text))
    is_set = "\\{" in text or "\\lbrace" in text
    brackets = ""
    if num_items and not is_set:
        brackets = text[:1] + text[-1:]
    return text.count("="), num_items, is_set, brackets


# ---------------------------------------------------------------------------------------------------------------------
# What may be evaluated


def _is_small(expression: Any) -> bool:
    """Check that this is an expression, and that no number on the way to its value has more than LATEX_DIGITS."""
    from sympy import Basic, MatrixBase

    if isinstance(expression, MatrixBase):
        return all(map(_is_small, expression.flat()))
    # the parser can also return lists, booleans and None
    return isinstance(expression, Basic) and _digits(expression) <= LATEX_DIGITS


def _digits(node: Any) -> float:
    """Bound the digits before the point of the values of an expression and its parts."""
    from sympy import Number, Pow

    if isinstance(node, Number):
        if not node.is_finite:
            return 1.0
        return math.log10(min(abs(node), 10**300) + 1)
    parts = [_digits(part) for part in node.args]
    if isinstance(node, Pow):
        base, exponent = parts
        if node.exp.free_symbols:
            exponent = 0.0
        factor = 10**exponent if exponent < 10 else math.inf
        return max(*parts, (base + 1) * factor)
    return sum(parts) + len(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing

# Counted in a printed expression: numbers, names, sums, powers, calls; but not a factor of 1, which is before * and /
_COUNTED = re.compile(r"(?!1[*/])[0-9.]+|[a-zA-Z]+| [-+] |\*\*|(?<=[a-z])\(")


def _is_as_worked_out(answer: Any, reference: Any) -> bool:
    """Check that `answer` leaves nothing to work out that the reference does not, and isolates the same symbols."""
    return _work(answer) <= _work(reference) and _isolated(reference) <= _isolated(answer)


def _isolated(expression: Any) -> set[Any]:
    """Find the symbols, or functions such as f(x), that are alone on one side of an equation or inequality."""
    from sympy import preorder_traversal
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    isolated = set()
    for node in preorder_traversal(expression):
        if isinstance(node, Relational):
            for side, other_side in (node.args, node.args[::-1]):
                if (side.is_Symbol or isinstance(side, AppliedUndef)) and not other_side.has(side):
                    isolated.add(side)
    return isolated


def _work(expression: Any) -> Counter[str]:
    """Count each kind of work that an expression leaves (see docs/answers.md). The same work twice counts once."""
    import sympy
    from sympy.logic.boolalg import Boolean

    nodes = set(sympy.preorder_traversal(expression))
    numbers = sympy.Atom | sympy.Add | sympy.Mul | sympy.Pow | sympy.exp
    containers = sympy.Tuple | Boolean | sympy.Interval | sympy.FiniteSet | sympy.MatrixBase
    work = Counter()
    for node in nodes:
        if isinstance(node, sympy.MatrixExpr) or not isinstance(node, numbers | containers):
            work[type(node).__name__] += 1
        is_division = node.is_Pow and node.exp == -1  # x/-4 is read
        if isinstance(node, sympy.Function | sympy.Pow) and not isinstance(node, sympy.exp) and not is_division:
            work["sign"] += _has_sign(node.args[0])
        if isinstance(node, sympy.log):
            work["logarithm"] += _has_plain_logarithm(node)
        if node.is_Pow and node.free_symbols and node.exp.is_Rational:
            _, inner_exponent = node.base.as_base_exp()
            has_division = node.exp.is_negative and not inner_exponent.free_symbols
            work["division"] += bool(has_division)  # 1/e^x is no more work than e^{-x}
            work["root"] += not node.exp.is_Integer
    parts = [expression]
    while parts:
        part = parts.pop()
        if isinstance(part, sympy.MatrixBase):
            parts += part.flat()
        elif isinstance(part, sympy.Expr):
            work["arithmetic"] |= _has_arithmetic(part)
            work["cancelling"] |= _can_cancel(part)
        else:
            parts += part.args
    return +work


def _has_sign(argument: Any) -> bool:
    """Decide whether an argument has a minus in front, which its function or power could lose: sin(-x), (-x)^2."""
    import sympy

    return all(term.could_extract_minus_sign() for term in sympy.Add.make_args(argument))


def _has_plain_logarithm(logarithm: Any) -> bool:
    """Decide whether a factor in a logarithm has a rational one: ln(2e), log_2(8x)."""
    import sympy

    argument, *base = logarithm.args
    factors = sympy.Mul.make_args(argument)
    return len(factors) > 1 and any(sympy.log(factor, *base).is_Rational for factor in factors)


def _can_cancel(expression: Any) -> bool:
    """Decide whether numerator and denominator have a common factor, also in front of logarithms: ln 9 / ln 4."""
    import sympy

    top, bottom = sympy.fraction(sympy.together(expression))
    if expression.free_symbols:
        return sympy.gcd(top, bottom) != 1
    factors = [sympy.expand_log(side, force=True).as_coeff_Mul()[0] for side in (top, bottom)]
    return bool(expression.has(sympy.log)) and sympy.gcd(*factors) != 1


def _has_arithmetic(expression: Any) -> bool:
    """Say whether numbers are left to be worked out: 2 + 3, 2 * 3, 2^3, or what sympy's arithmetic makes shorter."""
    import sympy

    powers = [node for node in sympy.preorder_traversal(expression) if node.is_Pow and node.exp.is_Integer]
    plain = {power: sympy.Symbol("ten") for power in powers if power.base == 10}
    with sympy.evaluate(False):
        for node in expression.atoms(sympy.log):
            if node.args[1:] == (sympy.E,):  # the parser writes ln(x) as log(x, E)
                plain[node] = sympy.log(node.args[0])
        written = expression.xreplace(plain)
    for product in expression.atoms(sympy.Mul):
        numbers = [factor for factor in sympy.Mul.make_args(product) if factor.is_Rational and abs(factor) != 1]
        if len(numbers) > 1:
            return True
    is_shorter = _length(written.doit()) < _length(written)
    return is_shorter or any(
        power.is_number and power.exp != -1 and not power.base.is_NumberSymbol and power.base != 10 for power in powers
    )


def _length(expression: Any) -> int:
    """Return how long an expression is when it is printed."""
    return len(_COUNTED.findall(str(expression)))


def _equal(answer: Any, reference: Any, tolerance: float) -> bool:
    """Compare two expressions as math-verify does, and numbers by the tolerance as well."""
    from math_verify.grader import sympy_expr_eq
    from sympy import Eq, simplify

    if isinstance(answer, Eq) and isinstance(reference, Eq):
        # the library would compare solutions, so that two equations without one would be equal
        ratio = simplify((answer.lhs - answer.rhs) / (reference.lhs - reference.rhs))
        return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
    # as math_verify.verify does for one expression on each side: six decimals, 15 digits
    if not sympy_expr_eq(reference, answer, float_rounding=6, numeric_precision=15):
        return False
    # two numbers may have the same six decimals and differ by more than the tolerance
    numbers = _numbers(answer)
    expected = _numbers(reference)
    if len(numbers) != len(expected):
        return True
    return all(_is_close(number, other, tolerance) for number, other in zip(numbers, expected, strict=True))


def _numbers(expression: Any) -> list[Any]:
    """Return the number that an expression is, or those in a set, tuple, interval or matrix, in rising order."""
    from sympy import Expr, FiniteSet, Interval, MatrixBase, Tuple, Union, default_sort_key

    parts = [expression]
    numbers = []
    while parts:
        part = parts.pop()
        if isinstance(part, MatrixBase):
            parts += part.flat()
        elif isinstance(part, FiniteSet | Tuple | Union):
            parts += part.args
        elif isinstance(part, Interval):
            parts += [part.start, part.end]
        elif isinstance(part, Expr) and part.is_number:
            numbers.append(part)
    return sorted(numbers, key=lambda number: (number.evalf(30) if number.is_real else 0, default_sort_key(number)))


def _is_close(number: Any, reference: Any, tolerance: float) -> bool:
    """Decide whether two numbers differ by at most the relative tolerance. True if sympy cannot tell."""
    if number == reference:  # also infinity, whose difference to itself is none
        return True
    distance = abs((number - reference).evalf(30))
    size = abs(reference.evalf(30))
    if not distance.is_Number or not size.is_Number:
        return True
    return bool(distance <= max(tolerance, 1e-12) * size)
