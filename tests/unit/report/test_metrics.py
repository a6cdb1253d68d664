"""The run's books: times, averages, files and curves, with numbers a person can check."""

import dataclasses
import json
import math
import re
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo.config import MetricsConfig
from grpo.data.recorded import batch_path
from grpo.report import log as run_log
from grpo.report.log import RunLog
from grpo.report.rollout_metrics import function_names, rollout_metrics
from grpo.report.samples import completion_records, failure_lines, no_answer_line
from grpo.rewards.builtin import math_reward
from grpo.tools import look
from grpo.tools.describe import describe
from grpo.types import Prompt
from grpo.watch import step_timer
from grpo.watch.step_timer import StepTimer
from tests import read_lines
from tests.rollouts import completion


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: clock.now)
    return clock


def make_rollout(
    reward, rewards=None, num_tokens=2, truncated=False, text="text", prompt_tokens=3, columns=None, row=-1, **trained
):
    columns = columns or {}
    content = columns.get("question", "")
    prompt = Prompt(index=0, ids=[0] * prompt_tokens, columns=columns, row=row, content=content)
    ended_by = "tokens" if truncated else "stop"
    facts = {"text": text, "rewards": rewards or {}, "reward": reward, "ended_by": ended_by}
    return completion([1] * num_tokens, prompt=prompt, **facts, **trained)


def read_scalars(run_dir, tag):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]


# --- the step timer


def test_every_second_of_a_step_is_in_one_phase(clock):
    """A phase that is entered lasts until the next; an inner one pauses it; the rest is other."""
    timer = StepTimer()
    clock.now += 1.0
    for name, seconds in (("generate", 5.0), ("train", 2.0), ("generate", 3.0)):
        timer.enter(name)
        clock.now += seconds
        with timer.phase("reward"):
            clock.now += 0.5
    assert timer.close_step() == {
        "time/generate": 8.0, "time/train": 2.0, "time/reward": 1.5, "time/other": 1.0, "time/step": 12.5
    }  # fmt: skip
    clock.now += 1.0  # the next step begins where the last one ended
    assert timer.close_step() == {"time/other": 1.0, "time/step": 1.0}


def test_timer_leaves_start_up_out_of_the_step(clock):
    timer = StepTimer()
    with timer.phase("startup"):
        clock.now += 60.0
    clock.now += 1.0
    with timer.phase("train"):
        clock.now += 2.0
        with timer.startup("compiling"):
            clock.now += 30.0
        clock.now += 3.0
    assert timer.close_step() == {"time/startup": 90.0, "time/train": 5.0, "time/other": 1.0, "time/step": 6.0}
    with timer.phase("train"):
        clock.now += 5.0
    assert timer.close_step() == {"time/train": 5.0, "time/other": 0.0, "time/step": 5.0}


# --- metrics of rollouts


def test_rollout_metrics_of_two_groups():
    file_reward = "rewards/mine.py:brevity"
    rollouts = [
        make_rollout(1.0, {"math_reward": 1.0, file_reward: 0.5}, num_tokens=4, prompt_tokens=2),
        make_rollout(1.0, {"math_reward": 1.0, file_reward: None}, num_tokens=6, prompt_tokens=2),
        make_rollout(4.0, {"math_reward": 0.0, file_reward: 0.1}, num_tokens=8, truncated=True, prompt_tokens=6),
        make_rollout(
            None, {"math_reward": None, file_reward: None}, prompt_tokens=6, failures={"math_reward": "took longer"}
        ),
    ]
    # The second group has one reward, which differs from no other: both groups have no variance.
    assert rollout_metrics(rollouts, group_size=2) == pytest.approx(
        {
            "reward/mean": 2.0,  # (1 + 1 + 4) / 3
            "reward/std": math.sqrt(2.0),  # sqrt((1 + 1 + 4) / 3)
            "reward/none_count": 1,
            "reward/failed_count": 1,
            "reward/math_reward": 2 / 3,
            "reward/brevity": 0.3,
            "completion/length_mean": 5.0,
            "completion/length_max": 8,
            "completion/truncated_frac": 0.25,
            "prompt/length_mean": 4.0,
            "groups/zero_variance_frac": 1.0,
        }
    )


def test_rollout_metrics_without_any_reward_are_nan_not_zero():
    numbers = rollout_metrics([make_rollout(None, {"f": None}), make_rollout(None, {"f": None})], group_size=2)
    assert math.isnan(numbers["reward/mean"]) and math.isnan(numbers["reward/std"]) and math.isnan(numbers["reward/f"])
    assert numbers["reward/none_count"] == 2
    assert numbers["reward/failed_count"] == 0


def test_reward_functions_of_one_name_keep_their_full_names():
    kept = ["a.py:score", "b.py:score", "c.py:mean", "c.py:failed_count"]
    assert function_names([*kept, "c.py:other"]) == {name: name for name in kept} | {"c.py:other": "other"}


