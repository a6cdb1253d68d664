"""Several sources and held-out sets in one run; the rates at which rows were passed decide what comes next."""

import pathlib

from configs.examples import toys
from grpo.folder.checkpoint import check_checkpoint
from tests import write_lines
from tests.e2e.conftest import BY_CHANCE
from tests.e2e.runs import ONE_RANK, read_completions, read_metrics, run_tiny

REWARD = """
def trl(prompts, completions, answer, *, answer_format, **columns):
    assert isinstance(prompts[0], list) == (columns["kind"][0] == "chat")
    text = prompts[0] if isinstance(prompts[0], str) else prompts[0][-1]["content"]
    a, b = map(int, text.split("+"))
    assert int(answer[0]) == a + b
    return [columns["step"][0] + len(completions[0]) / 100]
"""


def write_sources(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """12 additions as JSON lines with messages and nested answers; 6 as CSV; both in the columns of the first."""
    rows = toys.addition("train")
    chats = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "truth": {"value": row["answer"]},
            "kind": "chat",
        }
        for row in rows[:12]
    ]
    write_lines(folder / "chats.jsonl", chats)
    lines = ["prompt,truth.value,kind", *(f"{row['question']},{row['answer']},text" for row in rows[12:18])]
    (folder / "texts.csv").write_text("\n".join(lines))
    (folder / "mine.py").write_text(REWARD)
    return folder / "chats.jsonl", folder / "texts.csv"


def test_two_sources_and_two_held_out_sets(model, tmp_path):
    chats, texts = write_sources(tmp_path)
    output = run_tiny(
        model,
        tmp_path / "run",
        f"{ONE_RANK} --data.path chats {chats} texts {texts} --data.weights chats 3",
        "--data.prompt-column prompt --data.answer-column truth.value --data.columns kind kind",
        f"--evaluation.path first {chats}:train[:4] texts {texts}:train --evaluation.interval 2",
        f"--reward.functions {tmp_path}/mine.py:trl 1",
    )
    assert "data: 12 of 12 rows of chats (" in output and "; tokens " in output
    assert "held out: 4 of 4 rows of first (" in output and "held out: 6 of 6 rows of texts (" in output

    steps = [m for m in read_metrics(tmp_path / "run") if "loss" in m]
    for number, m in enumerate(steps, start=1):
        assert (m["prompt/source/chats"], m["prompt/source/texts"]) == (0.75, 0.25)
        for source in ("chats", "texts"):  # the reward is the step, and less than 1 for the length
            assert number <= m[f"reward/source/{source}"] < number + 1
        assert 0 <= m["completion/has_answer_frac"] <= 1 and m["reward/failed_count"] == 0
    records = read_completions(tmp_path / "run")
    assert {(r["source"], r["row"] < 6) for r in records if r["source"] == "texts"} == {("texts", True)}
    assert [r["source"] for r in records].count("chats") == 2 * 3 * 4  # steps x prompts x completions

    evaluations = [m for m in read_metrics(tmp_path / "run") if "loss" not in m]
    for m in evaluations:  # only from step 1 on is the step at least 1, which passes
        assert m["eval/first/accuracy"] == m["eval/texts/accuracy"] == (m["step"] > 0)
    assert [m["step"] for m in evaluations] == [0, 2]


def test_pass_rates_of_rows_are_remembered_and_decide_what_comes_next(model, tmp_path):
    """6 steps of 4 prompts from 9 rows: those that were not seen, or passed in less than half of the cases."""
    (tmp_path / "mine.py").write_text("def failed_first(seen, step):\n    return float(seen.pass_rate < 0.5)\n")
    rows = "--data.path configs/examples/toys.py:addition:train[:9] --num-steps 6 --checkpoint.interval 6"
    rule = f"--data.curriculum {tmp_path}/mine.py:failed_first --reward.functions {BY_CHANCE} 1"
    run_tiny(model, tmp_path / "run", ONE_RANK, rows, rule)
    known: dict[int, list] = {}
    records = read_completions(tmp_path / "run")
    for step in range(1, 7):
        of_step = [r for r in records if r["step"] == step]
        open_rows = {row for row in range(9) if row not in known or known[row][1] < 0.5}
        rows = {r["row"] for r in of_step}
        assert not open_rows or rows <= open_rows
        for row in rows:
            values = [value for r in of_step if r["row"] == row for value in r["rewards"].values()]
            times = known[row][2] if row in known else 0
            known[row] = [row, sum(values[-4:]) / 4, times + len(values) // 4, step]
    (source,) = check_checkpoint(tmp_path / "run/checkpoints/step-00000006")["data"]["sources"].values()
    assert sorted(source["seen"]) == sorted(known.values())
    assert len({rate for _, rate, _, _ in known.values()}) > 1
