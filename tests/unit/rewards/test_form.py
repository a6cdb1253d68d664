"""Rewards of form, style and length: what counts as a tag, as content and as a repetition, and what each pays."""

import functools

import pytest

from configs.examples.style import language_reward, repetition_penalty
from grpo.rewards.builtin import (
    format_reward,
    overlong_penalty,
    regex_match,
    thinking_reward,
)
from grpo.rewards.form import has_content

# ---- Content

UNSEEN = []  # among them a Braille cell without dots and tag characters
UNSEEN += ["", " \n\t", ".", "...", "…", "?!", "\u200b", "\ufeff\u2060\xad", "\xa0\u3000\u2003", "\u2800"]
UNSEEN += ["\U000e0041\U000e0042", "\ufe0f", "&nbsp;", "&nbsp", "&#8203;&#x200B;", "&#97;", "<br>"]
UNSEEN += ["<br/><p></p>", "<!-- I think -->", "<!-- 1 > 0 -->", "<!-- not closed", "---", "***", "___", "# "]
UNSEEN += ["> ", "- - -", "|---|---|", "```python\n```", "~~~\n~~~", "+ = < >", "🙂"]
UNSEEN += ["\u2500\u2500\u2500\u2500\u2500"]
SEEN = ["a", "5", ".5", "é", "想", "ก", "½", "②", "∞", "∅", "x &lt; y", "a <b and c> d", "```python\nx\n```", "\\pi"]
SEEN += ["\\text{no}", "[see](https://example.com)", "<b>yes</b>", "-1", "AT&T", "한"]


@pytest.mark.parametrize("text", UNSEEN)
def test_what_a_reader_would_not_see_is_no_content(text):
    assert not has_content(text)
    assert thinking_reward([f"<think>{text}</think><answer>5</answer>"]) == [0.5]
    assert format_reward([f"<think>{text}</think><answer>5</answer>"]) == [0.0]
    assert format_reward([f"<think>a</think><answer>{text}</answer>"]) == [0.0]


@pytest.mark.parametrize("text", SEEN)
def test_what_a_reader_would_see_is_content(text):
    assert has_content(text)
    assert thinking_reward([f"<think>{text}</think><answer>{text}</answer>"]) == [1.0]
    assert format_reward([f"<think>{text}</think><answer>{text}</answer>"]) == [1.0]


# ---- Tags


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\nlong\n\nthoughts\n</think>\n#### 5", 1.0),
        ("<think>is it <answer>4</answer>?</think><answer>5</answer>", 1.0),
        ("<think>2 + 3 = 5</think>", 1.0),
        ("<answer>5</answer>", 0.0),
        ("<think>2 + 3", 0.5),
        ("2 + 3</think><answer>5</answer>", 0.5),
        ("</think>2 + 3<think>", 0.5),
        ("<thinking>a</thinking>", 0.0),  # no tag of thoughts
        ("I think > 5", 0.0),
        ("<answer>5</answer><think>2 + 3</think>", 0.5),
        ("<think>2 + 3 <answer>5</answer></think>", 0.5),
    ],
)
def test_thinking_reward(text, reward):
    assert thinking_reward([text], answer=["5"]) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\nb\n</think>\n\n<answer>c</answer>\n", 1.0),
        ("<think>a</think>", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("So <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer>" + "</answer>" * 30000, 0.0),
    ],
)
def test_format_reward(text, reward):
    assert format_reward([text], answer=["?"]) == [reward]


GOOD = "<think>2 + 3</think><answer>5</answer>"
# Each replaces or joins a proper tag.
MALFORMED = {
    "<think>": ["<THINK>", "<Think>", "< think >", "<think\n>", '<think depth="3">', "<think/>", "<th\u200bink>"],
    "</think>": ["</think></thi\u0301nk>", "</THINK>", "</ think>", "< / think >", "</think></Think>", "<think>"],
    "2": ["< Think >2", "2</think x>", "<Answer>4</Answer>2"],
    "<answer>": ["<ANSWER>", "< answer>", '<answer lang="en">'],
    "</answer>": ["</Answer>", "</ answer>", "</answer></ANSWER>"],
}
MALFORMED["<think>"] += ["<think\u200b>", "<think><think>", "<think>< THINK >"]


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, news in MALFORMED.items() for new in news])
def test_tags_in_another_form_count_and_are_malformed(old, new):
    assert (thinking_reward([GOOD]), format_reward([GOOD])) == ([1.0], [1.0])
    text = GOOD.replace(old, new, 1)
    assert (thinking_reward([text]), format_reward([text])) == ([0.5], [0.0])


# ---- Repetition


@pytest.mark.parametrize(
    ("text", "ngram", "reward"),
    [
        ("a b A  b", 2, -1 / 3),  # a b, b a, a b
        ("a a a a", 5, 0.0),
        ("HaHaha", 2, -0.5),  # ha ha, ha ha
        ("xabcabcabcy", 1, -2 / 5),  # x abc abc abc y
        ("banana", 1, 0.0),  # an only twice
        ("你好，你好，", 1, -0.5),  # 你 好 ， of six
        ("你好你好", 2, -1 / 3),  # 你好 好你 你好
        ("한국 한국", 1, -0.5),  # Korean has blanks
        ("1000000 and 0.333333", 1, 0.0),
        ("0" * 33, 1, -32 / 33),
        (bytes(range(33, 97)).decode() * 4, 1, -3 / 4),  # a unit of 64 characters, all different
    ],
)
def test_repetition_penalty(text, ngram, reward):
    assert repetition_penalty([text], ngram=ngram, answer=["?"]) == [pytest.approx(reward)]


# ---- Patterns, scripts, length


def test_regex_match():
    assert regex_match(["see [12]", "see 12", ""], pattern=r"\[\d+\]", answer=["", "", ""]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "language", "reward"),
    [
        ("Hallo мир 42!", "latin", 5 / 8),
        ("中文abc", "cjk", 2 / 5),
        ("42 + 1 = 43", "latin", None),
    ],
)
def test_language_reward(text, language, reward):
    assert language_reward([text], language=language, answer=["?"]) == [reward]


def test_overlong_penalty():
    """L_max 400: L_cache 100 by default, as a quarter; or 200."""
    lengths = [0, 300, 350, 400, 401]
    reward = functools.partial(overlong_penalty, max_completion_tokens=400)
    assert reward([""] * 5, num_tokens=lengths) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert reward([""] * 5, num_tokens=lengths, tokens=200) == [0.0, -0.5, -0.75, -1.0, -1.0]
