"""Seconds that math_reward takes for 1024 completions like GSM8K's, of one checkout or of several in turns.

    python tests/bench/math_reward.py [CHECKOUT ...] [--rounds 7]

Prints for each checkout (by default this one) median, lowest and highest: CPU seconds in one process, of answers in
tags and of boxed integers. What worker processes add is reward_pool.py's.
"""

import random
import time

from in_turns import in_turns

NUM_COMPLETIONS = 1024


def completions(opening: str, closing: str) -> tuple[list[str], list[str]]:
    """Write texts of 0.2 to 2 kB and their references: right, wrong, with units and prices, some without an answer."""
    draw = random.Random(0)
    texts = []
    references = []
    for i in range(NUM_COMPLETIONS):
        a, b = draw.randrange(2, 400), draw.randrange(2, 90)
        step = f"She sells {a} boxes at ${b} each, so {a} * {b} = {a * b}. "
        number = [f"{a * b}", f"${a * b:,}", f"{a * b} dollars", f"{a * b + 1}", f"{a * b}.0", f"{a}/{b}"][i % 6]
        answer = f"{opening}{a * b if opening != '<answer>' else number}{closing}"
        texts.append(f"<think>{step * draw.randrange(3, 30)}</think>" + (answer if i % 8 else "I cannot say."))
        references.append(f"{step}\n#### {a * b:,}")
    return texts, references


def measure() -> dict[str, float]:
    """Measure the checkout that comes first on the path; seconds."""
    from grpo.rewards.builtin import math_reward

    seconds = {}
    for name, opening, closing in (("answer_tag", "<answer>", "</answer>"), ("boxed", "\\boxed{", "}")):
        texts, references = completions(opening, closing)
        math_reward(texts[:8], references[:8], answer_format=name)  # what is loaded or compiled once
        start = time.process_time()
        for text, reference in zip(texts, references, strict=True):
            math_reward([text], [reference], answer_format=name)
        seconds[name] = time.process_time() - start
    return seconds


if __name__ == "__main__":
    in_turns(measure, __file__, __doc__, rounds=7)
