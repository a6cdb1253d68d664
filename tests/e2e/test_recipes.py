"""Every recipe for GPUs, as its command in configs/README.md starts it, with a tiny model of its family on CPU cores.

What is replaced is what a machine of two cores without a network cannot have: model, data, lengths, compilation. That
leaves the layout, the roles, loss, sampling, rewards and schedules of the recipe. The largest has 16 ranks, 9 GiB.
"""

import pathlib
import re

import pytest

from configs.examples import toys, word_problem_rows
from grpo.config import GRPOConfig
from grpo.config.recipes import load
from tests import write_lines
from tests.e2e.runs import REWARDS, read_metrics
from tests.tiny_models import LLAMA3, QWEN2, QWEN3_MOE, SMALL
from tests.torchrun import ROOT, torchrun

pytestmark = pytest.mark.slow

TABLE = (ROOT / "configs" / "README.md").read_text()
RECIPES = re.findall(
    r"^\| \[(\w+)\.py\]\(\1\.py\) \| ([1-9]\d*) \|.*? (train_\w+\.py|launch/grpo\.sbatch)", TABLE, re.M
)
FAMILIES = {
    "qwen3": {},
    "qwen2": QWEN2,
    "llama3": LLAMA3,
    "word": {},
    "a3b": QWEN3_MOE,
}  # by what is in the recipes' names
# What rewards of some recipes read besides
OTHERS = {"tests": "assert False", "entry": '{"answer": "85", "metadata": {"source_dataset": "chain_sum"}}'}
WORDS = "Mia has 37 pens. She buys 4 boxes with 12 pens each. How many pens does Mia have now?"

SMALLER = "--model.dtype float32 --trainer.no-compile --trainer.micro-batch-tokens 1024 --num-steps 2"
SAVED = "--checkpoint.interval 2 --checkpoint.no-export"
GRPO = (
    "--prompts-per-step 8 --generator.max-completion-tokens 16 --sync-check-interval 1 "
    "--evaluation.interval 2 --evaluation.num-prompts 4"
)
SFT = "--sequences-per-step 8 --max-sequence-tokens 256 --validation.interval 2"


def rewards_of(recipe: str) -> str:
    """The recipe's and one that tells random completions apart, or nothing would be learned and no group kept."""
    functions = load(GRPOConfig, f"{ROOT}/configs/{recipe}.py", []).reward.functions
    weight = 1.0 if any(functions.values()) else 0.0
    pairs = {**functions, f"{REWARDS}:digit_share": weight}.items()
    return " ".join(["--reward.functions", *(f"{name} {weight}" for name, weight in pairs)])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, pathlib.Path]:
    """A folder for each family, with heads for tensor parallelism of four."""
    folder, tokenizer = tmp_path_factory.mktemp("recipes"), word_problem_rows.tokenizer()
    changes = SMALL | {"max_position_embeddings": 2048, "num_key_value_heads": 4}
    return {name: toys.make_model(folder / name, tokenizer, 0, changes | family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Rows as the recipes expect them: of GSM8K, and chats."""
    folder = tmp_path_factory.mktemp("rows")
    answers = [f"4*12=48. 37+48=85.\n#### {i}" for i in range(40)]
    problems = [{"question": f"{i}. {WORDS}", "answer": text, **OTHERS} for i, text in enumerate(answers)]
    turns = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "85"}]
    chats = [{"messages": [*turns, {"role": "user", "content": f"And {i}?"}, turns[1]]} for i in range(40)]
    return {name: write_lines(folder / f"{name}.jsonl", rows) for name, rows in (("grpo", problems), ("sft", chats))}


def test_the_table_is_read():
    assert len(RECIPES) >= 18 and ("qwen3_32b_gsm8k", "16", "launch/grpo.sbatch") in RECIPES


@pytest.mark.parametrize(("recipe", "ranks", "started"), RECIPES, ids=[name for name, *_ in RECIPES])
def test_a_recipe_in_small(recipe, ranks, started, models, data, tmp_path):
    script = "train_sft.py" if started == "train_sft.py" else "train_grpo.py"
    family = [name for name in FAMILIES if name in recipe][-1]
    task, own = ("grpo", f"{GRPO} {rewards_of(recipe)}") if script == "train_grpo.py" else ("sft", SFT)
    flags = [f"--model.path {models[family]} {SMALLER} {own} --run-dir {tmp_path}/run {SAVED}"]
    rows, problems = data[task], data["grpo"]
    if recipe.endswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
        flags += [f"--data.path a {rows} b {rows} --evaluation.path a {rows}"]
    elif recipe.endswith("sft_gsm8k"):
        flags += [f"--data.path {problems} --validation.path {problems} --evaluation.path {problems}"]
        flags += ["--evaluation.num-prompts 4 --generator.max-completion-tokens 16"]
    elif family != "word":
        held_out = "--evaluation.path" if task == "grpo" else "--validation.path"
        flags += [f"--data.path {rows} {held_out} {rows}"]
    if recipe.endswith("distill"):
        flags += [f"--model.reference-path {models[family]}"]

    output = torchrun(script, f"configs/{recipe}.py", *flags, nproc=int(ranks))

    assert output.splitlines()[-1].startswith("done; ")
    steps = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 1e-6 for step in steps)
    assert all(step["mismatch/mean"] < 1e-5 for step in steps if script == "train_grpo.py")
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
