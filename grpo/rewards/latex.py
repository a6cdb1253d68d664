"""Whether two LaTeX expressions are equal, by math-verify, without letting a text run code or restate its question.

sympy evaluates a sum by compiling Python source into which it prints the names of symbols, and LaTeX can make anything
a name (`\\hat{..}`). So a completion could run Python wherever an expression is evaluated, also while parsing. Two
things stand against that, for references too, because a data set may be poisoned: `load` takes the compiler away from
sympy, and `is_plain` lets only numbers, short names and a list of commands be parsed, among them none for sums.

The parser and the comparison are the libraries', which take a second to load: `load` imports them where an expression
is first needed. Their time limit is CPU time of the process (SIGPROF, so its main thread), which a busy machine leaves
as it is.
"""

import functools
import math
import re
import signal
from collections import Counter
from typing import Any

# Longest LaTeX answer compared as an expression, and seconds of CPU time for each parse and comparison.
LATEX_CHARACTERS = 300
LATEX_SECONDS = 2
# Of the largest number on the way to an expression's value: no alarm interrupts Python's powers of integers.
LATEX_DIGITS = 2000


class OutOfTime(BaseException):
    """A parse or comparison took LATEX_SECONDS. No Exception, because the libraries catch those."""


@functools.cache
def load() -> None:
    """Import math-verify, and with it sympy, which compiles no text from then on."""
    import math_verify  # noqa: F401
    import sympy.core.evalf
    from latex2sympy2_extended import latex2sympy

    # what `hypsum` sums is substituted, term by term, instead of compiled
    sympy.core.evalf.lambdify = lambda name, expression: lambda k: int(expression.subs(name, k))
    latex2sympy(r"\frac{x}{2}").equals(latex2sympy("x"))  # what is made at first use is no answer's time


def same_expression(given: str, reference: str, tolerance: float) -> bool:
    """Whether math-verify takes two clean LaTeX texts as equal. Numbers must also agree within `tolerance`, relative.

    False for a text that is no expression, too long, too large, or not plain; for two that differ in their words, their
    equals signs, the case of a symbol or their brackets around lists; and where `given` leaves more work of some kind
    than the reference, or is not solved for what the reference is solved for, and so may state the question instead of
    answering it. Raises OutOfTime.
    """
    if _shape(given) != _shape(reference) or not _has_one_case(f"{given} {reference}"):
        return False
    if not _have_same_words(given, reference):
        return False
    if _has_division(given) and not _has_division(reference):
        return False
    if not set(_FUNCTION.findall(given)) <= set(_FUNCTION.findall(reference)):  # the parser makes x of e^{\ln x}
        return False
    expected = parse_expression(reference)
    found = None if expected is None else parse_expression(given)
    equal = found is not None and _within_seconds(_equal, found, expected, tolerance)
    return bool(equal and _within_seconds(_is_as_worked_out, found, expected))


@functools.lru_cache(maxsize=1024)  # the completions of a group have one reference
def parse_expression(text: str) -> Any | None:
    """The sympy expression that a LaTeX text is; None if it is none, too long, or not safe to evaluate.

    Raises OutOfTime.
    """
    if len(text) > LATEX_CHARACTERS:
        return None
    load()
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # the library's own clean-up first: the text checked is the text parsed; without its units, by which "5t" is 5
    cleanup = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    text = normalize_latex(text, cleanup)
    if not text or not is_plain(text):
        return None
    options = {"is_real": not should_treat_as_complex(text), "convert_degrees": False, "normalization_config": None}
    expression = _within_seconds(latex2sympy, text, **options)
    return expression if _is_small(expression) else None


