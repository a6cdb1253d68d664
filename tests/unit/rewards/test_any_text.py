"""Whatever a completion says, every built-in reward function gives finite numbers or None, in time and without raising.

Texts are made of what policies write and parsers trip over, up to 100 kB. The examples are the same in every run.
"""

import contextlib
import functools
import itertools
import math
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from grpo.config import RewardConfig
from grpo.rewards.loading import BUILT_INS, load_functions

# Seconds: the deadline of a call by default, which is reward.timeout_seconds.
DEADLINE = RewardConfig().timeout_seconds
MOST_CHARACTERS = 100_000

WORDS = r"""
<think> </think> <answer> </answer> <THINK> < > </ <!-- --> &# &amp; { } $ $$ #### ^{ ^ _ & ! 9^{9^{9}} 0 1 9 42
1,234 0.5 . , - + / e 1e999 % 0x = <= ``` ~~~ |---| ** []( ) a ab x nan inf million ha \boxed{ \boxed \( \) \[ \]
\fbox{ ,111 a/ aa/ aa- a. 10^ +- m^2 = EUR 5e ° ~ \ and or ' _{1} .. *
\frac{1}{2} \frac \sqrt{ \sum_{i=1}^{n} \int_0^1 \hat{x} \left( \begin{pmatrix} \\ \end{pmatrix} \infty \cdot \pi
"""
FRAGMENTS = WORDS.split()
FRAGMENTS += [
    "< / answer >",
    "#### ",
    "\nAnswer: ",
    "5 / ",
    "x = ",
    "1 111",
    "final answer is",
    "\\text{ cm}",
    "\\times 10^{",
    "1 234",
    "\u2212",
]
FRAGMENTS += ["½", "²", "\u0663", "```python\n", "```\n", "print(1)\n", " ", "\n", "\t", "\xa0", "\u200b", "ㅤ"]
FRAGMENTS += ["\x00", "\x1b[2J", "\u0301", "想", "ก", "\U0001f642", "\U0010ffff", "\ud800"]
fragments = st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(), max_size=8))
times = st.sampled_from([1, 1, 2, 5, 30, 122, 1000, 30_000, MOST_CHARACTERS])
joined = st.lists(fragments, max_size=4).map("".join)
# A beginning, a pattern again and again, and an end that may not fit: what makes a parser go back and try again.
patterns = st.builds(lambda start, part, number, end: start + part * number + end, joined, joined, times, joined)
many_fragments = st.lists(fragments, min_size=5, max_size=60).map("".join)
wrappers = ["{}", "{}", "<answer>{}</answer>", "<think>a</think><answer>{}</answer>", "\\boxed{{{}}}", "#### {}"]
wrappers += ["${}$", "\\boxed{{5 {}}}", "<answer>5 {}</answer>", "```python\n{}\n```"]
texts = st.builds(
    lambda wrapper, text: wrapper.format(text[:MOST_CHARACTERS]),
    st.sampled_from(wrappers),
    st.one_of(patterns, many_fragments, st.text(st.characters(), max_size=300)),
)
references = st.sampled_from(
    ["72", "1/2", "\\frac{\\sqrt{3}}{2}", "Paris", "(1, 2)", "x + 1", "1,000", "50%", "", None]
)

OPTIONS = {"regex_match": {"pattern": r"\d+\s*apples"}, "code_reward": {"timeout_seconds": 1.0}}
# Comparing LaTeX takes up to 2 s for each parse and comparison, code_reward starts a process.
SLOW = {"code_reward": 40, "math_reward boxed": 120}
STYLE = "configs/examples/style.py"
RANGES = {f"{STYLE}:repetition_penalty": (-1, 0), "overlong_penalty": (-1, 0)}
CASES = [
    *(name for name in BUILT_INS if name != "math_reward"),
    *(f"{STYLE}:repetition_penalty", f"{STYLE}:language_reward"),
    *(f"math_reward {answer_format}" for answer_format in ("answer_tag", "boxed", "hashes", "answer_line")),
]


@functools.cache
def loaded(case: str):
    name, _, answer_format = case.partition(" ")
    options = {name: OPTIONS[name]} if name in OPTIONS else {}
    config = RewardConfig(functions={name: 1.0}, options=options, answer_format=answer_format or "answer_tag")
    return load_functions(config, max_completion_tokens=1000)[name]


class TooLong(BaseException):
    """No library suppresses it, as it may an Exception."""


@contextlib.contextmanager
def ended_after(seconds: float, message: str) -> Iterator[None]:
    """Raise TooLong after so many seconds of CPU time; SIGALRM, which counts others, is math-verify's."""

    def end(*_):
        raise TooLong(message)

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check(case: str, text: str, reference: str | None) -> None:
    function = loaded(case)
    columns = {"answer": [reference], "tests": ["assert True"]}
    columns |= {"num_tokens": [min(len(text), 2000)], "truncated": [False]}
    with ended_after(DEADLINE, f"{case} takes too long for {len(text)} characters: {text[:200]!r}"):
        (value,) = function([text], **columns)
    lowest, highest = RANGES.get(case.partition(" ")[0], (0, 1))
    assert value is None or (type(value) is float and math.isfinite(value) and lowest <= value <= highest), value


@pytest.mark.parametrize("num_examples", [80, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_no_text_raises_or_takes_too_long(case, num_examples):
    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=min(SLOW.get(case, num_examples), num_examples),
        phases=[Phase.explicit, Phase.generate],  # to shrink a text that takes seconds takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(text=texts, reference=references)
    @example(text="<answer>5 " + "km/" * 40 + "=</answer>", reference="72")
    @example(text="\\boxed{" * 14_000, reference="72")
    def holds(text: str, reference: str | None) -> None:
        check(case, text, reference)

    holds()


@pytest.mark.parametrize("answer_format", ["answer_tag", "boxed", "hashes", "answer_line"])
def test_one_piece_again_and_again_costs_no_more_than_its_length(answer_format):
    """Quadratic time of 20 kB would be too long."""
    for piece, wrapper in itertools.product(FRAGMENTS, sorted(set(wrappers))):
        check(f"math_reward {answer_format}", wrapper.format(piece * (20_000 // len(piece))), "42")
