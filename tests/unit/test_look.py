"""`python -m grpo.look`: the rollouts of a step, in the order asked for, on a terminal that they cannot act on."""

import json
import math
import pathlib
import re

import pytest

from grpo.config import GRPOConfig
from grpo.config.recipes import written_fields
from grpo.tools.describe import describe
from grpo.tools.look import main
from grpo.watch.failures import BadInput
from tests import write_lines


def record(step: int, reward: float | None, prompt: str = "1+1=", completion: str = "2", **more) -> dict:
    values = {"rewards": {"math_reward": reward}, "advantage": 0.5, "mismatch": None, "finish_reason": "stop"}
    values |= {"num_tokens": 2, "failures": {}, "row": 7, "columns": {"answer": 3}}
    return {"step": step, "prompt": prompt, "completion": completion, "reward": reward, **values, **more}


@pytest.fixture
def run_dir(tmp_path):
    records = [record(1, 0.0), record(11, 0.25, "a"), record(11, None, "b")]
    write_lines(tmp_path / "completions.jsonl", [*records, record(11, 1.0, "ab\x1b[2J"), record(11, 0)])
    with open(tmp_path / "completions.jsonl", "a") as file:
        file.write('{"step": 21, "pro')  # the run is writing
    failed = record(10, 1.0, kind="greedy", failures={"math_reward": "took longer\nthan 10 s"})
    write_lines(tmp_path / "evaluation.jsonl", [failed])
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0}])
    return tmp_path


@pytest.fixture
def shown(run_dir, capsys):
    """What the command prints of the run."""

    def show(flags: str = "") -> str:
        main([str(run_dir), *flags.split()])
        return capsys.readouterr().out

    return show


REFUSED = {
    "--step 2": "step 2; there are: 1, 11",
    "--step last": "step last; there are: 1, 11",
    "--step 11 --prompt z": "no prompt of the step has the text 'z'",
    "another --worst": "rollouts are shown of one run",
    "--html --worst": "leave out --num, --worst",
}


def test_a_step_or_the_latest_is_shown_sorted_by_reward_and_without_one_last(run_dir, shown):
    assert "after step 1: 1 of 1 completions" in shown("--step 1")
    assert "after step 11: 4 of 4 completions" in shown("--step latest")
    for flags, rewards in {
        "--step 11": ["1", "0.25", "0", "none"],
        "--step 11 --worst --num 3": ["none", "0", "0.25"],
        "--num -1": ["1", "0.25", "0", "none"],
        "--step 11 --prompt a": ["1", "0.25"],
    }.items():
        assert re.findall(r"^--- reward (\S+)", shown(flags), re.MULTILINE) == rewards
    for flags, message in REFUSED.items():
        with pytest.raises(BadInput, match=message):
            shown(flags)
    with pytest.raises(BadInput, match="nowhere/completions.jsonl does not exist.*samples_interval"):
        main([str(run_dir / "nowhere"), "--step", "1"])


def test_what_is_printed(shown):
    out = shown("--num 1")
    assert "after step 11: 1 of 4 completions, highest reward first" in out
    numbers = "--- reward 1 | math_reward 1 | advantage 0.5 | mismatch none | row 7 | 2 tokens, finish reason stop"
    assert f"{numbers}\nprompt: ab\\x1b[2J\nanswer: 3\ncompletion: 2\n" in out
    assert "\x1b" not in out
    out = shown("--evaluation")
    assert "after step 10" in out and "| row 7 | kind greedy" in out
    assert "math_reward failed: took longer than 10 s\n" in out


def test_a_column_of_one_word_is_shown_though_the_prompt_has_it_by_chance():
    columns = {"answer": "40", "question": "26 plus 14?", "tolerance": "2"}  # the question has the 2 of 26
    shown = describe(record(1, 1.0, "What is 26 plus 14?", columns=columns))
    assert "\nanswer: 40\ntolerance: 2\ncompletion: " in shown


def write_run(run_dir: pathlib.Path, rewards: list[float], more: dict[str, float], **changes: object) -> str:
    run_dir.mkdir()
    records = [{"step": n, "reward/mean": reward, "time/step": 30.0, **more} for n, reward in enumerate(rewards)]
    write_lines(run_dir / "metrics.jsonl", records)
    fields = written_fields(GRPOConfig()) | {"run_dir": f"'{run_dir}'"} | changes
    (run_dir / "run.json").write_text(json.dumps({"script": "train_grpo.py", "config": fields}))
    return str(run_dir)


