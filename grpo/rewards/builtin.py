"""Reward functions, text to float: the built-in ones, and how a user's own are loaded.

A reward function is `f(completions: list[str], **columns: list) -> list[float | None]`: the texts, then each column of
the data set as a list of the same length, and two columns that every call gets: `num_tokens` (tokens of each
completion, its EOS included) and `truncated` (whether it ran out of tokens). None means "no reward for this
completion". It is called with one completion at a time; one marked `@group_level` with all completions of one prompt.

Built-in, by what they look at (options are fields of RewardConfig, `reward.NAME` on the command line):

    the answer (column `answer`)
      math_reward          number, text or LaTeX found by `answer_format`, within `tolerance`; `partial_credit`
      math_verify          expression found anywhere and compared by the math-verify library
      exact_match          text found by `answer_format`, but for case and blanks
      group_length_reward  group-level: shorter correct answers earn more (Kimi k1.5)
    code (column `tests`)
      code_reward          runs the completion's Python against the tests; `code_timeout_seconds`, `code_memory_gib`
    form
      regex_match          `pattern` occurs
      format_reward        exactly <think>..</think><answer>..</answer>
      thinking_reward      one <think> block before the answer, half for a broken one
    length
      length_penalty       0 to -1 from `target_tokens` on
      overlong_penalty     0 to -1 over the last `overlong_tokens` (DAPO)
    style
      repetition_penalty   0 to -1: repeated n-grams of `repetition_ngram` words
      language_reward      share of letters in the script `language`

Layer 0: no torch, nor anything that imports it: worker processes load this file and must start fast. Left out: calling
the functions, deadlines, worker processes and the weighted sum, which are the reward pool's.
"""

import functools
import inspect
import json
import logging
import re
import secrets
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from grpo.config import RewardConfig
from grpo.config.user_files import load_function
from grpo.rewards.answers import LATEX_SECONDS, extract_answer, same_answer
from grpo.rewards.sandbox import run_python

RewardFunction = Callable[..., list[float | None]]

# Columns of every call beside the data set's: completion tokens with EOS, and whether the completion was cut off.
EXTRA_COLUMNS = ("num_tokens", "truncated")


def group_level(function: RewardFunction) -> RewardFunction:
    """Mark a reward function that compares the completions of one prompt, and so is called with all of them."""
    function.group_level = True
    return function


def is_group_level(function: RewardFunction) -> bool:
    """Whether it is marked `@group_level`, also through functools.partial."""
    marked = getattr(function, "group_level", False)
    return marked or (isinstance(function, functools.partial) and is_group_level(function.func))


# ---------------------------------------------------------------------------------------------------------------------
# The answer


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
            equal = same_answer(given, reference, tolerance, latex=answer_format == "boxed")
            rewards.append(1.0 if equal else partial_credit)
    return rewards


def _reference_answer(reference: Any) -> str | None:
    if reference is None:
        return None
    text = str(reference)
    return extract_answer(text, "hashes") if "####" in text else text.strip() or None


# A box without content parses as the empty set, which some references are.
_EMPTY_BOX = re.compile(r"\\boxed\s*\{\s*\}")


def math_verify(completions: list[str], answer: list[Any], **columns: list) -> list[float | None]:
    """1.0 where the expression that the math-verify library finds in the completion equals the one in `answer`, else 0.

    It looks at the whole completion: first for \\boxed{} and "final answer is", then LaTeX between dollars, then plain
    numbers, of several the last. Looser than math_reward, so a completion that just ends in many numbers can be lucky.
    A reference with #### (GSM8K's solutions) counts from the last one on; None where it is empty or no expression.

    Needs the process's main thread: the library limits each parse and comparison with SIGALRM.
    """
    import math_verify as library  # sympy takes a second to load

    # On a timeout the library logs the text it parsed, all of it, as a warning.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rewards = []
    for text, reference in zip(completions, answer, strict=True):
        reference = _reference_answer(reference)
        if reference is None:
            rewards.append(None)
            continue
        written = reference if "$" in reference or "\\boxed" in reference else rf"\boxed{{{reference}}}"
        gold = library.parse(written, parsing_timeout=LATEX_SECONDS)
        found = [] if _EMPTY_BOX.search(text) else library.parse(text, parsing_timeout=LATEX_SECONDS)
        equal = bool(gold and found) and library.verify(gold, found, timeout_seconds=LATEX_SECONDS)
        rewards.append((1.0 if equal else 0.0) if gold else None)
    return rewards


