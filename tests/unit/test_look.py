"""`python -m grpo.look`: the rollouts of a step, in the order asked for, on a terminal that they cannot act on."""

import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from grpo.config import GRPOConfig, change
from grpo.config.recipes import written_fields
from grpo.look import main
from grpo.watch.failures import BadInput

ROOT = pathlib.Path(__file__).parents[2]


def record(step: int, reward: float | None, prompt: str = "1+1=", completion: str = "2", **more) -> dict:
    values = {"rewards": {"math_reward": reward}, "advantage": 0.5, "mismatch": None, "finish_reason": "stop"}
    values |= {"num_tokens": 2, "failures": {}, "row": 7, "columns": {"answer": 3}}
    return {"step": step, "prompt": prompt, "completion": completion, "reward": reward, **values, **more}


@pytest.fixture
def run_dir(tmp_path):
    records = [record(1, 0.0), record(11, 0.25, "a"), record(11, None, "b")]
    records += [record(11, 1.0, "ab\x1b[2J"), record(11, 0)]
    text = "".join(json.dumps(r) + "\n" for r in records)
    (tmp_path / "completions.jsonl").write_text(text + '{"step": 21, "pro')  # the run is writing
    held_out = [record(10, 1.0, kind="greedy", failures={"math_reward": "took longer\nthan 10 s"})]
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(held_out[0]) + "\n")
    return tmp_path


def test_the_step_asked_for_and_the_latest(run_dir, capsys):
    for flags, shown in ((["--step", "1"], "step 1: 1 of 1"), (["--step", "latest"], "step 11: 4 of 4")):
        main([str(run_dir), *flags])
        assert f"after {shown} completions" in capsys.readouterr().out
    for step in ("2", "last"):
        with pytest.raises(BadInput, match=f"step {step}; there are: 1, 11"):
            main([str(run_dir), "--step", step])
    with pytest.raises(BadInput, match="nowhere/completions.jsonl does not exist.*samples_interval"):
        main([str(run_dir / "nowhere"), "--step", "1"])


def test_sorted_by_reward_and_without_one_last(run_dir, capsys):
    def rewards(*flags: str) -> list[str]:
        main([str(run_dir), "--step", "11", *flags])
        return re.findall(r"^--- reward (\S+)", capsys.readouterr().out, re.MULTILINE)

    assert rewards() == ["1", "0.25", "0", "none"]
    assert rewards("--worst", "--num", "3") == ["none", "0", "0.25"]
    assert rewards("--prompt", "a") == ["1", "0.25"]
    with pytest.raises(BadInput, match="no prompt of the step has the text 'z'"):
        rewards("--prompt", "z")


def test_what_is_printed(run_dir, capsys):
    main([str(run_dir), "--step", "11", "--num", "1"])
    out = capsys.readouterr().out
    assert "after step 11: 1 of 4 completions, highest reward first" in out
    numbers = "--- reward 1 | math_reward 1 | advantage 0.5 | mismatch none | row 7 | 2 tokens, finish reason stop"
    assert f"{numbers}\nprompt: ab\\x1b[2J\nanswer: 3\ncompletion: 2\n" in out
    assert "\x1b" not in out
    main([str(run_dir), "--evaluation"])
    out = capsys.readouterr().out
    assert "after step 10" in out and "| row 7 | kind greedy" in out
    assert "math_reward failed: took longer than 10 s\n" in out


def write_metrics(run_dir: pathlib.Path, config: GRPOConfig, rewards: dict[int, float], **more: float) -> str:
    run_dir.mkdir()
    records = [{"step": step, "reward/mean": reward, "time/step": 30.0, **more} for step, reward in rewards.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run_dir / "run.json").write_text(json.dumps({"script": "train_grpo.py", "config": written_fields(config)}))
    return str(run_dir)


def test_runs_are_compared_in_one_table_and_one_plot(tmp_path, capsys):
    """Over steps, in the same places, also if one run is shorter; fields of the configs that differ are named."""
    long = change(GRPOConfig(), {"run_dir": "runs/long"})
    short = change(long, {"algorithm.loss": "dapo", "run_dir": "runs/short"})
    rising = {step: step / 10 for step in range(11)}
    first = write_metrics(tmp_path / "long", long, rising, kl=0.5)
    second = write_metrics(tmp_path / "short", short, {step: 1 - step / 10 for step in range(6)})
    main([first, second])
    table, plot = capsys.readouterr().out.split("\n\nmean reward of the sampled completions:\n")
    rows = {row[0]: row[1:] for row in (re.split(r"  +", line) for line in table.splitlines()[1:])}
    assert rows["mean reward of the sampled completions"] == ["0 to 1", "1 to 0.5"]
    assert (rows["steps"], rows["minutes, start-up not counted"]) == (["11", "6"], ["5.5", "3.0"])
    assert rows["kl, mean of the last 10 steps"] == ["0.5", "-"]
    assert rows["algorithm.loss"] == ["'grpo'", "'dapo'"] and "run_dir" not in rows and "seed" not in rows
    chart = [line.partition("┤")[2].ljust(60) for line in plot.splitlines() if "┤" in line]
    assert chart[0].startswith("×") and chart[0].endswith("•") and "•" in chart[-1]
    assert max(line.rfind("×") for line in chart) < 33  # the shorter run ends in the middle
    with pytest.raises(BadInput, match="rollouts are shown of one run"):
        main([first, second, "--worst"])


