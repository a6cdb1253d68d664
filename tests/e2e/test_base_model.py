"""A model whose tokenizer has no chat template: the prompt is the user's text, and so is what ends a completion."""

import collections
import pathlib
import shutil

import pytest

from configs.examples import toys
from tests.e2e.runs import TINY, read_completions, read_metrics
from tests.torchrun import torchrun

STOP_ID = 19  # "="
# <pad> is a special token, which vLLM leaves out of texts unless told otherwise; "5+" are two tokens
STOPS = ("7", "<pad>", "5+")


@pytest.fixture(scope="module")
def run(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """Folder and output of one step with such a model."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("chat_template*"))
    tokenizer = toys.addition_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    output = torchrun(
        "train_grpo.py",
        *(TINY, "--roles.colocated", "--roles.num-trainers", 1, "--roles.num-references", 0, "--num-steps", 1),
        *("--model.path", folder / "model", "--run-dir", folder / "run", "--data.prompt-template", "x: {question}?"),
        *("--generator.stop", *STOPS, "--generator.stop-token-ids", STOP_ID, "--generator.max-completion-tokens", 16),
        *("--prompts-per-step", 8, "--data.max-prompt-tokens", 32),
        nproc=1,
    )
    return folder / "run", output


def test_the_prompt_is_the_template_around_the_question(run: tuple[pathlib.Path, str]):
    questions = {row["question"] for row in toys.addition("train")}
    prompts = {record["prompt"] for record in read_completions(run[0])}
    assert len(prompts) == 8
    for prompt in prompts:
        assert prompt.startswith("x: ") and prompt.endswith("?") and prompt[3:-1] in questions


def test_completions_end_where_the_log_says(run: tuple[pathlib.Path, str]):
    run_dir, output = run
    tokens, texts = f"'<eos>' (1), '=' ({STOP_ID})", ", ".join(f"the text {stop!r}" for stop in STOPS)
    assert f"completions end at {tokens}, {texts}, or after 16 tokens\n" in output
    ends = collections.Counter()
    for record in read_completions(run_dir):
        text = record["completion"]
        assert not any(stop in text[: -len(stop)] for stop in STOPS) and "=" not in text  # it ended at the first
        end = next((stop for stop in STOPS if text.endswith(stop)), "a token")
        if record["finish_reason"] == "length":
            assert (end, record["num_tokens"]) == ("a token", 16)
        else:
            ends[end] += 1
    assert min(ends["7"], ends["<pad>"], ends["a token"]) > 0, ends


def test_log_probs_belong_to_the_tokens(run: tuple[pathlib.Path, str]):
    """The trainer computes them anew from the ids: an id too many or too few would show."""
    (metrics,) = read_metrics(run[0])
    assert metrics["mismatch/max"] < 1e-5