def exact_match(
    completions: list[str], answer: list[Any], *, answer_format: str = "answer_tag", **columns: list
) -> list[float | None]:
    """1.0 where the completion's answer is the text in `answer` but for case and blanks, else 0.0.

    A reference with #### counts from the last one on; None where it is empty.
    """
    rewards = []
    for text, reference in zip(completions, answer, strict=True):
        reference = _reference_answer(reference)
        given = extract_answer(text, answer_format)
        if reference is None:
            rewards.append(None)
        else:
            rewards.append(1.0 if given is not None and _plain(given) == _plain(reference) else 0.0)
    return rewards


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


@group_level
def group_length_reward(
    completions: list[str],
    answer: list[Any],
    num_tokens: list[int],
    *,
    answer_format: str = "answer_tag",
    tolerance: float = 1e-6,
    **columns: list,
) -> list[float | None]:
    """Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3): of one prompt's completions the shorter earn more.

    With lambda = 0.5 - (tokens - shortest) / (longest - shortest) over the whole group, a completion that math_reward
    takes as correct gets lambda, from 0.5 for the shortest to -0.5 for the longest, any other min(0, lambda). All 0 if
    all are equally long. Meant as a small weight beside a reward for the answer itself; None where math_reward gives
    None.
    """
    shortest, longest = min(num_tokens), max(num_tokens)
    correct = math_reward(completions, answer, answer_format=answer_format, tolerance=tolerance)
    rewards = []
    for value, length in zip(correct, num_tokens, strict=True):
        bonus = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
        if value is None:
            rewards.append(None)
        else:
            rewards.append(bonus if value == 1.0 else min(0.0, bonus))
    return rewards


# ---------------------------------------------------------------------------------------------------------------------
# Code


def code_reward(
    completions: list[str],
    tests: list[Any],
    *,
    timeout_seconds: float = 5.0,
    memory_gib: float = 1.0,
    **columns: list,
) -> list[float | None]:
    """1.0 where the completion's program passes all of its tests, else 0.0: all or nothing, as is usual for code.

    The program is the last block fenced as ```python, or, if there is none, the last one fenced without a language; no
    closed block gives 0.0. `tests` is one of, None where it is empty:
      - Python source (or a list of lines, as MBPP has them) that runs after the program, in its namespace, and raises
        if a test fails; test functions it must call itself. Its end must be reached: a program that exits early, with
        whatever code, gets 0.0.
      - a list of {"input": .., "output": ..}, or its JSON: the program runs once per pair and must read the one from
        stdin, print the other but for blanks at line ends and empty lines at the end, and exit with 0.
    `timeout_seconds` is wall clock for all tests of one completion together, and CPU time of each process;
    `memory_gib` the address space of each.

    Python tests run in the program's own process, as anywhere in the field. So a program written to attack them, one
    that walks the interpreter's frames for the success marker or returns objects that equal everything, can win.
    Against that use pairs: their comparison happens outside, and the expected output never enters the sandbox.
    sandbox.py says what the program itself can and cannot do.

    Raises ValueError if `tests` is of none of these forms.
    """
    return [
        _code_reward(text, test, timeout_seconds, memory_gib) for text, test in zip(completions, tests, strict=True)
    ]


def _code_reward(text: str, tests: Any, timeout_seconds: float, memory_gib: float) -> float | None:
    tests = _read_tests(tests)
    if not tests:
        return None
    code = _last_program(text)
    if code is None:
        return 0.0
    if isinstance(tests, str):
        return 1.0 if _passes_asserts(code, tests, timeout_seconds, memory_gib) else 0.0
    deadline = time.monotonic() + timeout_seconds
    for given, expected in tests:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return 0.0
        outcome = run_python(code, given, timeout_seconds=seconds_left, memory_gib=memory_gib)
        if outcome.status != "ok" or _lines(outcome.stdout) != _lines(expected):
            return 0.0
    return 1.0


