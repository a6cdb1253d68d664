"""A model whose tokenizer has no chat template: the prompt is the user's text, and so is what ends a completion."""

import collections
import pathlib
import shutil

import pytest

from configs.examples import toys
from tests.e2e.runs import ONE_RANK, read_completions, read_metrics, run_tiny

STOP_ID = 19  # "="
# <pad> is a special token, which vLLM leaves out of texts unless told otherwise; "5+" are two tokens
STOPS = ("7", "<pad>", "5+")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """Folder and output of one step with such a model."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("chat_template*"))
    tokenizer = toys.addition_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    ends = f"--generator.stop {' '.join(STOPS)} --generator.stop-token-ids {STOP_ID}"
    sizes = "--generator.max-completion-tokens 16 --prompts-per-step 8 --data.max-prompt-tokens 32 --num-steps 1"
    template = ("--data.prompt-template", "x: {question}?")
    output = run_tiny(folder / "model", folder / "run", ONE_RANK, ends, sizes, *template)
    return folder / "run", output


def test_the_prompt_is_the_template_around_the_question(run):
    questions = {row["question"] for row in toys.addition("train")}
    prompts = {record["prompt"] for record in read_completions(run[0])}
    assert len(prompts) == 8
    for prompt in prompts:
        assert prompt.startswith("x: ") and prompt.endswith("?") and prompt[3:-1] in questions


def test_completions_end_where_the_log_says(run):
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


def test_log_probs_belong_to_the_tokens(run):
    """The trainer computes them anew from the ids: an id too many or too few would show."""
    (metrics,) = read_metrics(run[0])
    assert metrics["mismatch/max"] < 1e-5
