"""Rewards of style: repetition, and the script that a completion is written in. Their time grows with the text.

    --reward.functions math_reward 1.0 configs/examples/style.py:repetition_penalty 0.1
    --reward.functions math_reward 1.0 configs/examples/style.py:language_reward 0.1

Options: --reward.options configs/examples/style.py:language_reward '{"language": "greek"}'
"""

import functools
import re
import sys
import unicodedata

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
) -> list[float]:
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
) -> list[float | None]:
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