def test_failed_reward_functions_are_told_with_counts_reasons_and_a_harmless_completion():
    slow, killed = "took longer than 10 s", "the process was killed by\n  signal 9"
    rollouts = [
        make_rollout(1.0),
        make_rollout(None, text=HOSTILE, failures={"math_reward": killed}),
        make_rollout(None, failures={"math_reward": slow}),
        make_rollout(None, failures={"math_reward": slow, "mine.py:f": "ValueError: 1"}),
        *(make_rollout(None, failures={"mine.py:f": f"ValueError: {i}"}) for i in (2, 3, 4, 4)),
    ]
    first, second = failure_lines(rollouts)
    assert "math_reward failed for 3 of 8" in first and "10 s (2), the process was killed by signal 9 (1)" in first
    assert first.isprintable() and r"\x1b[2J" in first
    assert "mine.py:f failed for 5 of 8" in second and "ValueError: 4 (2)" in second
    assert failure_lines(rollouts[:1]) == []


def test_completions_without_an_answer_in_the_format_are_told_with_the_format_they_have():
    tagged = [make_rollout(0.0, text=f"<think>1</think><answer>{number}</answer>") for number in range(6)]
    line = no_answer_line([*tagged, make_rollout(0.0, text="so \x1b[2J")], "boxed")
    assert line.startswith(
        "none of 7 completions has an answer in the form \\boxed{..}; they end like '<think>1</think>"
    )
    assert line.endswith("6 have one in <answer>..</answer> (--reward.answer-format answer_tag)") and line.isprintable()
    assert no_answer_line([*tagged, make_rollout(0.0, text="")], "answer_tag") == ""


def test_what_says_that_a_completion_was_cut_off_names_the_limit():
    """A conversation that runs out of turns has tokens left."""
    cut = make_rollout(0.0, truncated=True)
    episode = {"turns": [], "counts": {}, "ended_by": "turns", "waited": 0.0}
    talk = dataclasses.replace(cut, episode=episode, ended_by="turns")
    line = no_answer_line([talk, cut, talk], "boxed")
    assert line.endswith("; 2 run out of turns; 1 run out of tokens")
    records = completion_records([talk, cut], ["?", "?"])
    assert [record["finish_reason"] for record in records] == ["length", "length"]
    heads = [describe(record).splitlines()[0] for record in records]
    assert heads[0].endswith("2 tokens, ended by turns") and heads[1].endswith("2 tokens, finish reason length")


# --- files


def test_json_lines_hold_every_metric_and_null_for_what_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log.time, "time", lambda: 1234.5)
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=10)
    log.log(1, {"loss": 0.25, "reward/mean": math.nan, "kl": math.inf, "completion/length_max": 7})
    log.log_held_out(1, {"eval/accuracy": 0.5, "eval/reward_mean": 0.75})
    log.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "time": 1234.5, "loss": 0.25, "reward/mean": None, "kl": None, "completion/length_max": 7.0},
        {"step": 1, "time": 1234.5, "eval/accuracy": 0.5, "eval/reward_mean": 0.75},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_resume_drops_what_the_aborted_part_wrote_and_a_fresh_start_everything(tmp_path):
    """Of a run that dies without closing its files, in the middle of a line."""

    def log_step(log, step, loss):
        log.log(step, {"loss": loss})
        log.completions(step, [UNREWARDED], [f"prompt {step}"])
        log.completions(step, [UNREWARDED], [f"held out {step}"], held_out="greedy")
        batch_path(tmp_path, step).parent.mkdir(exist_ok=True)
        batch_path(tmp_path, step).touch()

    def steps_in(name):
        return [record["step"] for record in read_lines(tmp_path / f"{name}.jsonl")]

    aborted = RunLog(MetricsConfig(), str(tmp_path), num_steps=10)
    for step in (1, 2, 3, 4):
        log_step(aborted, step, float(step))
    for name in ("metrics", "completions"):
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write('{"step": 2, "time": 17')

    resumed = RunLog(MetricsConfig(), str(tmp_path), num_steps=10, start_step=2)
    assert [batch_path(tmp_path, step).exists() for step in (1, 2, 3, 4)] == [True, True, False, False]
    log_step(resumed, 3, 30.0)
    resumed.close()
    assert [(record["step"], record["loss"]) for record in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert steps_in("completions") == steps_in("evaluation") == [1, 2, 3]
    assert read_scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]

    fresh = RunLog(MetricsConfig(), str(tmp_path), num_steps=10)
    assert steps_in("metrics") == steps_in("completions") == steps_in("evaluation") == []
    fresh.log(1, {"loss": 0.2})
    fresh.close()
    assert read_scalars(tmp_path, "loss") == [(1, pytest.approx(0.2))]


# --- the console


