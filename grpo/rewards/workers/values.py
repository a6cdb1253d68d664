"""What a reward function returned, as plain finite floats, and what a worker sent, before either becomes a reward.

A value is taken as it is stored: what a subclass of list, int or float says of itself (its length, order, float value,
equality) is not asked for. numpy and torch are not imported; who has not loaded them cannot return theirs.
"""

import decimal
import fractions
import json
import math
import sys
from typing import Any

from grpo.text import one_line, shorten

# Characters of an error message, repr or completion that are shown.
SHOWN_CHARACTERS = 500


def plain_values(values: Any, number: int) -> list[float | None] | str:
    """The values of `number` completions as floats, or what is wrong with them.

    values: a list or tuple, or a one-dimensional numpy array or torch tensor. Each of them None, True, False, an int, a
    float, a Fraction, a Decimal, or a scalar of numpy or torch, and finite as a float.
    """
    entries = _entries(values)
    if entries is None:
        return f"returned {_described(values)}, not a list with {number} values"
    if len(entries) != number:
        return f"returned {len(entries)} values for {number} completions"
    plain = []
    for entry in entries:
        value = None if entry is None else _as_float(entry)
        if value is not None and not math.isfinite(value):
            return f"returned {_described(entry)}, not a finite number or None"
        plain.append(value)
    return plain


def _entries(values: Any) -> list | None:
    kind = type(values)  # unlike __class__, it cannot be overridden
    for sequence in (list, tuple):
        if issubclass(kind, sequence):
            return list(sequence.__getitem__(values, slice(None)))
    if (kind is _type_of("numpy", "ndarray") or kind is _type_of("torch", "Tensor")) and values.ndim == 1:
        return list(values)
    return None


def _as_float(value: Any) -> float:
    """NaN for what is no number or too large for a float."""
    kind = type(value)
    try:
        for number in (float, int):  # bool is an int, numpy.float64 a float
            if issubclass(kind, number):
                return float(number.__pos__(value))
        if kind in (fractions.Fraction, decimal.Decimal):
            return float(value)
        if issubclass(kind, _type_of("numpy", "generic") or ()) and value.dtype.kind in "biuf":
            return float(value)
        if kind is _type_of("torch", "Tensor") and value.ndim == 0 and not value.is_complex():
            return float(value)
    except (OverflowError, ValueError):  # 10**400; a signalling NaN
        pass
    return math.nan


def _type_of(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)


def _described(value: Any) -> str:
    """`nan (float)`; only the type where the value cannot be shown."""
    kind = type(value).__name__
    try:
        return f"{shown(repr(value))} ({kind})"
    except Exception:  # a user's __repr__ may raise anything, and so does that of an int of 5000 digits
        return f"a value that cannot be shown ({kind})"


def shown(text: str) -> str:
    """As a message shows it."""
    return one_line(shorten(text, SHOWN_CHARACTERS))


# ---------------------------------------------------------------------------------------------------------------------
# What arrives from a worker


def read_reply(line: bytes) -> dict[str, Any] | None:
    """A line from a worker: a JSON object without NaN or Infinity; None for anything else."""
    try:
        message = _REPLIES.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_REPLIES = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one for every line


def is_outcome(outcome: Any, number: int) -> bool:
    """Whether it is what a call for `number` completions may come to: a failure, or as many finite floats or Nones.

    `make_call` sends nothing else; but a completion may have taken its process over.
    """
    if isinstance(outcome, str):
        return True
    return (
        isinstance(outcome, list)
        and len(outcome) == number
        and all(value is None or (isinstance(value, float) and math.isfinite(value)) for value in outcome)
    )
