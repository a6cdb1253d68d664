"""Tasks of reasoning-gym as rows, and their verifiers as a reward: `pip install reasoning-gym`.

    --data.path configs/examples/reasoning_gym_rows.py:chain_sum --data.answer-column "" --data.columns entry entry
    --reward.functions configs/examples/reasoning_gym_rows.py:verified 1.0

Another of its hundred tasks is another function like `chain_sum`. No question of the training split is held out too.
configs/qwen2_5_coder_0_5b_reasoning_gym.py learns these three.
"""

import json

import reasoning_gym
from reasoning_gym.utils import extract_answer

NUM_TRAIN = 2000
NUM_TEST = 200


def chain_sum(split: str) -> list[dict[str, str]]:
    return rows("chain_sum", split, max_terms=3)


def basic_arithmetic(split: str) -> list[dict[str, str]]:
    return rows("basic_arithmetic", split)


def simple_equations(split: str) -> list[dict[str, str]]:
    return rows("simple_equations", split)


def rows(task: str, split: str, **options) -> list[dict[str, str]]:
    """Draw a task's questions; `entry` is what its verifier needs, as JSON text."""
    # one data set, cut in two: those of seeds 0 and 1 have all rows but one in common
    entries = reasoning_gym.create_dataset(task, seed=0, size=NUM_TRAIN + NUM_TEST, **options)
    distinct = list({entry["question"]: entry for entry in entries}.values())
    parts = {"train": distinct[:-NUM_TEST], "test": distinct[-NUM_TEST:]}
    return [{"question": entry["question"], "entry": json.dumps(entry, default=str)} for entry in parts[split]]


def verified(completions: list[str], entry: list[str], **columns: list) -> list[float]:
    """Ask the task's verifier about the text in the last <answer> tag: 1 for full marks, 0 for anything less.

    Many verifiers give a part to a text that holds the right answer, such as 0.75 to -367 for 367. A policy would learn
    to write such texts. Held-out accuracy counts full marks in any case (`reward.pass_value`).
    """
    scores = []
    for completion, text in zip(completions, entry, strict=True):
        row = json.loads(text)
        verify = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
        marks = verify(extract_answer(completion), row)
        scores.append(float(marks == 1))
    return scores