def test_console_line(tmp_path, capsys):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=200)
    log.log(11, {"time/step": 10.0})
    log.log(12, {"reward/mean": 0.5, "loss": -0.0123, "tokens_per_second": 4560.0, "time/step": 20.0, "adam/odd": 3.0})
    log.log(13, {"reward/mean": 0.0, "distill/reverse_kl": 0.25})  # a teacher; reward functions of weight 0 measure
    parts = {"reward/right": 0.25, "reward/brief": 0.5}
    log.log(14, {"reward/mean": math.nan, "loss": 0.0, "kl": math.nan, "mismatch/mean": 0.002, "reward/right": 1.0})
    log.log(15, {"reward/mean": 0.3, "reward/std": 0.1, "mismatch/mean": 0.001, **parts})
    log.log_held_out(13, {"eval/accuracy": 0.8125, "eval/accuracy_stderr": 0.0276, "eval/reward_mean": 0.9})
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "step  11/200   6%  10 s  eta 31m30s",  # 189 steps of 10 s
        "step  12/200   6%  reward 0.5     loss -0.0123  4.56k tok/s  20 s  eta 47m00s",  # 188 steps of 15 s
        "step  13/200   6%  teacher kl 0.25    eta 46m45s",
        "step  14/200   7%  reward -       loss 0       kl -       mismatch 0.002   eta 46m30s",
        "step  15/200   8%  reward 0.3     right 0.25    brief 0.5     mismatch 0.001   eta 46m15s",
        "eval  13/200   6%  accuracy 0.812 ± 0.0276  reward_mean 0.9",
    ]


# --- completions


TRUNCATED = make_rollout(
    0.75,
    {"math_reward": 1.0, "thinking_reward": None},
    truncated=True,
    text="<think>1|2</think>\n<answer>*3*</answer>",
    columns={"question": "1+2", "answer": "3"},
    row=17,
    failures={"thinking_reward": "took longer\nthan 10 s"},
    advantage=0.5,
    mismatch=0.00125,
)
UNREWARDED = make_rollout(None, {"math_reward": None}, num_tokens=5, text="", advantage=None)


def test_every_completion_is_a_json_line_and_a_held_out_one_has_a_kind(tmp_path):
    log = RunLog(MetricsConfig(), str(tmp_path), num_steps=10)
    log.completions(5, [TRUNCATED, UNREWARDED], ["user: 1+2", "user: ü"])
    log.completions(5, [TRUNCATED], ["user: 1+2"], held_out="greedy")
    log.completions(5, [UNREWARDED], ["user: ü"], held_out="sample")
    log.close()
    first = {"step": 5, "row": 17, "prompt": "user: 1+2", "completion": TRUNCATED.text, "reward": 0.75, "version": 0}
    first |= {"columns": {"question": "1+2", "answer": "3"}}
    first |= {"rewards": {"math_reward": 1.0, "thinking_reward": None}, "advantage": 0.5, "mismatch": 0.00125}
    first |= {"finish_reason": "length", "num_tokens": 2, "failures": {"thinking_reward": "took longer\nthan 10 s"}}
    second = first | {"row": -1, "prompt": "user: ü", "columns": {}, "completion": "", "rewards": {"math_reward": None}}
    second |= {"reward": None, "advantage": None, "mismatch": None, "finish_reason": "stop", "num_tokens": 5}
    second |= {"failures": {}}
    assert read_lines(tmp_path / "completions.jsonl") == [first, second]
    assert read_lines(tmp_path / "evaluation.jsonl") == [first | {"kind": "greedy"}, second | {"kind": "sample"}]


def test_recorded_completions_can_be_scored_again():
    """By what the record has of the row alone, also if a value in it is one that JSON has no word for."""
    columns = {"question": "What is 1+2?", "answer": "3", "weight": math.nan, "tests": [[1, 2], {"x": math.inf}]}
    rollouts = [make_rollout(1.0, text=text, columns=columns) for text in ("<answer>3</answer>", "<answer>4</answer>")]
    records = completion_records(rollouts, ["What is 1+2?"] * 2)
    again = math_reward([r["completion"] for r in records], answer=[r["columns"]["answer"] for r in records])
    assert again == [1.0, 0.0]
    assert records[0]["columns"] == columns | {"weight": None, "tests": [[1, 2], {"x": None}]}


def test_a_sample_shows_the_answer_and_no_column_that_the_prompt_has():
    columns = {"question": "3 + 0?", "answer": "3", "level": "hard"}
    (record,) = completion_records([make_rollout(1.0, text="7", columns=columns)], ["user: 3 + 0?"])
    sample = describe(record)
    assert "answer: 3\nlevel: hard\ncompletion: 7" in sample and "question:" not in sample


