"""Sums of two numbers with two digits each: rows of your own, and a reward of your own, in one file.

    python -m configs.examples.sums FOLDER        # writes FOLDER/train.jsonl and FOLDER/test.jsonl

All 8,100 sums are there once, 256 of them held out. configs/smollm2_sums.py trains on them.
"""

import itertools
import json
import pathlib
import random
import re
import sys

NUMBERS = range(10, 100)
NUM_HELD_OUT = 256


def last_number(completions, answer, **columns):
    """Reward 1 if the last number of a completion is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def write_rows(folder: pathlib.Path) -> None:
    """Write the questions and answers of both files, in the same random order on every machine."""
    rows = [
        {"question": f"Reply with the number only. What is {a} + {b}?", "answer": str(a + b)}
        for a, b in itertools.product(NUMBERS, NUMBERS)
    ]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"test": rows[:NUM_HELD_OUT], "train": rows[NUM_HELD_OUT:]}
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    print(f"{len(parts['train'])} rows to train on and {NUM_HELD_OUT} held out in {folder}")


if __name__ == "__main__":
    write_rows(pathlib.Path(sys.argv[1]))