def test_runs_are_compared_in_one_table(tmp_path, capsys):
    """Fields of the configs that differ are named. What others wrote into a run.json acts on no terminal."""
    hostile = {"algorithm.loss": "'dapo'\x1b]0;owned\x07\nsteps  9", "data.system_prompt": "a" * 50 + "1" + "b" * 50}
    parts = {"reward/right": 0.25, "reward/brief": 0.75}
    first = write_run(tmp_path / "long", [step / 10 for step in range(11)], {"kl": 0.5, **parts})
    second = write_run(tmp_path / "short", [1 - step / 10 for step in range(6)], {}, **hostile)
    main([first, second])
    table = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in (re.split(r"  +", line) for line in table.splitlines()[1:])}
    assert rows["reward/mean"] == ["0 to 1, best 1", "1 to 0.5, best 1"]
    assert (rows["steps"], rows["minutes, start-up not counted"]) == (["11", "6"], ["5.5", "3.0"])
    assert rows["kl, mean of the last 10 steps"] == ["0.5", "-"]
    assert rows["reward/right, mean of the last 10 steps"] == ["0.25", "-"]
    assert rows["algorithm.loss"] == ["'grpo'", r"'dapo'\x1b]0;owned\x07 steps 9"]
    assert "data.system_prompt" in rows and "run_dir" not in rows and "seed" not in rows


def test_the_first_held_out_questions_are_shown_with_the_answers_before_and_after(run_dir, shown):
    held_out = [
        record(step, float(step > 0), f"<user> What is 2+{row}? <bot>", answer, row=row, kind=kind)
        | {"columns": {"prompt": ["nested"] if row == 1 else f"What is 2+{row}?", "answer": "2"}}
        for step, answer in ((0, "We add\nthem."), (20, "4"))
        for kind in ("greedy", "sample")
        for row in range(5)
    ]
    write_lines(run_dir / "evaluation.jsonl", held_out)
    out = shown()
    assert re.findall("^held out +(.*)", out, re.MULTILINE) == [
        "What is 2+0?",
        "<user> What is 2+1? <bot>",
        "What is 2+2?",
    ]
    for name, answer, reward in ("before", "We add them.", 0), ("after", "4", 1):
        texts = re.findall(f"^  {name} +(.*)", out, re.MULTILINE)
        assert len(texts) == 3 and all(text.startswith(answer) and f"reward {reward}" in text for text in texts)


def test_methods_are_compared_by_their_means(tmp_path, capsys):
    """A loss may know no clip, and a step without a gradient has no cosine."""
    records = [{"step": 1, "grpo/grad_norm": 2.0, "grpo/clipped": 0.25, "a+b/grad_norm": 1.0, "a+b/cosine": 0.5}]
    records.append({"step": 2, "grpo/grad_norm": 4.0, "a+b/grad_norm": 0.0, "time/step": 3.0})
    write_lines(tmp_path / "metrics.jsonl", records)
    main([str(tmp_path)])
    assert [re.split("  +", line) for line in capsys.readouterr().out.splitlines()] == [
        ["mean", "grpo", "a+b"],
        ["grad_norm", "3", "0.5"],
        ["clipped", "0.25", "-"],
        ["cosine", "-", "0.5"],
    ]


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\n", b"\xff\n", b'{"step": 11}\n', b"3\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"]
)
@pytest.mark.parametrize("flags", [["--step", "latest"], ["--html"]])
def test_a_damaged_line_is_named(run_dir, damage, flags):
    path = run_dir / "completions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    with pytest.raises(BadInput, match="completions.jsonl, line 3: "):
        main([str(run_dir), *flags])


def test_what_is_no_number_is_shown_as_it_is(run_dir, shown):
    write_lines(run_dir / "completions.jsonl", [record(12, reward) for reward in (math.nan, "high", 0.5)])
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": math.nan}])
    assert re.findall(r"^--- reward (\S+)", shown("--step 12"), re.MULTILINE) == ["0.5", "NaN", "high"]
    assert re.search("reward/mean +0.5 to 0.5", shown())


def test_a_page_is_not_written_through_a_link(run_dir, tmp_path_factory):
    """Whoever can write into the folder cannot have a file of the reader's replaced."""
    own = tmp_path_factory.mktemp("own") / "thesis.tex"
    own.write_text("mine")
    for name in ("look.html", "look.html.tmp"):
        (run_dir / name).symlink_to(own)
    main([str(run_dir), "--html"])
    assert own.read_text() == "mine"
    assert "piece-0" in (run_dir / "look.html").read_text() and not (run_dir / "look.html").is_symlink()
