"""The built-in reward functions for form and style: how a completion looks, whatever its answer.

builtin.py says what a reward function is, and lists them all. The time of each grows linearly with the text.
"""

import functools
import re
import sys
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


# ---------------------------------------------------------------------------------------------------------------------
# Style

# Scripts that are written without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Chinese
_NO_BLANKS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_SEPARATORS = r"\s\u200b\u2060\ufeff"  # blanks, including those without width
_WORD = re.compile(rf"[{_NO_BLANKS}]|[^{_SEPARATORS}{_NO_BLANKS}]+")
# Longest unit that is found when it is repeated inside a word
_UNIT_CHARACTERS = 64
_REPEATED = re.compile(rf"([^{_SEPARATORS}{_NO_BLANKS}]{{1,{_UNIT_CHARACTERS}}}?)\1{{2,}}+")
# Up to this length, a repetition without a letter (1000000, a line of dashes) is an ordinary word.
_SIGNS_CHARACTERS = 32
_MAX_NGRAM = 100  # the n-grams of a text of 100 kB then take about 100 MB


def repetition_penalty(
    completions: list[str],
    *,
    ngram: int = 4,
    **columns: list,
) -> Rewards:
    """Punish repetition by -(1 - distinct / total) of the n-grams of `ngram` words. Fewer words give 0.

    Words are split at blanks, and case is ignored. In scripts without blanks (Chinese, Japanese, Thai ..) each
    character is a word. If a word repeats a unit three times or more in a row, each repetition is a word: `hahaha`
    counts as `ha ha ha`. A unit without a letter (1000000, a line of dashes) counts so only beyond 32 characters.

    Each completion has one number, as in open-r1 (after arXiv:2502.03373, appendix C.2, which penalizes tokens).
    """
    if not 1 <= ngram <= _MAX_NGRAM:
        raise ValueError(f"ngram is {ngram}; set 1 word or more, up to {_MAX_NGRAM}")
    rewards = []
    for text in completions:
        spread = _REPEATED.sub(_spread, text.casefold())
        words = _WORD.findall(spread)
        shifted = [words[start:] for start in range(ngram)]
        ngrams = list(zip(*shifted, strict=False))
        rewards.append(len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
    return rewards


def _spread(repeated: re.Match) -> str:
    """Write `hahaha` as ` ha ha ha `."""
    whole = repeated[0]
    unit = repeated[1]
    if len(whole) <= _SIGNS_CHARACTERS and not any(map(str.isalpha, unit)):
        return whole
    return f" {f'{unit} ' * (len(whole) // len(unit))}"


def language_reward(
    completions: list[str],
    *,
    language: str = "latin",
    **columns: list,
) -> Rewards:
    """Pay the share of the completion's letters (characters, not words) that are of one script. None without letters.

    `language` is the word with which Unicode begins the names of these letters: latin, cyrillic, greek, arabic, cjk ...
    This follows DeepSeek-R1's language consistency reward (arXiv:2501.12948), which counts words of a language.
    """
    prefix = f"{language.upper()} "
    if not _is_script(prefix):
        raise ValueError(
            f"language {language!r} is no script that Unicode names letters by; use one such as latin, cyrillic, "
            "greek, arabic, hebrew, devanagari, thai, cjk, hiragana, katakana or hangul"
        )
    rewards = []
    for text in completions:
        letters = list(filter(str.isalpha, text))
        ours = sum(unicodedata.name(letter, "").startswith(prefix) for letter in letters)
        rewards.append(ours / len(letters) if letters else None)
    return rewards


@functools.cache  # it may look at all of Unicode
def _is_script(prefix: str) -> bool:
    """Check that the names of some letters begin with `prefix`."""
    letters = filter(str.isalpha, map(chr, range(sys.maxunicode)))
    return any(unicodedata.name(letter, "").startswith(prefix) for letter in letters)
