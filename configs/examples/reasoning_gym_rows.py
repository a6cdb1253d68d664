"""Tasks of reasoning-gym as rows, and their verifiers as a reward: `pip install reasoning-gym`.

    python configs/examples/reasoning_gym_rows.py data/reasoning_gym chain_sum '{"max_terms": 3}' basic_arithmetic

writes data/reasoning_gym/TASK_train.jsonl and TASK_test.jsonl for each task, which may be any of its hundred. JSON
behind a name sets the task's options. The same command writes the same rows, and no question of a train file is in its
test file. configs/qwen2_5_coder_0_5b_reasoning_gym.py learns such rows.
"""

import json
import pathlib
import sys

import reasoning_gym
from reasoning_gym.utils import extract_answer

NUM_TRAIN, NUM_TEST = 2000, 200


def verified(completions: list[str], entry: list[str], **columns: list) -> list[float]:
    """Ask the task's verifier about the text in the last <answer> tag: 1 for right; some give a part for nearly."""
    scores = []
    for completion, text in zip(completions, entry, strict=True):
        row = json.loads(text)
        verify = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
        scores.append(float(verify(extract_answer(completion), row)))
    return scores


def write_rows(folder: pathlib.Path, task: str, options: dict) -> None:
    """Write both files of a task; `entry` is what its verifier needs, as JSON."""
    # one data set, cut in two: those of seeds 0 and 1 have all rows but one in common
    made = reasoning_gym.create_dataset(task, seed=0, size=NUM_TRAIN + NUM_TEST, **options)
    rows = list({row["question"]: row for row in made}.values())
    for split, part in (("train", rows[:-NUM_TEST]), ("test", rows[-NUM_TEST:])):
        lines = [json.dumps({"question": row["question"], "entry": json.dumps(row, default=str)}) for row in part]
        (folder / f"{task}_{split}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    folder, *words = sys.argv[1:]
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for position, word in enumerate(words):
        if word.startswith("{"):
            continue
        following = words[position + 1 : position + 2]
        options = json.loads(following[0]) if following and following[0].startswith("{") else {}
        write_rows(pathlib.Path(folder), word, options)


if __name__ == "__main__":
    main()
