"""`python -m grpo.look RUN --html`: tokens come from the recorded batch, and a browser shows them, text as text."""

import base64
import gzip
import json
import math
import pathlib
import re
from dataclasses import replace

import pytest
import torch

from configs.examples.toys import addition_tokenizer
from grpo.data.batches import make_batch
from grpo.data.recorded import RecordedStep, save_step
from grpo.tools.look import main
from grpo.tools.page import speller
from grpo.watch.failures import BadInput
from tests import write_lines
from tests.browser import Page, open_browser
from tests.rollouts import rewarded, sequence

HOSTILE = (
    '</script><script>document.title="owned"</script><img src=x onerror="document.title=\'owned\'"> \u202e\x1b[2J &lt;'
)
RECORD = {"prompt": "1+2=", "columns": {"answer": "3"}, "rewards": {}, "mismatch": 0.001, "finish_reason": "stop"}
RECORD |= {"version": 0, "failures": {}}


def write_run(run_dir: pathlib.Path, records: list[dict], num_steps: int = 3) -> None:
    metrics = [
        {"step": step, "time": 0.0, "reward/mean": step / 4, "time/step": 1.5} for step in range(1, num_steps + 1)
    ]
    for name, lines in (("metrics", metrics), ("completions", [RECORD | record for record in records])):
        write_lines(run_dir / f"{name}.jsonl", lines)


def pieces(run_dir: pathlib.Path) -> list:
    found = re.findall(
        r'<script type="text/plain" id="piece-\d+">([^<]*)</script>', (run_dir / "look.html").read_text()
    )
    return [json.loads(gzip.decompress(base64.b64decode(piece))) for piece in found]


@pytest.fixture
def recorded_run(tmp_path) -> pathlib.Path:
    """Step 1 has no batch; in step 2 an environment answers within the first rollout, and the second has no reward."""
    tokenizer = addition_tokenizer()
    tokenizer.save_pretrained(tmp_path / "initial_model")
    prompt, said, answer, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("1+2=", "12", "34", "5"))
    ids = [*prompt, *said, *answer, *end]
    after = len(said) + len(answer)
    mask = torch.tensor([False] * len(prompt) + [True] * len(said) + [False] * len(answer) + [True] * len(end))
    logprobs = -torch.arange(len(ids), dtype=torch.float32).where(mask, 0) / 8
    logprobs[-1] = -torch.inf  # sampled all the same
    mask[-1] = False
    sample = sequence(torch.tensor(ids), mask, logprobs, prompt_tokens=len(prompt))
    batch = make_batch([sample, sample])
    batch = replace(batch, ref_logprobs_N=batch.generator_logprobs_N - 1)
    batch.ref_logprobs_N[[len(prompt) + 1, len(ids) + len(prompt) + 1]] = torch.nan  # of a reference that is not finite
    save_step(str(tmp_path), 2, RecordedStep(rewarded(batch, torch.ones(2)), 2, {}))
    both = {"row": 7, "completion": "12345", "num_tokens": len(ids) - len(prompt) - len(answer)}
    records = [both | {"step": step, "reward": 1.0, "advantage": 0.5} for step in (1, 2)]
    records.append(both | {"step": 2, "reward": None, "advantage": None})
    write_run(tmp_path, records)
    (tmp_path / "expected.json").write_text(json.dumps([len(prompt), len(said), len(answer), after]))
    return tmp_path


def test_tokens_are_those_of_the_recorded_batch(recorded_run, capsys):
    main([str(recorded_run), "--html"])
    assert f"{recorded_run}/look.html, " in capsys.readouterr().out
    num_prompt, num_said, num_answer, after = json.loads((recorded_run / "expected.json").read_text())
    run, without_batch, (first, excluded) = pieces(recorded_run)
    assert [step["rollouts"] for step in run["steps"]] == [1, 2] and "tokens" not in without_batch[0]
    tokens = first["tokens"]
    assert "".join(tokens["texts"]) == "12345"
    rest = len(tokens["texts"]) - after
    assert tokens["sampled"] == [1] * num_said + [0] * num_answer + [1] * rest
    assert tokens["in_loss"] == [1] * num_said + [0] * num_answer + [1] * (rest - 1) + [0]
    assert tokens["logprobs"]["generator"][:num_said] == [-(num_prompt + i) / 8 for i in range(num_said)]
    assert tokens["logprobs"]["reference"][:2] == [-num_prompt / 8 - 1, "nan"] and num_said == 2
    assert {tokens["logprobs"]["generator"][i] for i in (*range(num_said, after), -1)} == {None}
    assert excluded["tokens"] == tokens | {"in_loss": [0] * len(tokens["texts"])}


def test_one_step_alone(recorded_run, capsys):
    main([str(recorded_run), "--html", "--step", "1"])
    assert [step["step"] for step in pieces(recorded_run)[0]["steps"]] == [1]
    with pytest.raises(BadInput, match="step 3; there are: 1, 2"):
        main([str(recorded_run), "--html", "--step", "3"])


