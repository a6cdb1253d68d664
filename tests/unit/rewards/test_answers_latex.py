"""A completion of nothing but LaTeX cannot run Python, whatever it wraps the code in and whatever it is compared to."""

import builtins
import subprocess
import sys
import time

import pytest

from grpo.rewards import latex
from grpo.rewards.builtin import math_reward
from tests import ROOT

# What sympy evaluates numerically, with a symbol that it prints into Python source; X is the wrapped code.
SUM = r"\sum_{n=0}^{\infty} \frac{(X+1)^n(n+2)}{n!}"
CODE = ":=latex_marker()"  # a function of the test's own among Python's built-in ones

NAMES = [
    r"\hat{CODE}", r"\widehat{CODE}", r"\bar{CODE}", r"\overline{CODE}", r"\vec{CODE}", r"\overrightarrow{CODE}",
    r"\tilde{CODE}", r"\dot{CODE}", r"\acute{CODE}", r"\bm{CODE}", r"\boldsymbol{CODE}", r"\mathbb{CODE}",
    r"\mathrm{CODE}", r"\mathcal{CODE}", r"\mathbf{CODE}", r"\mathsf{CODE}", r"\text{CODE}", r"\textbf{CODE}",
    r"\mbox{CODE}", r"\operatorname{CODE}", r"\variable{CODE}", r"x_{CODE}", r"\hat{x}_{CODE}", r"x_\hat{CODE}",
    r"\hat {CODE}", r"\\hat{CODE}", r"\ha\!t{CODE}", r'\h"at{CODE}', r"\ha\text{}t{CODE}", r"\hat{\hat{CODE}}",
    r"\hat{\}CODE}",
]  # fmt: skip
PLACES = [
    "X", SUM, r"\prod_{n=1}^{\infty} X", r"\int_0^1 X dx", r"\lim_{n \to 0} X", r"\sum_{X=0}^{\infty} \frac{1}{X!}",
    rf"\frac{{{SUM}}}{{2}}", rf"2^{{{SUM}}}", rf"(0, {SUM})", rf"[{SUM}, 5]", rf"\{{1, {SUM}\}}", rf"x = {SUM}",
    rf"x < {SUM}", rf"f({SUM})", rf"\gcd({SUM}, 5)", rf"|{SUM}|", rf"\binom{{{SUM}}}{{2}}", rf"\sqrt{{{SUM}}}",
    rf"\begin{{pmatrix}} {SUM} & 1 \\ 0 & 1 \end{{pmatrix}}", rf"\begin{{vmatrix}} {SUM} & 1 \\ 0 & 1 \end{{vmatrix}}",
    r"X(5)", r"X^{5}", rf"\text{{if }} {SUM}", rf"{SUM} \text{{ cm}}", r"f(1 \over line{CODE})",
]  # fmt: skip
WRAPPED = [SUM.replace("X", name).replace("CODE", CODE) for name in NAMES]
WRAPPED += [place.replace("X", r"\hat{CODE}").replace("CODE", CODE) for place in PLACES]
REFERENCES = [
    "5", r"\frac{1}{2}", r"\{1, 2\}", "(0, 5)", r"\begin{pmatrix}1 & 1 \\ 0 & 1\end{pmatrix}", "x = 5", "x",
    r"\text{east}", r"\pi", r"\sum_{n=0}^{\infty} \frac{1}{n!}",
]  # fmt: skip


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def marker(tmp_path, monkeypatch):
    path = tmp_path / "marker"
    monkeypatch.setattr(builtins, "latex_marker", lambda: path.write_text("ran") and 1, raising=False)
    return path


@pytest.mark.parametrize("other", REFERENCES)
def test_no_wrapper_runs_code(other, marker):
    """Neither as an answer nor as a reference, which a data set may have poisoned."""
    assert len(WRAPPED) >= 40 and len(REFERENCES) == 10
    for text in WRAPPED:
        for given, reference in ((text, other), (other, text)):
            math_reward([rf"\boxed{{{given}}}"], answer=[reference], answer_format="boxed")
            assert not marker.exists(), text