def _within_seconds(function: Any, *arguments: Any, **options: Any) -> Any | None:
    """Call the function; None if it raises. Raises OutOfTime after LATEX_SECONDS of the process's CPU time."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    earlier = signal.signal(signal.SIGPROF, stop)  # raises ValueError outside of the main thread
    signal.setitimer(signal.ITIMER_PROF, LATEX_SECONDS)
    try:
        return function(*arguments, **options)
    except Exception:  # the parser raises plain Exception for a syntax error, sympy nearly any class for what it lacks
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, earlier)


# ---------------------------------------------------------------------------------------------------------------------
# What may be parsed

_COMMAND = re.compile(r"\\[a-zA-Z]+")
# Commands that may be parsed. Other ones (accents, \operatorname, \sum, \binom ..) are not.
_NOTATION = frozenset(
    _COMMAND.findall(
        r"\frac \sqrt \cdot \times \pi \infty \emptyset \le \leq \ge \geq \lt \gt \cup \cap \in \lbrace \rbrace "
        r"\begin \end \alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu "
        r"\xi \rho \sigma \tau \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Phi \Psi \Omega "
        r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \log \ln \exp"
    )
)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-zA-Z])|\\(?:log|ln)(?![a-zA-Z])")
# The parser takes 7(8) for the mixed number 15, and 7e3 for 21 e.
_MIXED = re.compile(r"[0-9] ?\)? ?\( ?-?[0-9. /]+\)|[0-9]e[0-9]")
_MATRIX = re.compile(r"\\(?:begin|end)\{[bp]?matrix\}")
# Subscripts become part of a name; behind a digit they would be another base.
_PLAIN = re.compile(  # in one way alone, since possessive groups match too little before Python 3.11.4
    r"(?:[0-9a-zA-Z+\-*/^=<>|()\[\]{}.,;& ]|\\[a-zA-Z]+(?![a-zA-Z])|\\[{}\\]"
    r"|(?<=[a-zA-Z])_(?:[a-zA-Z0-9]|\{[a-zA-Z0-9]{1,2}\}))*"
)


def is_plain(text: str) -> bool:
    """Whether a LaTeX text is made of numbers, one-letter names and known commands alone."""
    return (
        bool(_PLAIN.fullmatch(text))
        and not _MIXED.search(text)
        and _NOTATION.issuperset(_COMMAND.findall(text))
        and not any(len(run) > 2 for run in _letters(text))  # a word; the parser would take it for a product
        and _has_one_case(text)
    )


def _has_one_case(text: str) -> bool:
    """Whether no symbol is a capital in one place and small in another, which are the same to the parser."""
    symbols = set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", _MATRIX.sub(" ", text)))
    return len({symbol.lower() for symbol in symbols}) == len(symbols)


def _has_division(text: str) -> bool:
    """Whether a fraction of digits is not in lowest terms; the parser makes a number of it."""
    fractions = re.findall(r"\\frac ?\{([0-9]+)\} ?\{([0-9]+)\}", text)
    return any(math.gcd(int(top), int(bottom)) > 1 or int(bottom) == 1 for top, bottom in fractions)


def _letters(text: str) -> list[str]:
    """The letters that stand together in a text, except for commands."""
    return re.findall("[a-zA-Z]+", _COMMAND.sub(" ", _MATRIX.sub(" ", text)))


def _have_same_words(given: str, reference: str) -> bool:
    """Whether two texts have the same letters together (`on` is not `no`), or the same in a row (`3 x y` is `3xy`)."""
    runs, others = _letters(given), _letters(reference)
    words, other_words = ([run for run in some if len(run) > 1] for some in (runs, others))
    return sorted(words) == sorted(other_words) or "".join(runs) == "".join(others)


def _shape(text: str) -> tuple:
    """What math-verify looks through: equals signs, and how many items stand in which brackets."""
    items = len(re.findall("[,;]", text))
    is_set = "\\{" in text or "\\lbrace" in text
    return text.count("="), items, is_set, (text[:1], text[-1:]) if items and not is_set else ""


# ---------------------------------------------------------------------------------------------------------------------
# What may be evaluated


def _is_small(expression: Any) -> bool:
    """Whether it is an expression, and no number on the way to its value has more than LATEX_DIGITS."""
    from sympy import Basic, MatrixBase

    if isinstance(expression, MatrixBase):
        return all(map(_is_small, expression.flat()))
    return isinstance(expression, Basic) and _digits(expression) <= LATEX_DIGITS  # not so lists, booleans and None


def _digits(node: Any) -> float:
    """An upper bound of the decimal digits, before the point, of what an expression and its parts are worth."""
    from sympy import Number, Pow

    if isinstance(node, Number):
        return math.log10(min(abs(node), 10**300) + 1) if node.is_finite else 1.0
    parts = [_digits(part) for part in node.args]
    if isinstance(node, Pow):
        base, exponent = parts
        exponent = 0.0 if node.exp.free_symbols else exponent
        return max(*parts, (base + 1) * (10**exponent if exponent < 10 else math.inf))
    return sum(parts) + len(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


# What is counted in a printed expression: numbers, names, sums, powers, calls. A factor of 1 stands before * and /.
_COUNTED = re.compile(r"(?!1[*/])[0-9.]+|[a-zA-Z]+| [-+] |\*\*|(?<=[a-z])\(")


def _is_as_worked_out(given: Any, reference: Any) -> bool:
    return _work(given) <= _work(reference) and _isolated(reference) <= _isolated(given)


def _isolated(expression: Any) -> set[Any]:
    """The symbols, or functions such as f(x), that stand alone on one side of an equation or inequality."""
    from sympy import preorder_traversal
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    relations = [node for node in preorder_traversal(expression) if isinstance(node, Relational)]
    sides = [side for relation in relations for side in (relation.args, relation.args[::-1])]
    return {one for one, other in sides if (one.is_Symbol or isinstance(one, AppliedUndef)) and not other.has(one)}


def _work(expression: Any) -> Counter[str]:
    """How often an expression leaves each kind of work, see the page; the same work twice counts once."""
    import sympy
    from sympy.logic.boolalg import Boolean

    nodes = set(sympy.preorder_traversal(expression))
    numbers = sympy.Atom | sympy.Add | sympy.Mul | sympy.Pow | sympy.exp
    others = sympy.Tuple | Boolean | sympy.Interval | sympy.FiniteSet | sympy.Union | sympy.MatrixBase
    work = Counter(type(node).__name__ for node in nodes if not isinstance(node, numbers | others))
    powers = [node for node in nodes if node.is_Pow and node.free_symbols and node.exp.is_Rational]
    divisions = [node for node in powers if node.exp.is_negative and not node.base.as_base_exp()[1].free_symbols]
    work["division"] = len(divisions)  # 1/e^x is no more work than e^{-x}
    work["root"] = sum(not node.exp.is_Integer for node in powers)
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


def _can_cancel(expression: Any) -> bool:
    """Whether numerator and denominator have a common factor."""
    import sympy

    if not expression.free_symbols:
        return False
    top, bottom = sympy.fraction(sympy.together(expression))
    return sympy.gcd(top, bottom) != 1


def _has_arithmetic(expression: Any) -> bool:
    """Whether sympy's arithmetic makes an expression shorter, or a power of numbers is left."""
    import sympy

    powers = [node for node in sympy.preorder_traversal(expression) if node.is_Pow and node.exp.is_Integer]
    plain = {power: sympy.Symbol("ten") for power in powers if power.base == 10}
    with sympy.evaluate(False):
        for node in expression.atoms(sympy.log):
            if node.args[1:] == (sympy.E,):  # as the parser writes a natural logarithm
                plain[node] = sympy.log(node.args[0])
        written = expression.xreplace(plain)
    sizes = [len(_COUNTED.findall(str(form))) for form in (written, written.doit())]
    left = [p for p in powers if p.is_number and not (p.exp == -1 or p.base.is_NumberSymbol or p.base == 10)]
    return bool(left) or sizes[1] < sizes[0]


def _equal(given: Any, reference: Any, tolerance: float) -> bool:
    from math_verify.grader import sympy_expr_eq
    from sympy import Eq, Expr, simplify

    if isinstance(given, Eq) and isinstance(reference, Eq):
        # the library compares solutions, and no solution equals no solution
        ratio = simplify((given.lhs - given.rhs) / (reference.lhs - reference.rhs))
        return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)
    # what math_verify.verify does with one expression a side: six decimals, 15 digits
    if not sympy_expr_eq(reference, given, float_rounding=6, numeric_precision=15):
        return False
    # two numbers may have the same six decimals and differ by more than the tolerance
    if not all(isinstance(side, Expr) and side.is_number for side in (given, reference)):
        return True
    distance, size = abs((given - reference).evalf(30)), abs(reference.evalf(30))
    return not (distance.is_Number and size.is_Number) or bool(distance <= max(tolerance, 1e-12) * size)