@pytest.mark.parametrize("text", ["12+30=<answer>42</answer>", " é日本 👩‍👧 x\n\n  y", "\u202e half: \ufffd."])
def test_texts_of_tokens_are_the_whole_text(tmp_path, text):
    """Characters of several tokens too, none of which is shown as a broken one."""
    tokenizer = addition_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = speller(["/nowhere", str(tmp_path)])(ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "\ufffd" in text or not any("\ufffd" in part for part in texts)


# ---- In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Page:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def texts_of(page: Page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll('{selector}')].map((node) => node.textContent)")


def opened(browser: Page, run_dir: pathlib.Path) -> Page:
    main([str(run_dir), "--html"])
    browser.open(run_dir / "look.html")
    browser.wait_for("document.querySelector('#detail dl') !== null")
    return browser


def test_a_token_shows_its_log_probs_and_whether_it_is_in_the_loss(recorded_run, browser):
    page = opened(browser, recorded_run)
    parts = texts_of(page, "#detail details b")
    assert [part.partition(",")[0] for part in parts] == ["prompt", "model", "environment", "model"]
    assert page.run("document.querySelectorAll('#detail .text .token').length") == 0  # turns are folded
    page.run("document.querySelectorAll('#detail details').forEach((part) => { part.open = true; })")
    page.wait_for("document.querySelectorAll('#detail .text .token').length > 0")
    tokens = page.run(
        "[...document.querySelectorAll('.text .token')].map((t) => [t.textContent, t.className.includes('out')])"
    )
    assert "".join(text for text, _ in tokens) == "12345" and [tokens[0][1], tokens[-1][1]] == [False, True]
    page.run("document.querySelector('#detail .text .token').scrollIntoView()")
    x, y = page.run(
        "(({ x, y }) => [x + 2, y + 2])(document.querySelector('#detail .text .token').getBoundingClientRect())"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.wait_for("!document.getElementById('tip').hidden")
    tip = page.run("document.getElementById('tip').textContent")
    assert "in the loss" in tip and re.search(r"generator +-0\.\d+ +p = 0\.\d+\nreference +-1\.\d+", tip)
    assert "out of the loss" in page.run("document.querySelector('.legend').textContent")


def test_without_a_recorded_batch_there_are_texts_turn_by_turn_of_held_out_prompts_too(tmp_path, browser):
    turns = [{"text": "5?", "tokens": 2, "answers": ["higher"]}, {"text": "7", "tokens": 1, "answers": []}]
    record = {"step": 1, "row": 0, "completion": "5?higher7", "reward": 1.0, "advantage": 0.0, "num_tokens": 3}
    write_run(tmp_path, [record | {"episode": {"turns": turns, "ended_by": "done"}}])
    write_lines(tmp_path / "evaluation.jsonl", [RECORD | record | {"kind": "greedy"}])
    page = opened(browser, tmp_path)
    steps = texts_of(page, "#step option")
    assert steps == ["step 1, trained on, 1", "step 1, greedy, 1"]
    parts = texts_of(page, "#detail summary")
    assert parts == ["prompt  1+2=", "model, 2 tokens  5?", "environment  higher", "model, 1 token  7"]
    assert "--record" in page.run("document.querySelector('.legend').textContent")


def test_what_is_no_number_is_shown_as_it_is(tmp_path, browser):
    """NaN, which other writers of JSON allow, and a text, in rollouts and in metrics."""
    record = {"step": 1, "row": 0, "completion": "3", "advantage": 0.0, "num_tokens": 1}
    write_run(tmp_path, [record | {"reward": reward} for reward in (math.nan, "high", 0.5, -math.inf)])
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4, "reward/mean": NaN, "loss": "low"}\n')
    page = opened(browser, tmp_path)
    assert texts_of(page, "#rows .row :first-child") == ["0.5", "NaN", "high", "-Infinity"]
    assert texts_of(page, ".chart header") == ["reward/meanNaN", "losslow"]
    marked = page.run(
        "[...document.querySelectorAll('.odd')].map((path) => path.getAttribute('d').split('M').length - 1)"
    )
    assert marked == [1, 1]


def test_runs_and_methods_share_charts_and_a_long_curve_is_a_band(tmp_path, browser):
    """A line for each run, or for each method of a comparison; beyond 300 steps means in a band of all values."""
    record = {"step": 1, "row": 0, "completion": "3", "reward": 1.0, "advantage": 0.0, "num_tokens": 1}
    for name, num_steps in (("short", 3), ("long", 400)):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, [record], num_steps)
    main([str(tmp_path / "short"), str(tmp_path / "long"), "--html"])
    assert not (tmp_path / "short" / "look.html").exists()  # its own page stays
    browser.open(tmp_path / "short" / "look-long.html")
    browser.wait_for("document.querySelector('#detail dl') !== null")
    assert (
        texts_of(browser, "h1") == texts_of(browser, "#key span") == [str(tmp_path / "short"), str(tmp_path / "long")]
    )
    assert browser.run("[...document.querySelectorAll('.chart path')].map((path) => path.className.baseVal)") == [
        *("", "dots", "odd"),  # of 3 steps
        *("band", "", "odd"),  # of 400
    ]
    methods = [{"step": step, "dapo/grad_norm": 1.0, "dapo/cosine": 1.0, "mine/grad_norm": step} for step in (1, 9)]
    write_lines(tmp_path / "metrics.jsonl", methods)
    main([str(tmp_path), "--html"])
    browser.open(tmp_path / "look.html")
    browser.wait_for("document.querySelectorAll('.chart').length > 0")
    assert texts_of(browser, "#key span") == ["dapo", "mine"]
    assert texts_of(browser, ".chart header") == ["cosine1", "grad_norm19"]
    assert texts_of(browser, ".x") == ["1", "9"] * 2  # no two round numbers lie between
    assert texts_of(browser, "#means td") == ["1", "1", "-", "5"]  # dapo's, then those of mine


