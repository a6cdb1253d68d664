"""CPU seconds of math_reward for 1024 completions: answers in tags behind thoughts like GSM8K's, and boxed integers.

    python tests/bench/answers.py OLD_CHECKOUT NEW_CHECKOUT

loads both checkouts in processes of their own, in turns, and prints the medians and their ratio.
"""

import statistics
import subprocess
import sys

ROUNDS = 7

PROGRAM = """
import random, sys, time
sys.path.insert(0, sys.argv[1])
from grpo.rewards.builtin import math_reward
draw = random.Random(0)
sentence = "Natalia sold {} / 2 = <<{} / 2 = {}>>{} clips in May, and together {} clips. "
tagged, boxed, references = [], [], []
for index in range(1024):
    numbers = [draw.randint(1, 2000) for _ in range(5)]
    if index % 8 == 0:  # groups of 8
        reference = numbers[0]
    number = reference if draw.random() < 0.5 else numbers[0]
    thoughts = "".join(sentence.format(*draw.choices(numbers, k=5)) for _ in range(5))
    answer = draw.choice([str(number)] * 5 + [f"${number:,}", f"{number} clips", f"{number}.50", "unknown"])
    tagged.append(f"<think>{thoughts}</think>\\n<answer>{answer}</answer>")
    boxed.append(f"{thoughts} So \\\\boxed{{{number}}}.")
    references.append(str(reference))
math_reward(["\\\\boxed{x+1}"], ["1+x"], answer_format="boxed")  # loads sympy
for completions, answer_format in ((tagged, "answer_tag"), (boxed, "boxed")):
    start = time.process_time()
    for text, reference in zip(completions, references):  # as a worker calls it
        math_reward([text], [reference], answer_format=answer_format)
    print(time.process_time() - start)
"""


def main() -> None:
    checkouts = sys.argv[1:3]
    seconds: dict[str, list[list[float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(ROUNDS):
        for checkout in checkouts:
            command = [sys.executable, "-c", PROGRAM, checkout]
            output = subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout
            seconds[checkout].append([float(line) for line in output.split()])
    for column, name in enumerate(("answer_tag", "boxed integers")):
        medians = [statistics.median(row[column] for row in rows) for rows in seconds.values()]
        values = ", ".join(f"{median * 1000:.1f} ms" for median in medians)
        print(f"{name}: {values} (ratio {medians[-1] / medians[0]:.2f})")


if __name__ == "__main__":
    main()
