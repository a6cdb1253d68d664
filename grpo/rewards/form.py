"""The built-in reward functions of form and style: what a completion looks like, whatever its answer.

builtin.py says what a reward function is and lists them all. Each works in time that grows linearly with the text.
"""

import functools
import re
import sys
import unicodedata

# ---------------------------------------------------------------------------------------------------------------------
# Form


def regex_match(completions: list[str], *, pattern: str, **columns: list) -> list[float | None]:
    """1.0 where the regular expression `pattern` occurs anywhere in the completion (re.search), else 0.0."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"pattern {pattern!r} is no regular expression: {error}; escape literal signs with a backslash"
        ) from error
    return [1.0 if compiled.search(text) else 0.0 for text in completions]


# What a reader takes for a tag: in any case, with blanks or attributes. Possessive, so that blanks are read once.
_TAG = re.compile(r"<\s*+(/?)\s*+(think|answer)\b[^<>\n]*+>", re.IGNORECASE)
_PROPER_TAG = re.compile(r"</?(?:think|answer)>")
# Characters without width, which hide a tag from a search for its letters.
_NO_WIDTH = re.compile(
    "[\xad\u0300-\u036f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]"
)
_THINK_THEN_ANSWER = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def format_reward(completions: list[str], **columns: list) -> list[float | None]:
    """1.0 if the completion is <think>..</think><answer>..</answer> and nothing else but blanks around, else 0.0.

    Each tag occurs once, written exactly so: `<THINK>`, `< think >` and `<think now="yes">` count as tags too, but
    malformed. Both have content (see `has_content`). A <think> that the prompt opens counts (`look_at_prompt`).
    """
    rewards = []
    for text in completions:
        tags, proper = _tags(text)
        match = _THINK_THEN_ANSWER.fullmatch(text) if proper and len(tags) == len(set(tags)) else None
        rewards.append(1.0 if match and has_content(match[1]) and has_content(match[2]) else 0.0)
    return rewards


def thinking_reward(completions: list[str], **columns: list) -> list[float | None]:
    """1.0 for exactly one <think>..</think> block with content, before the answer; 0.5 for a broken one; 0.0 for none.

    Broken: a tag is missing, repeated or malformed (see `format_reward`), the block has no content (see `has_content`),
    or an answer comes before the block or only inside it. A <think> that the prompt opens counts (`look_at_prompt`).
    """
    rewards = []
    for text in completions:
        tags, proper = _tags(text)
        before, _, rest = text.partition("<think>")
        thoughts, closed, after = rest.partition("</think>")
        early, inside, late = map(_begins_answer, (before, thoughts, after))
        once = proper and tags.count("think") == tags.count("/think") == 1 and closed
        whole = once and has_content(thoughts) and not early and (late or not inside)
        rewards.append(1.0 if whole else 0.5 if {"think", "/think"}.intersection(tags) else 0.0)
    return rewards


def _tags(text: str) -> tuple[list[str], bool]:
    """The tags in order, such as `think` and `/answer`, and whether all of them are written as they should be."""
    found = [slash + name.lower() for slash, name in _TAG.findall(_NO_WIDTH.sub("", text))]
    return found, len(found) == len(_PROPER_TAG.findall(text))


def _begins_answer(text: str) -> bool:
    """Whether an answer starts here, in whatever format the run uses."""
    return "<answer>" in text or "\\boxed" in text or "####" in text


# What is written and not seen: entities, comments, tags, the line that opens a code block.
_UNSEEN = re.compile(
    r"&(?:[a-zA-Z][a-zA-Z0-9]{0,31}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});?"
    r"|<!--(?s:.*?)(?:-->|\Z)|</?[a-zA-Z][^<>]*+>|^[ \t]*+(?:```|~~~).*$",
    re.MULTILINE,
)
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


def has_content(text: str) -> bool:
    """Whether there is a letter, a digit or a sign of mathematics beyond ASCII (the answer ∅): one of them suffices.

    Not content: punctuation, emoji, blanks of any width, HTML's entities, comments and tags, and the line that opens a
    code block. LaTeX's commands are, whether or not a reader would see what they print.
    """
    seen = _UNSEEN.sub(" ", text)
    if _LETTER_OR_DIGIT.search(seen):
        return True
    return any(sign > "\x7f" and unicodedata.category(sign) == "Sm" for sign in set(seen))


# ---------------------------------------------------------------------------------------------------------------------
# Style

# Scripts that are written without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, kana, Chinese.
_NO_BLANKS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_SEPARATORS = r"\s\u200b\u2060\ufeff"  # blanks, also those without width
_WORD = re.compile(rf"[{_NO_BLANKS}]|[^{_SEPARATORS}{_NO_BLANKS}]+")
# The longest unit that is found when it is repeated inside a word, in characters.
_UNIT_CHARACTERS = 64
_REPEATED = re.compile(rf"([^{_SEPARATORS}{_NO_BLANKS}]{{1,{_UNIT_CHARACTERS}}}?)\1{{2,}}+")
# What has no letter (1000000, a line of dashes) is an ordinary word up to so many characters.
_SIGNS_CHARACTERS = 32
_MOST_NGRAM = 100  # n-grams of a text of 100 kB take about 100 MB then


def repetition_penalty(completions: list[str], *, ngram: int = 4, **columns: list) -> list[float | None]:
    """Minus the share of n-grams of `ngram` words that occurred before: -(1 - distinct / total), 0 with fewer words.

    Words are split at blanks, case ignored. In scripts that are written without blanks (Chinese, Japanese, Thai ..)
    each character is a word. What a word repeats three times or more in a row counts as that many words: `hahaha` as
    `ha ha ha`; a unit without a letter (1000000, a line of dashes) only if the whole has more than 32 characters.

    One number per completion, as open-r1 has it (after arXiv:2502.03373, appendix C.2, which penalizes tokens).
    """
    if not 1 <= ngram <= _MOST_NGRAM:
        raise ValueError(f"ngram is {ngram}; set 1 word or more, up to {_MOST_NGRAM}")
    rewards = []
    for text in completions:
        words = _WORD.findall(_REPEATED.sub(_spread, text.casefold()))
        ngrams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
        rewards.append(len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
    return rewards


def _spread(repeated: re.Match) -> str:
    """`hahaha` as ` ha ha ha `."""
    whole, unit = repeated[0], repeated[1]
    if len(whole) <= _SIGNS_CHARACTERS and not any(map(str.isalpha, unit)):
        return whole
    return f" {f'{unit} ' * (len(whole) // len(unit))}"


def language_reward(completions: list[str], *, language: str = "latin", **columns: list) -> list[float | None]:
    """Share of the completion's letters (characters, not words) in one script; None if it has no letters.

    `language` is how Unicode starts the names of that script's letters: latin, cyrillic, greek, arabic, cjk, hangul ...
    After DeepSeek-R1's language consistency reward (arXiv:2501.12948), which counts words of the target language.
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
    letters = filter(str.isalpha, map(chr, range(sys.maxunicode)))
    return any(unicodedata.name(letter, "").startswith(prefix) for letter in letters)
