"""Generated word problems in arithmetic: a task for a model of tens of millions of parameters, trained from nothing.

A person has some things; two to four sentences add, take away or multiply; the question is how many there are then:

    Mia has 37 pens. She buys 4 boxes with 12 pens each. She gives 18 pens to Tom. How many pens does Mia have now?
    <think>4*12=48. 37+48=85. 85-18=67.</think><answer>67</answer>

A completion follows from its problem, word for word, so the loss of a supervised start tells how much is left to learn:
what is not certain is arithmetic. Everything is standard library; toy.py makes tokenizer and model.
"""

import random
import zlib

ROWS = {"train": 40_000, "test": 1_000}
LARGEST = 999

WOMEN = "Ada Anna Bea Clara Dana Ella Emma Eva Grace Ida Iris Jane Lea Lena Lily Mia Nina Nora Olga Rosa Sara"
MEN = "Adam Ben Carl Dan Emil Finn Fred Hugo Ivan Jack Jan Karl Leo Luis Max Nick Noah Omar Otto Paul Tom"
THINGS = (
    "apples pears plums lemons cookies muffins candies nuts eggs shells stones coins stamps cards stickers marbles "
    "pencils pens books notebooks ribbons buttons beads bricks tiles balls kites badges keys bottles flowers leaves"
)
HOLDERS = "boxes bags baskets packs jars trays crates bundles"

# Sentences by what they do to the number of things; {n} a number, {k} how many {holders} of {n}, or how many times
ADD = (
    "{She} buys {n} more {things}.",
    "{She} finds {n} {things}.",
    "{friend} gives {her} {n} {things}.",
    "{She} gets {n} {things} as a present.",
    "Then {n} more {things} arrive.",
)
TAKE_AWAY = (
    "{She} gives {n} {things} to {friend}.",
    "{She} loses {n} {things}.",
    "{She} sells {n} of the {things}.",
    "{friend} borrows {n} {things}.",
    "Then {n} {things} break.",
)
ADD_HOLDERS = (
    "{She} buys {k} {holders} with {n} {things} each.",
    "{friend} brings {k} {holders} of {n} {things}.",
)
TAKE_HOLDERS = (
    "{She} fills {k} {holders} with {n} {things} each and sells them.",
    "{She} gives away {k} {holders} of {n} {things}.",
)
MULTIPLY = (
    "Then the number of {things} grows to {k} times as many.",
    "After a year {she} has {k} times as many {things}.",
)
KINDS = ((ADD, "+"), (TAKE_AWAY, "-"), (ADD_HOLDERS, "+"), (TAKE_HOLDERS, "-"), (MULTIPLY, "*"))


def rows(split: str) -> list[dict[str, str]]:
    """`question`, `answer` and a worked `completion` of each problem of "train" or "test"; always the same ones.

    All questions of a split differ. The splits share no calculation: 37+4*12-18 is in one of them, whatever is counted.
    """
    draw = random.Random(f"word_problems/{split}")
    found: dict[str, dict[str, str]] = {}  # a dict, because a set has no fixed order
    while len(found) < ROWS[split]:
        calculation, row = _problem(draw)
        if (zlib.crc32(calculation.encode()) % 10 == 0) == (split == "test"):
            found[row["question"]] = row
    return list(found.values())


def _problem(draw: random.Random) -> tuple[str, dict[str, str]]:
    """A calculation such as "37+4*12-18", which names it, and its row."""
    is_woman = draw.random() < 0.5
    person = draw.choice((WOMEN if is_woman else MEN).split())
    words = {"She": "She", "she": "she", "her": "her"} if is_woman else {"She": "He", "she": "he", "her": "him"}
    words |= {"things": draw.choice(THINGS.split()), "holders": draw.choice(HOLDERS.split())}
    total = draw.randint(5, 99)
    calculation, thoughts = str(total), []
    sentences = [f"{person} has {total} {words['things']}."]
    for _ in range(draw.randint(2, 4)):
        templates, sign, factors = _step(draw, total)
        number = factors[0] * factors[1] if len(factors) == 2 else factors[0]
        if len(factors) == 2:
            thoughts.append(f"{factors[0]}*{factors[1]}={number}.")
        result = {"+": total + number, "-": total - number, "*": total * number}[sign]
        thoughts.append(f"{total}{sign}{number}={result}.")
        calculation += sign + "*".join(map(str, factors))
        total = result
        friend = draw.choice((MEN if is_woman else WOMEN).split())  # so that nobody gives something to themselves
        numbers = {"k": factors[0], "n": factors[-1], "friend": friend}
        sentences.append(draw.choice(templates).format(**words, **numbers))
    sentences.append(f"How many {words['things']} does {person} have now?")
    completion = f"<think>{' '.join(thoughts)}</think><answer>{total}</answer>"
    return calculation, {"question": " ".join(sentences), "answer": str(total), "completion": completion}


def _step(draw: random.Random, total: int) -> tuple[tuple[str, ...], str, list[int]]:
    """Sentences to choose from, a sign and what stands behind it, so that 1 to LARGEST things are left."""
    while True:
        templates, sign = draw.choice(KINDS)
        if templates is MULTIPLY:
            factors, result = [k := draw.randint(2, 4)], total * k
        elif templates in (ADD, TAKE_AWAY):
            factors = [n := draw.randint(2, 99)]
            result = total + n if sign == "+" else total - n
        else:
            factors = [k, n] = [draw.randint(2, 9), draw.randint(2, 12)]
            result = total + k * n if sign == "+" else total - k * n
        if 1 <= result <= LARGEST:
            return templates, sign, factors
