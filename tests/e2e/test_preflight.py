"""`python -m grpo.preflight` under torchrun: the layout's groups are timed, and what is wrong is in one table."""

import re

from tests.torchrun import ROOT, run_torchrun

TOY = ROOT / "configs" / "toy_arithmetic.py"


def test_a_toy_recipe_on_four_ranks(tmp_path):
    """2 trainers + 1 reference + 1 generator: four groups have more than one rank."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n' * 64)
    flags = ("--model.path", "toy:addition", "--data.path", rows, "--evaluation.interval", 0)
    flags += ("--run-dir", tmp_path / "run", "--checkpoint.interval", 10)
    result = run_torchrun("grpo.preflight", TOY, *flags, nproc=4, deadline=150)
    assert result.returncode == 0, result.stdout[-5000:]
    cells = re.sub(r"[│\s]+", " ", result.stdout)
    for group, num_ranks in (("control", 4), ("trainer ranks", 2), ("learners", 3), ("weights", 2)):
        assert re.search(rf"bandwidth, {group} ok [\d.]+ GiB/s among {num_ranks} ranks on cpu", cells), cells
    assert re.search(r"dry reward call ok", cells) and re.search(r"\d+ checks, 0 problems, \d+ s", cells)
    assert not (tmp_path / "run").exists()
