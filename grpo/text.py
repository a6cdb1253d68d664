"""Texts and numbers for a reader: short, on one line, and without characters that act on a terminal or mislead.

Everything that a model wrote or that stands in a data set goes through `printable` before a person reads it.
A text in a file is replaced as a whole.
"""

import math
import pathlib
import re
from typing import Any

# Ranges of code points. Line breaks and tabs stay.
CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029"  # C0 with ESC and carriage return, DEL, C1, line separators
BIDI = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they show text in another order than it is in
SURROGATES = r"\ud800-\udfff"  # half of a character; no UTF-8 can hold one
REASON_CHARACTERS = 300
# How names end whose texts are secret, such as api_key
SECRET = "(?:key|token|secret|password)"
_ACTING = re.compile(f"[{CONTROLS}{BIDI}{SURROGATES}]")
_SURROGATE = re.compile(f"[{SURROGATES}]")
_SECRET_NAME = re.compile(rf".*{SECRET}", re.IGNORECASE | re.DOTALL)


def printable(text: str) -> str:
    """Write control characters, bidirectional overrides and lone surrogates as escapes such as `\\x1b`."""
    return _ACTING.sub(_escape, text)


def without_surrogates(text: str) -> str:
    """Write lone surrogates as escapes such as `\\ud800`, so that UTF-8 and strict JSON can hold the text."""
    return _SURROGATE.sub(_escape, text)


def has_surrogates(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def without_secrets(options: Any) -> Any:
    """Return options, a table of whatever JSON can say, with '...' for each text whose name says that it is secret."""
    if isinstance(options, list | tuple):
        return [without_secrets(option) for option in options]
    if not isinstance(options, dict):
        return options
    clean = {}
    for name, option in options.items():
        is_secret = isinstance(option, str) and option and _SECRET_NAME.fullmatch(str(name))
        clean[name] = "..." if is_secret else without_secrets(option)
    return clean


def shorten(text: str, limit: int) -> str:
    """Keep beginning and end of a text of more than `limit` characters, since a question or an error comes last."""
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


def compact_duration(seconds: float) -> str:
    """Write seconds as 12s, 3m05s or 1h02m."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old one or the new one. Follow no link that somebody put there."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="utf-8") as file:  # "x" does not write through a link
        file.write(text)
    partial.replace(path)


def _escape(match: re.Match) -> str:
    return match[0].encode("unicode_escape").decode()
