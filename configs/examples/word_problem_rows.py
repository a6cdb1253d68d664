"""Arithmetic word problems, and a model of 64 M parameters that learns them from nothing on one GPU.

    --data.path configs/examples/word_problem_rows.py:word_problems
    --model.path configs/examples/word_problem_rows.py:model

"Mia has 37 pens. She buys 4 boxes with 12 pens each. She gives 18 pens to Tom. How many pens does Mia have now?" comes
with the completion "<think>4*12=48. 37+48=85. 85-18=67.</think><answer>67</answer>".
"""

import math
import random
import zlib
from dataclasses import dataclass

from configs.examples.toys import make_model, trained_tokenizer

NUM_ROWS = {"train": 40_000, "test": 1_000}
# By what differs from the toys' model: 64 M parameters
MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}

LARGEST = 999
WOMEN = "Ada Anna Bea Clara Dana Ella Emma Eva Grace Ida Iris Jane Lea Lena Lily Mia Nina Nora Olga Rosa Sara"
MEN = "Adam Ben Carl Dan Emil Finn Fred Hugo Ivan Jack Jan Karl Leo Luis Max Nick Noah Omar Otto Paul Tom"
THINGS = (
    "apples pears plums lemons cookies muffins candies nuts eggs shells stones coins stamps cards stickers marbles "
    "pencils pens books notebooks ribbons buttons beads bricks tiles balls kites badges keys bottles flowers leaves"
)
HOLDERS = "boxes bags baskets packs jars trays crates bundles"


@dataclass(frozen=True)
class Kind:
    """What can happen to the number of things: a sign, the range of each factor behind it, and sentences.

    In a sentence {n} is a number, {k} how many {holders} of {n}, or how many times.
    """

    sign: str
    ranges: list[tuple[int, int]]
    sentences: tuple[str, ...]


KINDS = (
    Kind(
        "+",
        [(2, 99)],
        (
            "{She} buys {n} more {things}.",
            "{She} finds {n} {things}.",
            "{friend} gives {her} {n} {things}.",
            "{She} gets {n} {things} as a present.",
            "Then {n} more {things} arrive.",
        ),
    ),
    Kind(
        "-",
        [(2, 99)],
        (
            "{She} gives {n} {things} to {friend}.",
            "{She} loses {n} {things}.",
            "{She} sells {n} of the {things}.",
            "{friend} borrows {n} {things}.",
            "Then {n} {things} break.",
        ),
    ),
    Kind(
        "+",
        [(2, 9), (2, 12)],
        ("{She} buys {k} {holders} with {n} {things} each.", "{friend} brings {k} {holders} of {n} {things}."),
    ),
    Kind(
        "-",
        [(2, 9), (2, 12)],
        (
            "{She} fills {k} {holders} with {n} {things} each and sells them.",
            "{She} gives away {k} {holders} of {n} {things}.",
        ),
    ),
    Kind(
        "*",
        [(2, 4)],
        (
            "Then the number of {things} grows to {k} times as many.",
            "After a year {she} has {k} times as many {things}.",
        ),
    ),
)


def word_problems(split: str) -> list[dict[str, str]]:
    """Draw problems with different questions; 37+4*12-18 is in one split, whatever is counted."""
    draw = random.Random(f"word_problems/{split}")
    rows: dict[str, dict[str, str]] = {}  # a dict, because a set has no fixed order
    while len(rows) < NUM_ROWS[split]:
        calculation, row = word_problem(draw)
        # a checksum rather than a modulus of the numbers, which would hold out certain last digits
        is_held_out = zlib.crc32(calculation.encode()) % 10 == 0
        if is_held_out == (split == "test"):
            rows[row["question"]] = row
    return list(rows.values())


def word_problem(draw: random.Random) -> tuple[str, dict[str, str]]:
    """Draw a calculation such as "37+4*12-18", and write its row."""
    is_woman = draw.random() < 0.5
    if is_woman:
        words = {"She": "She", "she": "she", "her": "her"}
        people, friends = WOMEN, MEN  # so that nobody gives something to themselves
    else:
        words = {"She": "He", "she": "he", "her": "him"}
        people, friends = MEN, WOMEN
    person = draw.choice(people.split())
    words["things"] = draw.choice(THINGS.split())
    words["holders"] = draw.choice(HOLDERS.split())
    total = draw.randint(5, 99)
    calculation = str(total)
    thoughts = []
    sentences = [f"{person} has {total} {words['things']}."]
    for _ in range(draw.randint(2, 4)):
        kind, factors, new_total = draw_change(draw, total)
        number = math.prod(factors)
        if len(factors) == 2:
            thoughts.append(f"{factors[0]}*{factors[1]}={number}.")
        thoughts.append(f"{total}{kind.sign}{number}={new_total}.")
        calculation += kind.sign + "*".join(map(str, factors))
        total = new_total
        friend = draw.choice(friends.split())
        sentence = draw.choice(kind.sentences)
        sentences.append(sentence.format(**words, k=factors[0], n=factors[-1], friend=friend))
    sentences.append(f"How many {words['things']} does {person} have now?")
    completion = f"<think>{' '.join(thoughts)}</think><answer>{total}</answer>"
    return calculation, {"question": " ".join(sentences), "answer": str(total), "completion": completion}


def draw_change(draw: random.Random, total: int) -> tuple[Kind, list[int], int]:
    """Draw what happens, the factors behind its sign, and the 1 to LARGEST things that are left."""
    while True:
        kind = draw.choice(KINDS)
        factors = [draw.randint(low, high) for low, high in kind.ranges]
        number = math.prod(factors)
        new_total = {"+": total + number, "-": total - number, "*": total * number}[kind.sign]
        if 1 <= new_total <= LARGEST:
            return kind, factors, new_total


def tokenizer():
    """Train 640 tokens: each word of the task is one, and each digit."""
    texts = [f"{row['question']}\n{row['completion']}" for row in word_problems("test")]
    return trained_tokenizer(texts, vocab_size=640, digits_apart=True)


def model(folder: str, texts, seed: int) -> None:
    """Write a model of 64 M parameters and 512 positions, with random weights."""
    make_model(folder, tokenizer(), seed, MODEL)