def test_long_fields_that_differ_in_the_middle_are_named(tmp_path, capsys):
    configs = [change(GRPOConfig(), {"data.system_prompt": f"{'a' * 50}{n}{'b' * 50}"}) for n in (1, 2)]
    main([write_metrics(tmp_path / str(n), config, {1: 0.5}) for n, config in enumerate(configs)])
    assert "\ndata.system_prompt " in capsys.readouterr().out


def test_the_first_held_out_questions_are_shown_with_the_answers_before_and_after(tmp_path, capsys):
    answers = {0: "We add\nthem.", 20: "4"}  # by step
    held_out = [
        record(step, float(step > 0), f"<user> What is 2+{row}? <bot>", answers[step], row=row, kind=kind)
        | {"columns": {"question": f"What is 2+{row}?", "answer": "2"}}
        for step in (0, 20)
        for kind in ("greedy", "sample")
        for row in range(5)
    ]
    asked = {"role": "user", "content": "What is 2+1?"}
    for one in held_out:  # the second prompt is a list of messages
        if one["row"] == 1:
            one["columns"] = {"prompt": [{"role": "system", "content": "<user>"}, asked], "answer": "2"}
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(r) + "\n" for r in held_out))
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "eval/accuracy": 1.0}\n')
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert re.findall("^held out +(.*)", out, re.MULTILINE) == ["What is 2+0?", "What is 2+1?", "What is 2+2?"]
    for name, answer, reward in ("before", "We add them.", 0), ("after", "4", 1):
        texts = re.findall(f"^  {name} +(.*)", out, re.MULTILINE)
        assert len(texts) == 3 and all(text.startswith(answer) and f"reward {reward}" in text for text in texts)


def test_what_others_wrote_cannot_act_on_a_terminal(tmp_path, capsys):
    """A field of run.json, which is shown where two runs differ, and a path that an error shows."""
    config = GRPOConfig()
    runs = [write_metrics(tmp_path / name, config, {1: 0.5, 2: 0.6}) for name in ("a", "b")]
    marker = json.loads((tmp_path / "b/run.json").read_text())
    marker["config"]["algorithm.loss"] = "'grpo'\x1b]0;owned\x07\nsteps  9"
    (tmp_path / "b/run.json").write_text(json.dumps(marker))
    main(runs)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("algorithm.loss")]
    assert line.endswith(r"'grpo'\x1b]0;owned\x07 steps  9".replace("steps  9", "steps 9"))
    done = subprocess.run(
        [sys.executable, "-m", "grpo.look", tmp_path / "\x1b[2J"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\n", b"\xff\n", b'{"step": 11}\n', b"3\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"]
)
@pytest.mark.parametrize("flags", [["--step", "latest"], ["--html"]])
def test_a_damaged_line_is_named(run_dir, damage, flags):
    path = run_dir / "completions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(BadInput, match="completions.jsonl, line 3: "):
        main([str(run_dir), *flags])


def test_what_is_no_number_is_shown_as_it_is(run_dir, capsys):
    lines = [record(12, reward) for reward in (math.nan, "high", 0.5)]
    (run_dir / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": NaN}\n')
    main([str(run_dir), "--step", "12"])
    assert re.findall(r"^--- reward (\S+)", capsys.readouterr().out, re.MULTILINE) == ["0.5", "NaN", "high"]
    main([str(run_dir)])
    assert re.search("mean reward .* 0.5\n", capsys.readouterr().out)


def test_a_page_is_not_written_through_a_link(run_dir, tmp_path_factory):
    """Whoever can write into the folder cannot have a file of the reader's replaced."""
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0}\n')
    own = tmp_path_factory.mktemp("own") / "thesis.tex"
    own.write_text("mine")
    for name in ("look.html", "look.html.tmp"):
        (run_dir / name).symlink_to(own)
    main([str(run_dir), "--html"])
    assert own.read_text() == "mine"
    assert "piece-0" in (run_dir / "look.html").read_text() and not (run_dir / "look.html").is_symlink()
