"""Reward functions of the end-to-end tests, one that works and two that do not."""


def digit_share(completions, **columns):
    """Share of digits, plus the length, which two completions rarely have in common."""
    return [sum(c.isdigit() for c in text) / (len(text) + 1) + len(text) / 100 for text in completions]


def raises_for_odd_answers(completions, answer, **columns):
    """A typical bug: it works for some rows only."""
    if any(int(a) % 2 for a in answer):
        raise KeyError("odd answer")
    return [0.0 for _ in completions]


def one_too_few(completions, **columns):
    return [1.0 for _ in completions[1:]]
