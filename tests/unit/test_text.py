"""Texts as messages show them."""

from grpo.text import one_line, shorten


def test_both_ends_of_a_long_text_are_shown():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde [.. 1 characters ..] ghijk"
    assert shorten("abcdefghijk", 5) == "ab [.. 7 characters ..] jk"


def test_one_line_can_be_printed():
    assert one_line(" a\n\n b\t\ud800 ü ") == "a b ? ü"
