"""Texts as people are shown them."""

import pytest

from grpo.text import has_surrogates, one_line, printable, shorten, without_secrets, without_surrogates


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


# Each holds "s3cr3t", which nobody may read
SECRETS = (
    {"api_key": "s3cr3t"},
    {"X-Api-Key": "it's s3cr3t"},
    {"apiKey": "s3cr3t"},
    {"api_keys": ["s3cr3t", "s3cr3t-2"]},
    {"openai_key_2": "s3cr3t"},
    {"HF_TOKEN": "s3cr3t"},
    {"accessToken": "s3cr3t"},
    {"passwd": "s3cr3t"},
    {"pwd": "s3cr3t"},
    {"passphrase": "s3cr3t"},
    {"credential": {"user": "s3cr3t"}},
    {"client_secret": "s3cr3t"},
    {"basic_auth": ["me", "s3cr3t"]},
    {"many": [{"deeper": ({"wandb_key": "s3cr3t"},)}]},
    {"Authorization": "Bearer s3cr3t"},
    {"headers": ["Accept: text", "X-Api-Key: s3cr3t"]},
    {"header": "Bearer s3cr3t77"},
    {"url": "https://user:s3cr3t@host/v1"},
    {"url": "https://host/v1?model=a&token=s3cr3t"},
    {"dsn": "postgres://s3cr3t@db/x"},
    {"args": ["--api-key", "s3cr3t"]},
    {"args": "OPENAI_API_KEY=s3cr3t python judge.py"},
    {"json": '{"api_key": "s3cr3t", "n": 1}'},
    {"value": "sk-proj-s3cr3t77"},
    {"value": "hf_s3cr3ts3cr3t"},
)
PLAIN = (
    {"max_tokens": 256, "max_new_tokens": "256", "num_tokens": "9"},
    {"tokenizer": "a/tokenizer.json", "tokenizer_path": "b", "token_ids": [1, 2]},
    {
        "stop_token": "</s>",
        "stop_tokens": ["</s>"],
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "stop_token_ids": [3],
    },
    {"answer_key": "solution", "author": "me", "keys": ["a"], "tokens": ["<a>"], "key_columns": ["a"], "token": 5},
    {"passes": "all", "authority": "x", "compass": "north", "url": "https://host:8000/v1?model=a#b"},
    {"prompt": "The answer key: 42. Write key: value pairs, or sorted(rows, key=len), Bearer of news, me@host."},
    {"path": "mine/reward.py:token_reward", "source": "openai/gsm8k[main]@v1:train[:5%]", "git": "https://host/a/b"},
)


@pytest.mark.parametrize("options", SECRETS, ids=str)
def test_a_secret_leaves_the_machine_in_no_way(options):
    """It hides in a config, and in what is written of one or stands in a command line."""
    assert "s3cr3t" not in str(without_secrets(options))
    assert "s3cr3t" not in without_secrets(str(options))


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_what_is_no_secret_stays(options):
    assert without_secrets(options) == options
    assert without_secrets(str(options)) == str(options)