def test_the_list_shows_what_prompts_do_not_share(tmp_path, browser):
    """Neither a template and system prompt nor a word of the question that all have; whole words."""
    record = {"step": 1, "completion": "3", "reward": 1.0, "advantage": 0.0, "num_tokens": 1}
    prompts = [f"<system>Be brief.<user>What is {sum_}?<model>" for sum_ in ("11+22", "13+42", "15+32")]
    write_run(tmp_path, [record | {"row": row, "prompt": prompt} for row, prompt in enumerate(prompts)])
    page = opened(browser, tmp_path)
    assert texts_of(page, "#rows .row :nth-child(5)") == ["11+22", "13+42", "15+32"]


def test_what_models_write_stays_text_and_nothing_is_loaded(tmp_path, browser):
    record = {
        "step": 1,
        "row": 0,
        "completion": HOSTILE,
        "prompt": HOSTILE,
        "columns": {HOSTILE: HOSTILE, "answer": HOSTILE},
    }
    record |= {"rewards": {HOSTILE: 1.0}, "failures": {HOSTILE: HOSTILE}, "source": HOSTILE}
    write_run(tmp_path, [record | {"reward": 1.0, "advantage": 0.0, "num_tokens": 9}])
    page = opened(browser, tmp_path)
    page.run("document.querySelectorAll('#detail details').forEach((part) => { part.open = true; })")
    page.wait_for("document.querySelectorAll('#detail .text').length === 2")
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
    texts = texts_of(page, "#detail .text")
    assert texts == [shown, shown]
    assert shown[:100] in page.run("document.querySelector('#rows .row').textContent")
    assert page.run("document.querySelectorAll('img, iframe, #detail script').length") == 0
    assert page.run("document.title") == str(tmp_path)
    assert page.run("performance.getEntriesByType('resource').length") == 0
    # and if text did become HTML, its scripts would not run
    page.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(HOSTILE)})")
    page.run("new Promise((done) => setTimeout(done, 200))")
    assert page.run("document.title") == str(tmp_path)


def test_ten_thousand_rollouts_scroll_sort_and_filter(tmp_path, browser):
    numbers = range(10_000)
    records = [
        {"step": 1, "row": i // 8, "completion": f"this is {i}", "reward": i % 4, "num_tokens": 10_000 - i}
        for i in numbers
    ]
    write_run(tmp_path, [r | {"prompt": f"{r['row']}?", "advantage": -i / 100} for i, r in enumerate(records)])
    page = opened(browser, tmp_path)

    def rows() -> list[str]:
        return texts_of(page, "#rows .row span:last-child")

    def sort_by(column: int) -> None:
        page.run(f"document.querySelectorAll('#head button')[{column}].click()")

    assert rows()[:2] == ["this is 3", "this is 7"]  # the best ones
    sort_by(2)  # the longest first, then the shortest first
    assert rows()[0] == "this is 0"
    for _ in range(2):
        assert 20 < len(rows()) < 120 and page.run("document.querySelectorAll('*').length") < 1500
        page.run("document.getElementById('list').scrollTop = 1e9")
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    last = page.run("""(() => {
        const list = document.getElementById('list').getBoundingClientRect();
        const row = [...document.querySelectorAll('#rows .row')].at(-1).getBoundingClientRect();
        return list.top <= row.top && row.bottom <= list.bottom + 1; })()""")
    assert rows()[-1] == "this is 9999" and last
    sort_by(2)
    assert rows()[0] == "this is 9999"
    page.run("Object.assign(document.getElementById('bounded'), { value: 'advantage' })")
    page.run("Object.assign(document.getElementById('most'), { value: -99.98 })")
    page.run("document.getElementById('most').dispatchEvent(new Event('input'))")
    assert rows() == ["this is 9999", "this is 9998"]
    assert page.run("document.getElementById('note').textContent").startswith("2 of 10000 rollouts")
    page.run("Object.assign(document.getElementById('search'), { value: 'is 9998' }).dispatchEvent(new Event('input'))")
    assert rows() == ["this is 9998"]
