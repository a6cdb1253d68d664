"""Every line of docs/tutorial.md, with SmolLM2: each file is saved, each command run, and its output is the page's.

Numbers may differ from the page's. SMOLLM2 names the model's folder, if it is not in runs/smollm2-135m.
"""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODEL = pathlib.Path(os.environ.get("SMOLLM2", ROOT / "runs/smollm2-135m"))
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$|^    (?P<command>[^\n]*)$", re.MULTILINE | re.DOTALL)
SET_UP = ("bash launch/setup.sh", "source .venv/bin/activate", "export OMP_NUM_THREADS=2")


def pattern_of(line: str) -> str:
    """A regular expression for a line of the page: any numbers and blanks, and any text for `[...]`."""
    parts = [re.sub(r"\d+(\\\.\d+)?", r"[\\d.e-]+", re.escape(part)) for part in line.split("[...]")]
    return ".*".join(re.sub(r"(\\ )+", r"\\s+", part) for part in parts)


def assert_shown(page: str, output: str):
    """The lines of the page are in the output, in the page's order."""
    place = 0
    for line in page.splitlines():
        found = re.compile(pattern_of(line.strip())).search(output, place)
        assert found, f"{line}\n--- is not in\n{output[place:]}"
        place = found.end()


@pytest.mark.slow
@pytest.mark.timeout(7200)  # an hour and more on cores that others use too
@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="SmolLM2 is absent: set SMOLLM2 to its folder")
def test_every_line_of_the_tutorial(tmp_path):
    for name in ("configs", "grpo", "launch", "train_grpo.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("runs", "my_task"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs/smollm2-135m").symlink_to(MODEL.absolute())

    page = (ROOT / "docs/tutorial.md").read_text()
    output = ""
    before = 0
    for block in BLOCK.finditer(page):
        said = page[before : block.start()]
        before = block.end()
        if block["language"] == "python":
            (file,) = re.findall(r"`(my_task/\w+\.py)`:\s*$", said)
            (tmp_path / file).write_text(block["text"])
        elif block["command"] is None:
            assert_shown(block["text"], output)
        elif block["command"] not in SET_UP:
            print(block["command"], flush=True)
            command = ["bash", "-c", block["command"]]
            variables = {**os.environ, "OMP_NUM_THREADS": "2"}
            done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
            output = done.stdout + done.stderr
            assert done.returncode == 0, output
