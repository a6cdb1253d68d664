"""Rows of which three in four are hopeless: 768 products, which the toy's policy never solves, and 256 additions.

--data.path tests/bench/hopeless.py:rows --evaluation.path configs/examples/toys.py:addition:test
"""

import random

from configs.examples.toys import addition

NUM_ADDITIONS = 256
NUM_PRODUCTS = 768


def rows(split):
    """Return the same rows on every machine; the split is not read, because only additions are held out."""
    draw = random.Random(0)
    pairs = [(draw.randrange(100, 1000), draw.randrange(100, 1000)) for _ in range(NUM_PRODUCTS)]
    products = [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
    additions = [{"question": row["question"], "answer": row["answer"]} for row in addition("train")[:NUM_ADDITIONS]]
    return additions + products
