"""Texts and numbers for a reader: short, on one line, and without characters that act on a terminal or mislead.

Everything that a model wrote or that stands in a data set goes through `printable` before a person reads it.
A text in a file is replaced as a whole.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Ranges of code points. Line breaks and tabs stay.
CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029"  # C0 with ESC and carriage return, DEL, C1, line separators
BIDI = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they show text in another order than it is in
SURROGATES = r"\ud800-\udfff"  # half of a character; no UTF-8 can hold one
REASON_CHARACTERS = 300
_ACTING = re.compile(f"[{CONTROLS}{BIDI}{SURROGATES}]")
_SURROGATE = re.compile(f"[{SURROGATES}]")
# Names of secrets, without what separates their words: api_key, openai_key_2, X-Auth-Token
_SECRET_PARTS = re.compile("secret|passw|passphrase|credential|authorization|bearer|apikey|privatekey")
_SECRET_ENDS = ("key", "token", "auth", "pwd")
# Names such as stop_token and sort_keys: what has one of these words is no secret
_PLAIN_WORDS = {"answer", "bos", "eos", "extra", "mask", "max", "min", "num", "pad", "sort", "special", "stop", "unk"}
# `name=value`, `'name': 'value'`, `name: [..]` and `--name value` in a text, if the name may be a secret's
_NAME = r"(?:api\s)?[\w.-]{0,40}(?:key|token|auth|pwd|secret|pass|cred|bearer)[\w.-]{0,40}"
_VALUE = r"""\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\[{][^\]}]*[\]}]|(?:(?:Bearer|Basic)\s+)?[^\s,;&\"'(){}\[\]]+"""
_ASSIGNED = re.compile(rf"""(--{_NAME}[\"']?,?\s+|{_NAME}[\"']?\s*[:=]\s*)({_VALUE})""", re.IGNORECASE)
# Secrets without a name: in front of a URL's host, behind the words of a header, and as services write theirs
_SECRET_TEXTS = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=]{8,}"
    r"|\b(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|eyJ[\w-]+\.eyJ)[\w.-]{8,}"
)
HIDDEN = "..."


def printable(text: str) -> str:
    """Write control characters, bidirectional overrides and lone surrogates as escapes such as `\\x1b`."""
    return _ACTING.sub(_escape, text)


def without_surrogates(text: str) -> str:
    """Write lone surrogates as escapes such as `\\ud800`, so that UTF-8 and strict JSON can hold the text."""
    return _SURROGATE.sub(_escape, text)


def has_surrogates(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def without_secrets(value: Any) -> Any:
    """Return a value of a config, or all of it, with '...' for what looks like a secret: for all that others may read.

    >>> without_secrets({"api_key": "123", "url": "https://me:123@host?token=a1b2", "max_tokens": 9})
    {'api_key': '...', 'url': 'https://...@host?token=...', 'max_tokens': 9}
    """
    if isinstance(value, str):
        return _SECRET_TEXTS.sub(HIDDEN, _ASSIGNED.sub(_hide_assigned, value))
    if isinstance(value, dict):
        return {name: _hide(entry) if _is_secret(name) else without_secrets(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = []
        for before, entry in zip([None, *value], value, strict=False):
            is_flag = isinstance(before, str) and before.startswith("-") and _is_secret(before)
            entries.append(_hide(entry) if is_flag else without_secrets(entry))
        return type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: without_secrets(entry) for name, entry in vars(value).items()}
        return dataclasses.replace(value, **fields)
    return value


def _is_secret(name: Any) -> bool:
    """Say whether a name says that its texts are secret."""
    words = [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", str(name))]
    if not words or words in (["keys"], ["tokens"]) or _PLAIN_WORDS & {*words}:
        return False
    return bool(_SECRET_PARTS.search("".join(words))) or words[-1].removesuffix("s").endswith(_SECRET_ENDS)


def _hide(value: Any) -> Any:
    """Return '...' for each text in a value."""
    if isinstance(value, str):
        return value and HIDDEN
    if isinstance(value, dict):
        return {name: _hide(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_hide, value))
    return value


def _hide_assigned(match: re.Match) -> str:
    before, value = match.groups()
    name = before.strip("-:=\"' \t\n")
    quote = value[0] if value[0] in "\"'" else ""
    is_number = value.strip("\"'").replace(".", "").isdigit()
    # `key: word` is prose, and sort(key=len) a program, unless it stands in a URL
    is_prose = (
        not quote and name.lower() in _SECRET_ENDS and match.string[match.start() - 1 : match.start()] not in "?&"
    )
    if is_number or is_prose or not _is_secret(name):
        return match[0]
    return f"{before}{quote}{HIDDEN}{quote}"


def shorten(text: str, limit: int) -> str:
    """Keep beginning and end of a text of more than `limit` characters, since a question or an error comes last.

    >>> shorten("a long text in between", 8)
    'a lo [.. 14 characters ..] ween'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [.. {len(text) - 2 * half} characters ..] {text[-half:]}"


def one_line(text: str) -> str:
    """Write each run of blanks and line breaks as one blank, and make the rest `printable`."""
    return printable(" ".join(text.split()))


def reason_of(error: BaseException) -> str:
    """Write an exception on one line of up to REASON_CHARACTERS."""
    return shorten(one_line(f"{type(error).__name__}: {error}"), REASON_CHARACTERS)


def compact_number(value: float) -> str:
    """Write about three significant digits in at most eight characters: 0.123, 12.3, 4.56k, 1.2e-05; - for NaN."""
    value = float(value)
    if math.isnan(value):
        return "-"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    for suffix, size in {"G": 1e9, "M": 1e6, "k": 1e3}.items():
        if abs(value) >= 0.9995 * size:  # 999.6 would round to 1e+03
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row of a table, its cells below each other.

    >>> aligned([("GPUs", "8"), ("disk", "9 GiB")])
    ['GPUs  8', 'disk  9 GiB']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def compact_duration(seconds: float) -> str:
    """Write seconds as 12s, 3m05s or 1h02m.

    >>> compact_duration(12), compact_duration(185), compact_duration(3720)
    ('12s', '3m05s', '1h02m')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Let an OSError of the block name the file that is written; that of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old one or the new one. Follow no link that somebody put there."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.unlink(missing_ok=True)
    with naming(path), open(partial, "x", encoding="utf-8") as file:  # "x" does not write through a link
        file.write(text)
    partial.replace(path)


def _escape(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()