def _read_tests(tests: Any) -> str | list[tuple[str, str]]:
    """Python source, or pairs of input and output."""
    if tests is None:
        return ""
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        try:
            tests = json.loads(tests)
        except ValueError:
            return tests  # Python that starts with a list
    if isinstance(tests, str):
        return tests.strip()
    if isinstance(tests, list | tuple):
        if all(isinstance(test, str) for test in tests):
            return "\n".join(tests).strip()
        if all(
            isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
            for test in tests
        ):
            return [(test["input"], test["output"]) for test in tests]
    raise ValueError(
        f"code_reward cannot read tests of type {type(tests).__name__}: {str(tests)[:200]!r}; give Python source or a "
        'list (or its JSON) of {"input": text, "output": text}'
    )


def _last_program(text: str) -> str | None:
    """The last closed ```python block, else the last without a language; line by line, so that each fence pairs up."""
    found: dict[str, str] = {}
    language, block = None, []
    for line in text.splitlines(keepends=True):
        fence = line.strip()
        if language is None and fence.startswith("```"):
            language, block = fence[3:].strip().lower(), []
        elif language is not None and fence == "```":
            found[language] = "".join(block)
            language = None
        elif language is not None:
            block.append(line)
    for name in ("python", "py", "python3", ""):
        if found.get(name, "").strip():
            return found[name]
    return None


# Runs program, then tests, as one module named __main__ whose namespace has nothing of this harness. The marker comes
# in through stdin and not in a file, and goes out only once the tests are through; all that is called after the program
# ran was taken before, so that replacing exec or os.write changes nothing; and leaving by _exit keeps threads and exit
# handlers from having a say.
_HARNESS = """
def run(exec=exec):
    import json, os, sys, types
    job = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out, write, leave = os.dup(1), os.write, os._exit
    program, tests = (compile(job[name], name, "exec", dont_inherit=True) for name in ("program", "tests"))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(program, module.__dict__)
    exec(tests, module.__dict__)
    write(out, job["marker"].encode())
    leave(0)
run()
"""


def _passes_asserts(code: str, tests: str, timeout_seconds: float, memory_gib: float) -> bool:
    marker = secrets.token_hex(16)
    job = json.dumps({"program": code, "tests": tests, "marker": marker})
    outcome = run_python(_HARNESS, job, timeout_seconds=timeout_seconds, memory_gib=memory_gib)
    return outcome.status == "ok" and marker in outcome.stdout


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]


# ---------------------------------------------------------------------------------------------------------------------
# Form


def regex_match(completions: list[str], *, pattern: str, **columns: list) -> list[float | None]:
    """1.0 where the regular expression occurs anywhere in the completion (re.search), else 0.0."""
    compiled = re.compile(pattern)
    return [1.0 if compiled.search(text) else 0.0 for text in completions]


_THINK_THEN_ANSWER = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def format_reward(completions: list[str], **columns: list) -> list[float | None]:
    """1.0 if the completion is <think>..</think><answer>..</answer> and nothing else but blanks around, else 0.0.

    Each tag occurs once and neither content is empty. A chat template that opens <think> in the prompt makes 1.0
    impossible, as for thinking_reward.
    """
    return [_format_reward(text) for text in completions]


def _format_reward(text: str) -> float:
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0.0
    match = _THINK_THEN_ANSWER.fullmatch(text)
    return 1.0 if match and match[1].strip() and match[2].strip() else 0.0


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


# ---------------------------------------------------------------------------------------------------------------------
# Length


def length_penalty(
    completions: list[str],
    num_tokens: list[int],
    *,
    target_tokens: int,
    max_completion_tokens: int,
    **columns: list,
) -> list[float | None]:
    """0 up to `target_tokens`, from there linearly down to -1 at `max_completion_tokens`, and -1 beyond:
    -min(1, max(0, tokens - target) / (max_completion_tokens - target))."""
    slope = max_completion_tokens - target_tokens
    return [-min(1.0, max(0, length - target_tokens) / slope) for length in num_tokens]


