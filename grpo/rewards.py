"""Text to float: the built-in reward functions, how a user's own are loaded, and the weighted sum.

A reward function is `f(completions: list[str], **columns: list) -> list[float | None]`: the completions' texts, then
each column of the data set as a list of the same length. None means "no reward for this completion".

Layer 0: no torch.distributed. Left out: deadlines and worker processes, which are the reward pool's.
"""

import dataclasses
import functools
import importlib.util
import inspect
import math
import numbers
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from grpo.config import RewardConfig
from grpo.types import Rollout

RewardFunction = Callable[..., list[float | None]]

# How much of a completion or column an error message shows, in characters.
SHOWN_CHARACTERS = 500

# Longest LaTeX answer compared as an expression, and seconds for each parse and comparison: policies do write
# 9^{9^{9^9}} and thousands of open brackets.
LATEX_CHARACTERS = 300
LATEX_SECONDS = 2


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not one finite number or None per completion."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading answers

# No <answer> inside the content: of "<answer> 1 <answer> 2 </answer>" the answer is 2.
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOXED_OR_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks; None if there is none or it is empty.

    answer_tag: content of the last complete <answer>..</answer>. boxed: content of the last \\boxed{} whose braces
    balance. hashes: what follows the last #### on its line. Raises ValueError on another format.
    """
    if answer_format == "answer_tag":
        found = _ANSWER_TAG.findall(text)
        answer = found[-1] if found else ""
    elif answer_format == "boxed":
        answer = _last_boxed(text)
    elif answer_format == "hashes":
        _, hashes, rest = text.rpartition("####")
        answer = rest.partition("\n")[0] if hashes else ""
    else:
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    return answer.strip() or None


def _last_boxed(text: str) -> str:
    # One pass with a stack: a policy that repeats "\boxed{" thousands of times must not cost quadratic time.
    opened, last_start, last = [], -1, ""
    for match in _BOXED_OR_BRACE.finditer(text):
        if match.group() != "}":
            opened.append((match.group() != "{", match.end()))
        elif opened:
            is_boxed, start = opened.pop()
            if is_boxed and start > last_start:
                last_start, last = start, text[start : match.start()]
    return last


# Groups of three behind commas or (thin) spaces, or plain digits; then decimals and a power of ten.
_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# The whole text must be words, one number or fraction, words. Signs that would change the number's value are allowed
# nowhere: - and / only where they join words (12-inch, km/h), digits behind the number only as a unit's power (m^2).
_ONE_NUMBER = re.compile(
    r"(?P<before>[^\d\-+*/^\\√<>≤≥≠]*?)(?<![a-zA-Z])(?P<sign>[-+]?)(?: ?(?:[$€£¥₹]|EUR|USD|GBP) ?)?"
    rf"(?P<top>{_PLAIN})(?: ?/ ?(?P<bottom>{_PLAIN}))?"
    r"(?P<after>(?:[^\d²³\-+*/^=<>×·!\\√]|-(?=[a-zA-Z]{2})|/(?=[a-zA-Z]{2})|(?<=[a-zA-Z])/|(?<=[a-zA-Z])\^?[23²³])*)"
)
# Words that make it another number: "minus 2" and "2 pi" are not 2, "5 million" is not 5.
_NOT_BEFORE = frozenset(["minus", "negative", "half", "sqrt", "root", "log", "ln", "exp", "sin", "cos", "tan"])
_NOT_UNITS = frozenset(
    ["x", "y", "pi", "π", "sqrt", "half", "dozen", "hundred", "thousand", "million", "billion", "trillion", "k"]
)


def parse_number(text: str) -> float | None:
    """The one number in a text, or None: `$1,234.50`, `12 apples`, `-3/4`, `1.5e3 km`, `1 234`, `x = 7`.

    Currency signs and units are dropped. A percent sign is such a unit: `50%` is 50, never 0.5. None if the text has no
    number, several (`3 or 4`), a formula (`2*3`, `10^6`, `5!`), or one scaled by a word or glyph (`5 million`, `3½`).
    """
    for written, plain in (("−", "-"), ("–", "-"), ("\\$", "$"), ("\\%", "%")):  # typographic minus, LaTeX escapes
        text = text.replace(written, plain)
    text = " ".join(text.split()).strip("*_` ")  # blanks and Markdown
    match = _ONE_NUMBER.fullmatch(text)
    if not match:
        return None
    unit = re.sub(r"(?<=[a-zA-Z])\^?[23²³]", "", match["after"])
    if not (_NOT_BEFORE.isdisjoint(_words(match["before"])) and _NOT_UNITS.isdisjoint(_words(unit))):
        return None
    if any(character.isnumeric() for character in match["before"] + unit):
        return None
    top, bottom = (float(re.sub("[, ]", "", part or "1")) for part in (match["top"], match["bottom"]))
    value = top / bottom if bottom else math.inf
    return (-value if match["sign"] == "-" else value) if math.isfinite(value) else None


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def _same_answer(given: str, reference: str, tolerance: float, latex: bool) -> bool:
    given_number, reference_number = parse_number(given), parse_number(reference)
    if given_number is not None and reference_number is not None:
        return abs(given_number - reference_number) <= tolerance * max(1.0, abs(reference_number))
    if _normalised(given) == _normalised(reference):
        return True
    return latex and _same_latex(given, reference)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split()).strip("*_` ").removesuffix(".")


def _same_latex(given: str, reference: str) -> bool:
    import math_verify  # sympy takes a second to load, and only \boxed{} answers need it

    if len(given) > LATEX_CHARACTERS:
        return False
    expressions = [math_verify.parse(f"${text}$", parsing_timeout=LATEX_SECONDS) for text in (reference, given)]
    return math_verify.verify(*expressions, timeout_seconds=LATEX_SECONDS)


# ---------------------------------------------------------------------------------------------------------------------
# Built-in reward functions


def math_reward(
    completions: list[str],
    answer: list[Any],
    *,
    answer_format: str = "answer_tag",
    tolerance: float = 1e-6,
    partial_credit: float = 0.0,
    **columns: list,
) -> list[float | None]:
    """1.0 where the completion's answer equals the reference in `answer`, else 0.0.

    Equal: both are one number (see parse_number: units are dropped) and differ by at most `tolerance`, relative to the
    reference or absolute if that is below 1; or the texts agree but for case, blanks and a final period; or, with
    answer_format="boxed", math-verify takes the two LaTeX expressions as equal (it needs the process's main thread).
    A reference with #### (GSM8K's solutions) counts from the last one on.

    Returns `partial_credit` for an answer in the right form that is wrong, None where the reference is empty or None.
    """
    rewards = []
    for text, reference in zip(completions, answer, strict=True):
        reference = _reference_answer(reference)
        given = extract_answer(text, answer_format)
        if reference is None:
            rewards.append(None)
        elif given is None:
            rewards.append(0.0)
        else:
            equal = _same_answer(given, reference, tolerance, latex=answer_format == "boxed")
            rewards.append(1.0 if equal else partial_credit)
    return rewards


def _reference_answer(reference: Any) -> str | None:
    if reference is None:
        return None
    text = str(reference)
    return extract_answer(text, "hashes") if "####" in text else text.strip() or None


# Any of these starts an answer, whatever format the run uses.
_ANSWER_MARKERS = ("<answer>", "\\boxed", "####")


def thinking_reward(completions: list[str], **columns: list) -> list[float | None]:
    """1.0 for exactly one <think>..</think> block with content, before the answer; 0.5 for a broken one; 0.0 for none.

    Broken: a tag is missing or repeated, the block is empty, or an answer comes before the block or only inside it.
    Only the completion's own text counts: a chat template that opens <think> in the prompt leaves just the closing tag
    here, and then 0.5 is the most that can be had; turn that off with data.chat_template_kwargs, or drop this reward.
    """
    return [_thinking_reward(text) for text in completions]


def _thinking_reward(text: str) -> float:
    counts = text.count("<think>"), text.count("</think>")
    if counts == (0, 0):
        return 0.0
    before, _, rest = text.partition("<think>")
    thoughts, closed, after = rest.partition("</think>")
    if counts != (1, 1) or not closed or not thoughts.strip():
        return 0.5
    answers_before, answers_inside, answers_after = (
        any(marker in part for marker in _ANSWER_MARKERS) for part in (before, thoughts, after)
    )
    return 0.5 if answers_before or (answers_inside and not answers_after) else 1.0


BUILT_INS: dict[str, RewardFunction] = {"math_reward": math_reward, "thinking_reward": thinking_reward}


# ---------------------------------------------------------------------------------------------------------------------
# Loading and scoring


def load_functions(
    config: RewardConfig, columns: Iterable[str] | None = None
) -> dict[str, tuple[RewardFunction, float]]:
    """Name (as in `config.functions`) -> function and weight.

    columns: names of the data set's columns each function will be called with; given, they are checked against its
    signature, so that a missing column shows here and not at the first step.

    Raises:
        ValueError: unknown name, missing file or function, or a signature that does not take the columns.
        Whatever the user's file raises when it runs.
    """
    bound = {
        "math_reward": functools.partial(
            math_reward,
            answer_format=config.answer_format,
            tolerance=config.tolerance,
            partial_credit=config.partial_credit,
        )
    }
    modules: dict[str, Any] = {}  # two functions of one file share its module
    functions = {}
    for name, weight in config.functions.items():
        file, colon, function_name = name.rpartition(":")
        if name in BUILT_INS:
            function = bound.get(name, BUILT_INS[name])
        elif colon and file.endswith(".py"):
            if file not in modules:
                modules[file] = _load_file(file)
            function = _find_function(modules[file], file, function_name)
        else:
            raise ValueError(
                f"unknown reward function {name!r}; built-ins are {', '.join(BUILT_INS)}, "
                "your own is written path/file.py:function"
            )
        if columns is not None:
            _check_signature(name, function, list(columns))
        functions[name] = (function, weight)
    return functions


def _load_file(file: str):
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(
            f"reward file {path.absolute()} does not exist; give a path that holds from the folder the run starts in"
        )
    spec = importlib.util.spec_from_file_location(f"reward_file {path.resolve()}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


def _find_function(module, file: str, name: str) -> RewardFunction:
    function = getattr(module, name, None)
    if callable(function):
        return function
    there = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    raise ValueError(f"{file} has no function {name!r}; functions there: {', '.join(there) or 'none'}")


def _check_signature(name: str, function: RewardFunction, columns: list[str]) -> None:
    try:
        inspect.signature(function).bind([], **dict.fromkeys(columns, []))
    except TypeError as error:
        raise ValueError(
            f"reward function {name} cannot be called with completions and the columns "
            f"{', '.join(columns) or '(none)'}: {error}; "
            f"end its arguments with **columns and list the columns it needs in data.columns"
        ) from error


def score(functions: dict[str, tuple[RewardFunction, float]], rollouts: list[Rollout]) -> list[Rollout]:
    """New rollouts with each function's value in `rewards` and the weighted sum in `reward`.

    Each function is called once with all completions. A function that said None is left out of that completion's sum;
    all None gives None.

    Raises:
        RewardError: a function raised, or returned a wrong number of values or something that is not a finite number.
            The message names the function, the completion and its columns.
    """
    if not rollouts:
        return []
    values = {name: _call(name, function, rollouts) for name, (function, _) in functions.items()}
    scored = []
    for i, rollout in enumerate(rollouts):
        rewards = {name: values[name][i] for name in functions}
        weighted = [functions[name][1] * value for name, value in rewards.items() if value is not None]
        scored.append(dataclasses.replace(rollout, rewards=rewards, reward=sum(weighted) if weighted else None))
    return scored


def _call(name: str, function: RewardFunction, rollouts: list[Rollout]) -> list[float | None]:
    # A user's function may raise anything, and whatever it is must name the completion it came from. So these are the
    # two places that catch every Exception; both raise it again.
    try:
        values = _call_once(function, rollouts)
    except Exception as error:
        for rollout in rollouts:
            try:
                _call_once(function, [rollout])
            except Exception as single_error:
                raise RewardError(
                    f"reward function {name} raised {type(single_error).__name__}: {single_error}\n{_shown(rollout)}"
                ) from single_error
        raise RewardError(
            f"reward function {name} raised {type(error).__name__}: {error}\n"
            f"  with {len(rollouts)} completions at once, but not one at a time. The first:\n{_shown(rollouts[0])}"
        ) from error
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward function {name} returned {type(values).__name__}; "
            f"it must return a list with one number or None for each of the {len(rollouts)} completions"
        )
    if len(values) != len(rollouts):
        raise RewardError(
            f"reward function {name} returned {len(values)} values for {len(rollouts)} completions; "
            f"it must return one number or None for each. The first:\n{_shown(rollouts[0])}"
        )
    for i, (value, rollout) in enumerate(zip(values, rollouts, strict=True)):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise RewardError(
                f"reward function {name} returned {_shorten(repr(value))} ({type(value).__name__}) "
                f"for completion {i} of {len(rollouts)}; it must be a finite number or None\n{_shown(rollout)}"
            )
    return [None if value is None else float(value) for value in values]


def _call_once(function: RewardFunction, rollouts: list[Rollout]):
    columns = {name: [rollout.prompt.columns[name] for rollout in rollouts] for name in rollouts[0].prompt.columns}
    return function([rollout.text for rollout in rollouts], **columns)


def _shown(rollout: Rollout) -> str:
    lines = [f"  completion: {_shorten(rollout.text)!r}"]
    lines += [f"  {name}: {_shorten(value)!r}" for name, value in rollout.prompt.columns.items()]
    return "\n".join(lines)


def _shorten(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return value
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [.. {len(text) - 2 * half} characters ..] {text[-half:]}"
