"""The edits that the page of train_grpo.py invites, each a few lines, made in a copy of it that runs two steps."""

import csv
import math
import pathlib
import statistics

import pytest

from tests.e2e.runs import ROWS, read_completions, read_metrics, run_tiny, split
from tests.torchrun import ROOT

# What of the page is replaced, and by what
EDITS = {
    "a filter": (
        "        keep_prompt = None",
        "        keep_prompt = lambda prompt: int(prompt.columns['answer']) % 2 == 0",
    ),
    "a curriculum": (
        "        source_shares = config.data.weights",
        "        source_shares = {'a': 1 - step, 'b': step}",
    ),
    "a KL coefficient that decays": (
        "        kl_coef = config.algorithm.kl_coef",
        "        kl_coef = config.algorithm.kl_coef * (1 - step / config.num_steps)",
    ),
    "a second term of the loss, and metrics of tokens": (
        "        loss_BT = loss_BT.where(x.loss_mask_BT, 0)\n",
        "        metrics['mine/policy'] = loss_BT.detach()\n"
        "        metrics['mine/nll'] = -x.logprobs_BT.detach()\n"
        "        loss_BT = loss_BT - 0.5 * x.logprobs_BT\n"
        "        loss_BT = loss_BT.where(x.loss_mask_BT, 0)\n",
    ),
    "a metric of completions": (
        "        if trainer:\n",
        "        if rollouts:\n"
        "            metrics.record(**{'mine/characters': sum(len(r.text) for r in rollouts) / len(rollouts)})\n"
        "        if trainer:\n",
    ),
    "a log in CSV": (
        "        driver.log(step + 1, rollouts, batch, metrics)",
        "        logged = driver.log(step + 1, rollouts, batch, metrics)\n"
        "        if logged:\n"
        "            with open(f'{config.run_dir}/log.csv', 'a') as file:\n"
        "                print(step + 1, logged['loss'], logged['mine/characters'], sep=',', file=file)",
    ),
}


@pytest.fixture(scope="module")
def run_dir(model, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of two steps with all edits, on two trainers that hold the reference, and a generator."""
    page = (ROOT / "train_grpo.py").read_text()
    for name, (place, edited) in EDITS.items():
        assert page.count(place) == 1, name
        page = page.replace(place, edited)
    folder = tmp_path_factory.mktemp("edits")
    (folder / "train_mine.py").write_text(page)
    data = f"--data.path a {ROWS} b {ROWS} --data.weights a 1 b 0"
    flags = f"{split(2, 0, 1)} {data} --algorithm.aggregation token_mean --algorithm.kl-coef 0.1"
    run_tiny(model, folder / "run", flags, nproc=3, script=folder / "train_mine.py")
    return folder / "run"


def test_a_filter_on_prompts_decides_what_is_trained_on(run_dir):
    """The step is full all the same: 4 prompts of 4 completions."""
    completions = read_completions(run_dir)
    assert {int(line["columns"]["answer"]) % 2 for line in completions} == {0}
    assert [sum(line["step"] == step for line in completions) for step in (1, 2)] == [16, 16]


def test_a_curriculum_draws_by_the_step(run_dir):
    """`--data.weights` gives b no prompt, and the page's weights count in its place."""
    shares = [[m.get(f"prompt/source/{name}", 0) for name in "ab"] for m in read_metrics(run_dir)]
    assert shares == [[1, 0], [0, 1]]


def test_a_kl_coefficient_that_decays_is_logged_and_weighs(run_dir):
    assert [m["kl_coef"] for m in read_metrics(run_dir)] == pytest.approx([0.1, 0.05])


def test_a_second_term_is_in_the_loss_and_metrics_of_tokens_are_means(run_dir):
    for m in read_metrics(run_dir):
        assert m["mine/nll"] > 0.1
        assert m["loss"] == pytest.approx(m["mine/policy"] + 0.5 * m["mine/nll"], rel=1e-5)


def test_a_metric_of_completions_and_a_log_of_ones_own(run_dir):
    texts = {
        step: [line["completion"] for line in read_completions(run_dir) if line["step"] == step] for step in (1, 2)
    }
    metrics = read_metrics(run_dir)
    assert [m["mine/characters"] for m in metrics] == pytest.approx(
        [statistics.fmean(map(len, texts[step])) for step in (1, 2)]
    )
    with open(run_dir / "log.csv") as file:
        rows = [[float(cell) for cell in row] for row in csv.reader(file)]
    assert rows == [[m["step"], m["loss"], m["mine/characters"]] for m in metrics]
    assert all(math.isfinite(cell) for row in rows for cell in row)