def overlong_penalty(
    completions: list[str],
    num_tokens: list[int],
    *,
    max_completion_tokens: int,
    overlong_tokens: int = 0,
    **columns: list,
) -> list[float | None]:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), with L_max = `max_completion_tokens` and
    L_cache = `overlong_tokens`, or a quarter of L_max if that is 0.

    0 up to L_max - L_cache tokens, then ((L_max - L_cache) - tokens) / L_cache, so -1 at L_max, and -1 beyond.
    """
    cache = overlong_tokens or max_completion_tokens / 4
    free = max_completion_tokens - cache
    return [-min(1.0, max(0.0, length - free) / cache) for length in num_tokens]


# ---------------------------------------------------------------------------------------------------------------------
# Style


def repetition_penalty(completions: list[str], *, ngram: int = 4, **columns: list) -> list[float | None]:
    """Minus the share of word n-grams that occurred before: -(1 - distinct / total), 0 with fewer words than n.

    Words are split at blanks, case ignored. One number per completion, as open-r1 has it; "Demystifying Long
    Chain-of-Thought Reasoning" (arXiv:2502.03373, appendix C.2), which that goes back to, puts a penalty on each
    token of a repeated n-gram instead.
    """
    rewards = []
    for text in completions:
        words = text.casefold().split()
        ngrams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
    return rewards


def language_reward(completions: list[str], *, language: str = "latin", **columns: list) -> list[float | None]:
    """Share of the completion's letters (characters, not words) in one script; None if it has no letters.

    `language` is how Unicode starts the names of that script's letters, in any case: latin, cyrillic, greek, arabic,
    cjk, hiragana, hangul ... LaTeX commands, code and tags count as the letters they are. In the way of DeepSeek-R1's
    language consistency reward (arXiv:2501.12948), which counts words of the target language.
    """
    prefix = f"{language.upper()} "
    rewards = []
    for text in completions:
        letters = [character for character in text if character.isalpha()]
        ours = sum(unicodedata.name(letter, "").startswith(prefix) for letter in letters)
        rewards.append(ours / len(letters) if letters else None)
    return rewards


BUILT_INS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        math_reward,
        math_verify,
        exact_match,
        group_length_reward,
        code_reward,
        regex_match,
        format_reward,
        thinking_reward,
        length_penalty,
        overlong_penalty,
        repetition_penalty,
        language_reward,
    )
}


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_functions(
    config: RewardConfig, columns: Iterable[str] | None = None, max_completion_tokens: int = 0
) -> dict[str, tuple[RewardFunction, float]]:
    """Name (as in `config.functions`) -> function, a built-in one with its options bound, and weight.

    columns: names of the data set's columns each function will be called with, beside EXTRA_COLUMNS; given, they are
    checked against its signature, so that a missing column shows here and not at the first step.
    max_completion_tokens: of the generator; 0 is unknown, which the functions that need it refuse.

    Raises:
        ValueError: unknown name, missing file or function, a signature that does not take the columns, a data column
            named like an extra one, or a built-in function's option that makes no sense.
        Whatever the user's file raises when it runs.
    """
    if columns is not None:
        columns = list(columns)
        taken = [name for name in columns if name in EXTRA_COLUMNS]
        if taken:
            raise ValueError(
                f"data.columns has {', '.join(taken)}, but reward functions get a column of that name anyway (tokens "
                "and truncation of each completion); rename the data set's column"
            )
        columns += EXTRA_COLUMNS
    functions = {}
    for name, weight in config.functions.items():
        if name in BUILT_INS:
            function = _bind_options(name, config, max_completion_tokens)
            _check_option_names(name, function, columns or ())
        elif ":" in name:
            function = load_function(name, "reward")
        else:
            raise ValueError(
                f"unknown reward function {name!r}; built-ins are {', '.join(BUILT_INS)}, "
                "your own is written path/file.py:function"
            )
        if columns is not None:
            _check_signature(name, function, columns)
        functions[name] = (function, weight)
    return functions


def _bind_options(name: str, config: RewardConfig, max_completion_tokens: int) -> RewardFunction:
    _check_options(name, config, max_completion_tokens)
    answer = {"answer_format": config.answer_format}
    options: dict[str, dict[str, Any]] = {
        "math_reward": {**answer, "tolerance": config.tolerance, "partial_credit": config.partial_credit},
        "exact_match": answer,
        "group_length_reward": {**answer, "tolerance": config.tolerance},
        "code_reward": {"timeout_seconds": config.code_timeout_seconds, "memory_gib": config.code_memory_gib},
        "regex_match": {"pattern": config.pattern},
        "length_penalty": {
            "target_tokens": config.target_tokens,
            "max_completion_tokens": max_completion_tokens,
        },
        "overlong_penalty": {
            "overlong_tokens": config.overlong_tokens,
            "max_completion_tokens": max_completion_tokens,
        },
        "repetition_penalty": {"ngram": config.repetition_ngram},
        "language_reward": {"language": config.language},
    }
    return functools.partial(BUILT_INS[name], **options.get(name, {}))


def _check_option_names(name: str, function: functools.partial, columns: Iterable[str]) -> None:
    # A call's arguments replace those of a partial: a column `language` would pass for the option.
    taken = [column for column in columns if column in function.keywords]
    if taken:
        raise ValueError(
            f"column {', '.join(taken)} is named like an option of {name}; rename it or leave it out of data.columns"
        )


def _check_options(name: str, config: RewardConfig, max_completion_tokens: int) -> None:
    if name in ("length_penalty", "overlong_penalty") and max_completion_tokens <= 0:
        raise ValueError(
            f"{name} needs generator.max_completion_tokens, got {max_completion_tokens}; pass it to load_functions"
        )
    if name == "length_penalty" and not 0 < config.target_tokens < max_completion_tokens:
        raise ValueError(
            f"length_penalty needs reward.target_tokens between 0 and generator.max_completion_tokens = "
            f"{max_completion_tokens}, got {config.target_tokens}; set it to the tokens that are free of charge"
        )
    if name == "overlong_penalty" and not 0 <= config.overlong_tokens <= max_completion_tokens:
        raise ValueError(
            f"reward.overlong_tokens is {config.overlong_tokens}, but completions end at "
            f"generator.max_completion_tokens = {max_completion_tokens}; set at most that, or 0 for a quarter of it"
        )
    if name == "regex_match":
        if not config.pattern:
            raise ValueError("regex_match needs reward.pattern, which is empty; set a regular expression")
        try:
            re.compile(config.pattern)
        except re.error as error:
            raise ValueError(
                f"reward.pattern {config.pattern!r} is no regular expression: {error}; escape signs that are meant "
                "literally with a backslash"
            ) from error
    if name == "repetition_penalty" and config.repetition_ngram < 1:
        raise ValueError(f"reward.repetition_ngram is {config.repetition_ngram}; set 1 word or more")
    if name == "language_reward" and not _is_script(config.language):
        raise ValueError(
            f"reward.language {config.language!r} is no script that Unicode names letters by; use one such as latin, "
            "cyrillic, greek, arabic, hebrew, devanagari, thai, cjk, hiragana, katakana or hangul"
        )
    if name == "code_reward" and not 0 < config.code_timeout_seconds < config.timeout_seconds:
        raise ValueError(
            f"reward.code_timeout_seconds is {config.code_timeout_seconds}, but a call is ended, without a reward, "
            f"after reward.timeout_seconds = {config.timeout_seconds}; set the first below the second"
        )
    if name == "code_reward" and config.code_memory_gib <= 0:
        raise ValueError(f"reward.code_memory_gib is {config.code_memory_gib}; set GiB above 0")


def _is_script(language: str) -> bool:
    prefix = f"{language.upper()} "
    letters = filter(str.isalpha, map(chr, range(sys.maxunicode)))
    return any(unicodedata.name(letter, "").startswith(prefix) for letter in letters)


def _check_signature(name: str, function: RewardFunction, columns: list[str]) -> None:
    try:
        inspect.signature(function).bind([], **dict.fromkeys(columns, []))
    except TypeError as error:
        raise ValueError(
            f"reward function {name} cannot be called with completions and the columns "
            f"{', '.join(columns) or '(none)'}: {error}; "
            f"end its arguments with **columns and list the columns it needs in data.columns"
        ) from error
