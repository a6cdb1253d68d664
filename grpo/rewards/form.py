"""The built-in reward functions for form: how a completion looks, whatever its answer.

builtin.py says what a reward function is, and lists them all. The time of each grows linearly with the text.
"""

import re
import unicodedata

from grpo.workers.worker import Rewards

# ---------------------------------------------------------------------------------------------------------------------
# Form


def regex_match(
    completions: list[str],
    *,
    pattern: str,
    **columns: list,
) -> Rewards:
    """Pay 1.0 if the regular expression `pattern` occurs anywhere in the completion (re.search), else 0.0.

    >>> regex_match(["<answer>8</answer>", "8"], pattern="<answer>.+</answer>")
    [1.0, 0.0]
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern {pattern!r} is no regular expression: {error}; escape literal signs with a backslash"
        ) from error
    return [float(bool(compiled.search(text))) for text in completions]


# All that a reader takes for a tag: in any case, with blanks or attributes. Possessive, so that blanks are read once.
_TAG = re.compile(r"<\s*+(/?)\s*+(think|answer)\b[^<>\n]*+>", re.IGNORECASE)
_PROPER_TAG = re.compile(r"</?(?:think|answer)>")
# Characters without width, which hide a tag from a search for its letters
_NO_WIDTH = re.compile(
    "[\xad\u0300-\u036f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]"
)
_THINK_THEN_ANSWER = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def format_reward(completions: list[str], **columns: list) -> Rewards:
    """Pay 1.0 if the completion is <think>..</think><answer>..</answer> with only blanks around it, else 0.0.

    Each tag must occur once and exactly so: `<THINK>`, `< think >` and `<think now="yes">` are malformed tags. Thoughts
    and answer must have content (see `has_content`). A <think> at the end of the prompt counts (see `look_at_prompt`).
    """
    rewards = []
    for text in completions:
        tags, are_proper = _tags(text)
        parts = None
        if are_proper and len(tags) == len(set(tags)):  # else the pattern could take quadratic time
            parts = _THINK_THEN_ANSWER.fullmatch(text)
        is_right = parts is not None and has_content(parts[1]) and has_content(parts[2])
        rewards.append(float(is_right))
    return rewards


def thinking_reward(completions: list[str], **columns: list) -> Rewards:
    """Pay 1.0 for one <think>..</think> block with content before the answer, 0.5 for a broken block, 0.0 for none.

    A block is broken if a tag is missing, repeated or malformed (see `format_reward`), if it has no content (see
    `has_content`), or if an answer comes before it or only inside of it. A <think> at the end of the prompt counts (see
    `look_at_prompt`).
    """
    rewards = []
    for text in completions:
        tags, are_proper = _tags(text)
        before, _, rest = text.partition("<think>")
        thoughts, closing, after = rest.partition("</think>")
        has_one_block = are_proper and tags.count("think") == tags.count("/think") == 1 and closing
        is_before_answer = not _has_answer(before) and (_has_answer(after) or not _has_answer(thoughts))
        if has_one_block and is_before_answer and has_content(thoughts):
            rewards.append(1.0)
        elif "think" in tags or "/think" in tags:
            rewards.append(0.5)
        else:
            rewards.append(0.0)
    return rewards


def _tags(text: str) -> tuple[list[str], bool]:
    """Return the tags in order, such as `think` and `/answer`, and whether all of them are written properly."""
    visible = _NO_WIDTH.sub("", text)
    tags = [slash + name.lower() for slash, name in _TAG.findall(visible)]
    proper_tags = _PROPER_TAG.findall(text)
    return tags, len(tags) == len(proper_tags)


def _has_answer(text: str) -> bool:
    """Look for the beginning of an answer in any format."""
    return "<answer>" in text or "\\boxed" in text or "####" in text or "\nAnswer:" in text


# All that is written but not seen: entities, comments, tags, the line that opens a code block
_UNSEEN = re.compile(
    r"&(?:[a-zA-Z][a-zA-Z0-9]{0,31}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});?"
    r"|<!--(?s:.*?)(?:-->|\Z)|</?[a-zA-Z][^<>]*+>|^[ \t]*+(?:```|~~~).*$",
    re.MULTILINE,
)
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


def has_content(text: str) -> bool:
    """Look for a letter, a digit or a mathematical sign beyond ASCII (the answer ∅). One of them is enough.

    These are not content: punctuation, emoji, blanks of any width, HTML's entities, comments and tags, and the line
    that opens a code block. LaTeX's commands are content, whether or not a reader would see what they print.
    """
    seen = _UNSEEN.sub(" ", text)
    if _LETTER_OR_DIGIT.search(seen):
        return True
    return any(sign > "\x7f" and unicodedata.category(sign) == "Sm" for sign in set(seen))