def test_a_damaged_log_does_not_keep_a_run_from_going_on(tmp_path, capsys):
    """NUL bytes as after a power loss, bytes that are no UTF-8, half a line in the middle, JSON of something else."""
    good = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 3)]
    bad = [b"\0" * 50, b"\xff\xfe", good[0][:9], b"17", b"null", b'{"step": "1"}', b'{"loss": 1}', b"[" * 100_000, b""]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([good[0], *bad, good[1], good[2], b"\0" * 9 + good[0], good[1][:5]]))
    RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=10, start_step=2).close()
    assert path.read_bytes() == good[0] + b"\n" + good[1] + b"\n"
    said = capsys.readouterr().out
    assert f"warning: 10 lines of {path} are damaged and left out" in said


HOSTILE = "a\x1b[2J\x1b]0;t\x07 b\rc \u202ed\x9be \ud800 f\u2028g\x00 \\frac ü"
HARMLESS = r"a\x1b[2J\x1b]0;t\x07 b\rc \u202ed\x9be \ud800 f\u2028g\x00 \frac ü"


def test_samples_cannot_act_on_a_terminal_and_completions_are_strict_json(tmp_path):
    rollout = make_rollout(1.0, {"f": 1.0}, text=HOSTILE, columns={"question": HOSTILE, "answer": f"{HOSTILE} "})
    failed = make_rollout(None, {"f": None}, text=HOSTILE, failures={"f": HOSTILE})
    episode = {"turns": [], "ended_by": "done", "info": {"all": [math.nan, 0.5]}, "waited": 0.1}
    failed = dataclasses.replace(failed, episode=episode)
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=3)
    log.completions(1, [rollout, failed], [HOSTILE, HOSTILE])
    text = "".join(map(describe, completion_records([rollout, failed], [HOSTILE, HOSTILE])))
    assert text.count(HARMLESS) == 5  # two prompts, two completions, an answer
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e", "\x9b", "\u2028", "\x00"}
    _, line = (tmp_path / "completions.jsonl").read_bytes().splitlines()  # strict JSON, with the whole text
    record = json.loads(line.decode("utf-8"))
    assert record["completion"] == record["prompt"] == HOSTILE.replace("\ud800", "\\ud800")
    assert json.dumps(record, ensure_ascii=False).encode("utf-8")  # which no lone surrogate would allow
    assert b"\x1b" not in line and record["episode"]["info"] == {"all": [None, 0.5]}


# --- the summary


def table(run_dir, *more) -> dict[str, list[str]]:
    """Label -> cells of what look.py shows of runs."""
    lines = look.summarize([run_dir, *more]).splitlines()
    return {label: cells for label, *cells in (re.split(r"  +", line) for line in lines) if label}


def test_summary_of_a_supervised_run(tmp_path):
    """Of what a run is judged by, the first value, the last and the best: the highest, and of losses the lowest."""
    log = RunLog(MetricsConfig(), str(tmp_path), num_steps=3)
    for step, loss in ((1, 2.0), (2, 1.25), (3, 1.5)):
        log.log(step, {"loss": loss, "time/step": 1.0})
    log.log_held_out(3, {"validation/loss": 1.75})
    rows = table(tmp_path)
    assert list(rows)[-1] == f"{tmp_path}/tensorboard"  # no samples, no model
    assert rows["loss"] == ["2 to 1.5, best 1.25"] and rows["validation/loss"] == ["1.75 to 1.75, best 1.75"]


def test_held_out_sets_have_a_line_each(tmp_path, capsys):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=4)
    log.log(1, {"time/step": 1.0, "reward/mean": 0.0})
    for step, accuracy in ((0, 0.25), (4, 0.5)):
        log.log_held_out(step, {"eval/math/accuracy": accuracy, "eval/code/accuracy": 0.75})
    log.log_held_out(4, {"validation/a/loss": 2.0, "validation/loss": 1.5})
    log.close()
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "eval 4/4 100%  math  accuracy 0.5",
        "eval 4/4 100%  code  accuracy 0.75",
        "validation 4/4 100%  a  loss 2",
        "validation 4/4 100%  loss 1.5",
    ]
    rows = table(tmp_path)
    assert rows["eval/math/accuracy"] == ["0.25 to 0.5, best 0.5"]
    assert rows["eval/code/accuracy"] == ["0.75 to 0.75, best 0.75"]


def test_equal_rewards_are_said_once(tmp_path, capsys):
    run_log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=9)
    for step, share in enumerate((0.5, 1.0, 1.0, 1.0, 1.0), start=1):
        run_log.log(step, {"loss": 0.0, "groups/zero_variance_frac": share})
    assert capsys.readouterr().out.count("warning: step 4: in 3 steps the rewards of each group were all equal") == 1
    resumed = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=9, start_step=5)
    resumed.log(6, {"loss": 0.0, "groups/zero_variance_frac": 1.0})
    assert "warning" not in capsys.readouterr().out