# The other guard is off: only what `load_math_verify` did to sympy is between the text and the compiler. `bare` undoes
# that too.
AUDIT = """
import contextlib
import sys
from grpo.rewards import latex
from latex2sympy2_extended import latex2sympy
if sys.argv[1] == "patched":
    latex.load_math_verify()
latex.load_math_verify = lambda: None
latex.is_plain = lambda text: True
latex._is_small = lambda found: found is not None
compiled = []
sys.addaudithook(lambda event, args: compiled.append(str(args[0])) if event == "compile" else None)
with contextlib.suppress(Exception):
    latex2sympy(sys.argv[2], is_real=True, convert_degrees=False, normalization_config=None)
latex._equal(latex.parse_expression(sys.argv[3]), latex.parse_expression("\\\\pi"), 1e-6)
print(len([source for source in compiled if "zqp" in source]))
"""


@pytest.mark.parametrize(("sympy", "compiles"), [("patched", 0), ("bare", 2)])
def test_sympy_compiles_no_text_of_a_completion(sympy, compiles):
    """Neither while comparing nor while parsing; without the patch it does."""
    parsed = r"(\sum_{n=0}^{\infty} \frac{\sin(\text{zqp}(5))^n}{n!}, 5]"
    compared = SUM.replace("X", r"\hat{zqp}")
    command = [sys.executable, "-c", AUDIT, sympy, parsed, compared]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == compiles


def test_sums_are_worth_the_same_without_the_compiler():
    """The cosine's series at 1, and one that starts late."""
    import sympy

    n, oo = sympy.Symbol("n", integer=True), sympy.oo
    latex.load_math_verify()
    for term, start, value in (
        ((-1) ** n / sympy.factorial(2 * n), 0, sympy.cos(1)),
        (1 / sympy.factorial(n), 2, sympy.E - 2),
    ):
        assert abs(sympy.Sum(term, (n, start, oo)).evalf(20) - value.evalf(20)) < 1e-18


@pytest.mark.parametrize(
    "text",
    [r"9^{9^{9^9}}", r"2^{100000}", "99999999!", r"\binom{99999999}{49999999}", r"(3!)^{9999}", r"10^{10^{10}} - 1"],
)
def test_numbers_that_would_fill_the_memory_are_no_expressions(text):
    assert latex.parse_expression(text) is None


def test_numbers_of_some_hundred_digits_are():
    assert latex.same_expression("2^{1000} + 1", "1 + 4^{500}", 1e-6)
    assert not latex.same_expression("2^{1000} + 1", "4^{500}", 1e-6)


@pytest.mark.parametrize(
    ("wait", "seconds", "num_items", "reward"),
    [(time.sleep, 1.5, 1, 1.0), (burn, 0.2, 1, 1.0), (burn, 0.3, 4, None)],
)
def test_all_that_comparing_one_answer_computes_has_one_time_limit(wait, seconds, num_items, reward, monkeypatch):
    """Each of the two parses for an item waits, as on a busy machine, or computes. The limit is 2 s of CPU time."""
    latex.load_math_verify()
    import latex2sympy2_extended

    parse = latex2sympy2_extended.latex2sympy

    def slow_parse(text: str, **options):
        wait(seconds)
        return parse(text, **options)

    monkeypatch.setattr(latex, "LATEX_SECONDS", 2)
    monkeypatch.setattr(latex2sympy2_extended, "latex2sympy", slow_parse)
    latex.parse_expression.cache_clear()
    answer = ", ".join(f"x+{number}" for number in range(70, 70 + num_items))
    reference = ", ".join(f"{number}+x" for number in range(70, 70 + num_items))
    assert math_reward([rf"\boxed{{{answer}}}"], [reference], answer_format="boxed") == [reward]
    latex.parse_expression.cache_clear()


def test_outside_of_the_main_thread_the_library_says_so():
    program = (
        "import concurrent.futures\n"
        "from grpo.rewards.answers import same_answer\n"
        "pool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "print(pool.submit(same_answer, 'x+1', '1+x', 0.0, True).exception())"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "main thread" in result.stdout, result.stderr
