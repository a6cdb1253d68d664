"""`--dry-run`: the run's own checks, verdicts with numbers, and a run folder that stays as it was."""

import json
import pathlib
import re

import pytest
import transformers

import train_grpo
import train_sft
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load
from grpo.watch.failures import BadInput
from tests.unit.models.test_hf_folder import QWEN3_1_7B

CONFIGS = pathlib.Path(__file__).parents[4] / "configs"
TOY = (train_grpo.main, GRPOConfig, "toy_arithmetic.py", "--model.path", "configs/examples/toys.py:addition_model")


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Call a script's main on a few rows; its exit code and what it printed."""
    monkeypatch.delenv("RANK", raising=False)
    row = {"question": "1+1", "answer": "2", "completion": "<answer>2</answer>"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(row) + "\n") * 64)

    def call(main, config_type, recipe: str, *flags: object) -> tuple[int, str]:
        given = ("--data.path", rows, "--evaluation.path", rows, "--run-dir", tmp_path / "run", "--dry-run", *flags)
        config = load(config_type, str(CONFIGS / recipe), [str(CONFIGS / recipe), *map(str, given)])
        with pytest.raises(SystemExit) as end:
            main(config)
        assert not (tmp_path / "run").exists()
        return end.value.code, capsys.readouterr().out

    return call


def rows_of(said: str) -> dict[str, list[str]]:
    """The table by its first column: needs, has, verdict."""
    table = re.split("^what +needs +has +verdict\n", said, flags=re.MULTILINE)[1]
    rows = [re.split("  +", line) for line in table.splitlines() if not line.startswith("    ")]
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def test_a_grpo_recipe_of_four_ranks_for_this_machine_and_for_another_one(dry_run):
    code, said = dry_run(*TOY, "--gpus", 4, "--gpu-gib", 80)
    assert code == 0 and "completions end at" in said  # the scorer was started
    rows = rows_of(said)
    assert rows["GPUs"] == ["4 (2 trainer + 1 reference + 1 generator)", "4 x GPU of 80.0 GiB", "fits"]
    memory = [f"memory of a {role}" for role in ("trainer", "generator", "reference")]
    assert [*rows] == ["GPUs", "versions", *memory, "disk"] and {row[-1] for row in rows.values()} == {"fits"}
    code, said = dry_run(*TOY, "--gpus", 3, "--gpu-gib", 0.1)
    rows = rows_of(said)
    assert code == 1 and rows["GPUs"][-1] == rows["memory of a trainer"][-1] == "PROBLEM"
    assert "-> try --roles." in said and "--trainer.micro-batch-tokens 48" in said


def test_engine_options_are_judged_for_the_machine_that_was_asked_for(dry_run):
    """vLLM's CPU backend gets this one wrong, and a dry run for GPUs may be made on a CPU."""
    chunked = ("--generator.engine", "enable_chunked_prefill", "true")
    assert dry_run(*TOY, *chunked, "--gpus", 4)[0] == 0
    with pytest.raises(BadInput, match="enable_chunked_prefill needs a GPU"):
        dry_run(*TOY, *chunked)


def test_config_json_is_enough_for_arithmetic_and_to_count_positions(dry_run, tmp_path):
    transformers.AutoConfig.for_model(**QWEN3_1_7B).save_pretrained(tmp_path / "model")
    flags = ("--model.path", tmp_path / "model", "--data.path", "no/rows", "--gpus", 4, "--gpu-gib", 80)
    code, said = dry_run(train_grpo.main, GRPOConfig, "toy_arithmetic.py", *flags)
    rows = rows_of(said)
    assert code == 0 and rows["memory of a trainer"][-1] == rows["disk"][-1] == "fits"
    long = ("--generator.max-completion-tokens", 66000, "--trainer.micro-batch-tokens", 67000)
    with pytest.raises(BadInput, match="do not fit into .*, which has 40960 positions"):
        dry_run(train_grpo.main, GRPOConfig, "toy_arithmetic.py", *flags, *long)


def test_an_sft_recipe_that_evaluates(dry_run):
    flags = ("--evaluation.interval", 10, "--data.max-prompt-tokens", 16, "--generator.max-completion-tokens", 32)
    code, said = dry_run(train_sft.main, SFTConfig, "toy_sft.py", *flags)
    assert code == 0 and "held out: 64 of 64 rows" in said
