"""The built-in reward functions, from texts to numbers. `code_reward` is in features/programs.

A reward function is `f(completions: list[str], **columns: list) -> list[float | None]`. It gets the texts, and each
column of the data set as a list of the same length. None means "no reward for this completion". One call has one
completion, or all completions of a prompt if the function is marked `@group_level`.

Arguments with a default or behind a `*` are options. `reward.options` sets them, and the run fills in what it knows.
Each built-in function checks its options first, and the start of a run calls it without completions to have that done.
None of them imports torch, because worker processes must start fast.
"""

from collections.abc import Callable
from typing import Any

from grpo.rewards.answers import extract_answer, last_box, same_answer
from grpo.rewards.form import format_reward, regex_match, thinking_reward
from grpo.rewards.latex import OutOfTime, load_math_verify
from grpo.workers.worker import Rewards

RewardFunction = Callable[..., Rewards]


def group_level(function: RewardFunction) -> RewardFunction:
    """Mark a reward function that compares the completions of a prompt. One call then has all of them."""
    function.group_level = True
    return function


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
) -> Rewards:
    """Pay 1.0 if the answer in a completion equals the reference in `answer`, else 0.0: the rule of docs/answers.md.

    A reference with #### (GSM8K's solutions) is what follows the last one. A reference with boxes is the content of the
    last box, or a list if more are joined to it (`last_box`). With answer_format="boxed" expressions are compared,
    which needs the process's main thread.

    Returns `partial_credit` (0 to 1) for a wrong answer in the right form. Returns None if the reference is empty or
    None, or if a comparison takes more than LATEX_SECONDS of CPU time. Raises ValueError for a reference that is
    neither a text nor a number.

    >>> math_reward(["<answer>1,000</answer>", "<answer>11</answer>", "1000"], ["#### 1000"] * 3)
    [1.0, 0.0, 0.0]
    """
    extract_answer("", answer_format)  # refuses an unknown format
    latex = answer_format == "boxed"
    if latex and any(completions):
        load_math_verify()  # not within the CPU time of a comparison

    def reward(text: str, reference: Any) -> float | None:
        if not isinstance(reference, str | int | float | None) or reference != reference:  # NaN is not itself
            raise ValueError(
                f"the reference in `answer` is {type(reference).__name__} {str(reference)[:100]}, and must be one text "
                "or number; name an entry, such as --data.answer-column answer.0, or make text of it in data.row"
            )
        reference = "" if reference is None else str(reference).strip()
        if "####" in reference:
            reference = extract_answer(reference, "hashes")
        elif box := last_box(reference):
            reference = box
        if not reference:
            return None
        extracted = extract_answer(text, answer_format)
        if extracted is None:
            return 0.0
        try:
            if same_answer(extracted, reference, tolerance, latex):
                return 1.0
            return partial_credit
        except OutOfTime:
            return None

    return [reward(text, reference) for text, reference in zip(completions, answer, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Length


def overlong_penalty(
    completions: list[str],
    num_tokens: list[int],
    *,
    tokens: int = 0,
    max_completion_tokens: int,
    **columns: list,
) -> Rewards:
    """Punish long completions softly, as DAPO does (arXiv:2503.14476, equation 13).

    L_max is `max_completion_tokens`, and L_cache is `tokens`, or a quarter of L_max if that is 0. The reward is 0 up to
    a length of L_max - L_cache. Then it falls as ((L_max - L_cache) - length) / L_cache. It is -1 at L_max and beyond.

    >>> overlong_penalty([""] * 4, [60, 80, 90, 120], tokens=20, max_completion_tokens=100)
    [-0.0, -0.0, -0.5, -1.0]
    """
    if not 0 <= tokens <= max_completion_tokens or max_completion_tokens == 0:
        raise ValueError(
            f"tokens is {tokens}; set at most generator.max_completion_tokens = {max_completion_tokens}, or 0 for a "
            "quarter of it"
        )
    cache = tokens or max_completion_tokens / 4
    free = max_completion_tokens - cache
    return [-min(1.0, max(0.0, length - free) / cache) for length in num_tokens]


overlong_penalty.measures_length = (
    True  # a group that differs by it alone has nothing else to learn, see dynamic sampling
)

BUILT_INS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        math_reward,
        regex_match,
        format_reward,
        thinking_reward,
        overlong_penalty,
    )
}
