"""The rows of the preflight table, with real small folders and reward processes."""

import json
import pathlib

import pytest

from grpo import preflight
from grpo.preflight import Report, check_bandwidths, main
from grpo.roles.bandwidth import Bandwidth
from grpo.run.machine import Row

ROOT = pathlib.Path(__file__).parents[2]
TOY, TOY_SFT = (str(ROOT / "configs" / name) for name in ("toy_arithmetic.py", "toy_sft.py"))


@pytest.fixture
def rows_of(monkeypatch, tmp_path):
    """Call the command; its exit code, and its rows by the name of their check."""
    monkeypatch.delenv("RANK", raising=False)
    shown: list[Row] = []
    monkeypatch.setattr(preflight, "show", lambda rows, seconds: shown.extend(rows))

    def call(recipe: str, *flags: object) -> tuple[int, dict[str, Row]]:
        shown.clear()
        code = main([recipe, "--run-dir", str(tmp_path / "run"), *map(str, flags)])
        return code, {row.check: row for row in shown}

    return call


def lines_of(tmp_path: pathlib.Path, name: str, rows: list[dict]) -> pathlib.Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def additions(tmp_path) -> pathlib.Path:
    """Few rows, because those of the toy task take seconds."""
    row = {"question": "1+1", "answer": "2", "completion": "<answer>2</answer>", "tests": "assert f() == 2"}
    return lines_of(tmp_path, "additions.jsonl", [row] * 64)


def test_a_grpo_recipe_that_will_run(rows_of, tmp_path, additions):
    flags = ("--data.path", additions, "--data.columns", "tests", "tests", "--evaluation.path", additions)
    flags += ("--reward.functions", "math_reward", 1, "code_reward", 1, "--reward.allow-without-landlock")
    code, rows = rows_of(TOY, "--model.path", "toy:addition", *flags)
    assert code == 0 and {row.status for row in rows.values()} == {"ok"}
    assert rows["data"].found == f"{additions}:train: 64 rows, 64 usable"
    assert rows["dry reward call"].found.startswith("'This is no answer.' earns math_reward 0.0, code_reward 0.0 (")
    assert rows["ranks"].found.startswith("2 trainer + 1 reference + 1 generator; without torchrun")
    assert rows["programs"].found.startswith("programs run with: no network")
    assert {"versions", "GPUs", "memory", "disk", "loss", "reward functions", "prompts", "held-out prompts"} <= set(
        rows
    )
    assert not (tmp_path / "run").exists()


def test_every_problem_of_a_grpo_recipe_is_told_at_once(rows_of, tmp_path):
    data = lines_of(tmp_path, "rows.jsonl", [{"question": "1+1", "solution": "2"}] * 4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    (tmp_path / "loss.py").write_text("def loss(inputs):\n    return inputs.logprobs.sum(), {}\n")
    (tmp_path / "reward.py").write_text("def reward(completion):\n    return 1 +\n")
    flags = ("--model.path", tmp_path / "no_model", "--data.path", data, "--algorithm.loss", f"{tmp_path}/loss.py:loss")
    code, rows = rows_of(TOY, *flags, "--reward.functions", f"{tmp_path}/reward.py:reward", 1.0)
    assert code == 1
    problems = {name for name, row in rows.items() if row.status == "problem"}
    assert problems == {"run folder", "data", "model, tokenizer", "loss", "reward functions"}
    assert "no_model does not exist" in rows["model, tokenizer"].found
    assert "answer" in rows["data"].found and "mine.txt" in rows["run folder"].found
    assert rows["reward functions"].found.endswith("reward.py, line 2: SyntaxError: invalid syntax")
    assert rows["run folder"].to_do.startswith("nothing is written there: choose another --run-dir")
    unknown = {name for name, row in rows.items() if row.status == "not checked"}
    assert unknown == {"memory, disk", "prompts", "held-out prompts", "reward processes", "dry reward call"}


def test_a_reward_that_fails_is_seen_in_the_dry_call(rows_of, tmp_path, additions):
    reward = tmp_path / "my_reward.py"
    reward.write_text("def reward(completion, **columns):\n    raise KeyError('no such thing')\n")
    flags = ("--model.path", "toy:addition", "--evaluation.interval", 0, "--data.path", additions)
    code, rows = rows_of(TOY, *flags, "--reward.functions", f"{reward}:reward", 1.0)
    assert code == 1 and [name for name, row in rows.items() if row.status != "ok"] == ["dry reward call"]
    row = rows["dry reward call"]
    assert row.found == f"{reward}:reward: KeyError: 'no such thing' ({reward}:2)" and "grpo.check_reward" in row.to_do


def test_an_sft_recipe_with_validation_and_evaluation(rows_of, tmp_path, additions):
    lengths = ("--data.max-prompt-tokens", 16, "--generator.max-completion-tokens", 32)
    sets = ("--data.path", additions, "--evaluation.path", additions, "--validation.path", additions)
    intervals = ("--evaluation.interval", 10, "--validation.interval", 10)
    code, rows = rows_of(TOY_SFT, *lengths, *sets, *intervals)
    assert code == 0 and {row.status for row in rows.values()} == {"ok"}
    assert {"examples", "validation", "evaluation", "dry reward call", "disk"} <= set(rows)
    code, rows = rows_of(TOY_SFT, "--data.path", additions, "--max-sequence-tokens", 4)
    assert code == 1 and rows["examples"].status == "problem" and "max_sequence_tokens=4" in rows["examples"].found


def test_layout_that_is_not_torchruns(rows_of, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(preflight, "check_inputs", lambda *arguments: None)
    code, rows = rows_of(TOY, "--model.path", "toy:addition")
    assert code == 1 and rows["ranks"].status == "problem"
    assert "needs 4 processes" in rows["ranks"].found and "--nproc_per_node=4" in rows["ranks"].to_do


def test_bandwidth_is_that_of_a_ring_and_slow_gpus_are_a_problem():
    """A ring of 4 moves 2 x 3 / 4 of 1 GiB in 0.5 s: 3 GiB/s. The slowest rank of a kind counts."""
    fast = Bandwidth("trainer ranks", 4, "cuda", 2**30, 0.5)
    assert fast.gib_per_second == 3.0
    slow = Bandwidth("trainer ranks", 4, "cuda", 2**30, 3.0)
    (row,) = check_bandwidths([fast, slow, fast])
    assert (row.status, row.check) == ("problem", "bandwidth, trainer ranks") and row.found.startswith("0.50 GiB/s")
    assert "NCCL_SOCKET_IFNAME" in row.to_do
    on_cpu = Bandwidth("control", 4, "cpu", 2**30, 3.0)
    assert [row.status for row in check_bandwidths([fast, on_cpu])] == ["ok", "ok"]


def test_what_an_error_says_becomes_what_to_do():
    def refuse():
        raise ValueError("5 ranks; 4 would do; use --nproc_per_node=4")

    report = Report()
    assert report.check("ranks", refuse) is None and report.check("next", lambda ranks: 1, None) is None
    assert report.check("printed", lambda: print("seen\n") or 3) == 3
    assert report.rows == [
        Row("ranks", "problem", "5 ranks; 4 would do", "use --nproc_per_node=4"),
        Row("next", "not checked", "", "solve the problem above first"),
        Row("printed", "ok", "seen"),
    ]
