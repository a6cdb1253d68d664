"""Texts as people are shown them."""

import pytest

from grpo.text import has_surrogates, one_line, printable, shorten, without_surrogates


def test_both_ends_of_a_long_text_are_shown():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde [.. 1 characters ..] ghijk"
    assert shorten("abcdefghijk", 5) == "ab [.. 7 characters ..] jk"


def test_one_line_can_be_printed():
    assert one_line(" a\n\n b\t\ud800 ü \x1b[2J") == "a b \\ud800 ü \\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),  # a colour
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),  # the window's title
        ("\x9b2J", r"\x9b2J"),  # the same as ESC [ in one character
        ("100%\rreward 1.0", r"100%\rreward 1.0"),  # would overwrite its line
        ("a\x00b\x7f\x08", r"a\x00b\x7f\x08"),
        ("\u202etxt.exe\u202c \u2066x\u2069 \u200f", r"\u202etxt.exe\u202c \u2066x\u2069 \u200f"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\ud83d and \udcff", r"\ud83d and \udcff"),
    ],
)
def test_what_would_act_on_a_terminal_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(text).encode() and printable(shown) == shown  # UTF-8, and nothing is escaped twice


def test_what_a_reader_wants_to_see_stays():
    text = "a line\n\ttab \\frac{1}{2} ü 数学 שלום 👍🏽 👩‍👩‍👧 <b> | *"
    assert printable(text) == text


def test_lone_surrogates_alone():
    assert without_surrogates("\x1b \udc80 👍") == "\x1b \\udc80 👍"
    assert [has_surrogates(text) for text in ("a", "ü👍", "\ud800", "a\udfffb")] == [False, False, True, True]
