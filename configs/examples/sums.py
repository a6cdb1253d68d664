"""Sums of two numbers with two digits each: rows of your own, and a reward of your own, in one file.

    --data.path configs/examples/sums.py:rows --reward.functions configs/examples/sums.py:last_number 1.0

All 8,100 sums are there once, 256 of them held out. configs/smollm2_sums.py trains on them.
"""

import itertools
import random
import re

NUMBERS = range(10, 100)
NUM_HELD_OUT = 256


def rows(split):
    """Return the questions and answers of a split, in the same random order on every machine."""
    sums = [
        {"question": f"Reply with the number only. What is {a} + {b}?", "answer": str(a + b)}
        for a, b in itertools.product(NUMBERS, NUMBERS)
    ]
    random.Random(0).shuffle(sums)
    return sums[:NUM_HELD_OUT] if split == "test" else sums[NUM_HELD_OUT:]


def last_number(completions, answer, **columns):
    """Reward 1 if the last number of a completion is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers_in_text[-1:] == [right]) for numbers_in_text, right in zip(numbers, answer, strict=True)]
