"""Reward functions of the end-to-end tests, some that work and some that do not."""

import os
import signal


def digit_share(completions, **columns):
    """Share of digits, plus the length, which two completions rarely have in common."""
    return [sum(c.isdigit() for c in text) / (len(text) + 1) + len(text) / 100 for text in completions]


def always_raises(completions, **columns):
    """A bug that shows at every completion."""
    raise KeyError("no such thing")


def passes_by_chance(completions, **columns):
    """1 for about half of the completions, by their text alone: groups of 4 mostly differ, some do not."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def fails_for_some(completions, **columns):
    """Ends its process or raises for about one completion in three each, by their text alone."""
    for text in completions:
        match sum(map(ord, text)) % 3:
            case 0:
                os.kill(os.getpid(), signal.SIGKILL)
            case 1:
                raise KeyError("no such thing")
    return [1.0 for _ in completions]
