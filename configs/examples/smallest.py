"""The smallest of three numbers: rows of your own, and a reward of your own, in one file.

    --data.path configs/examples/smallest.py:rows --reward.functions configs/examples/smallest.py:last_number 1.0

configs/smollm2_smallest.py trains on them.
"""

import random
import re

NUMBERS = range(10, 100)
NUM_HELD_OUT = 256
NUM_ROWS = 6_000


def rows(split):
    """Return the questions and answers of a split, the same on every machine. No three numbers are in both splits."""
    draw = random.Random(0)
    questions = {}
    while len(questions) < NUM_ROWS:
        a, b, c = draw.sample(NUMBERS, 3)
        question = f"Reply with the number only. Which is the smallest, {a}, {b} or {c}?"
        questions.setdefault(frozenset((a, b, c)), {"question": question, "answer": str(min(a, b, c))})
    examples = list(questions.values())
    return examples[:NUM_HELD_OUT] if split == "test" else examples[NUM_HELD_OUT:]


def last_number(completions, answer, **columns):
    """Reward 1 if the last number of a completion is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(numbers_in_text[-1:] == [right]) for numbers_in_text, right in zip(numbers, answer, strict=True)]
