"""The run's books: times, averages, files and curves, with numbers a person can check."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo import metrics, summary
from grpo.config import MetricsConfig
from grpo.metrics import Ledger, RunLog, compact_duration, compact_number, rollout_metrics, terminal_curve
from grpo.types import Completion, Prompt, Rollout


class Clock:
    """A clock that a test moves by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics.time, "perf_counter", clock)
    return clock


def make_rollout(reward, rewards=None, num_tokens=2, truncated=False, text="text", prompt_tokens=3, columns=None):
    prompt = Prompt(index=0, ids=[0] * prompt_tokens, columns=columns or {})
    completion = Completion(ids=[1] * num_tokens, logprobs=[0.0] * num_tokens, truncated=truncated)
    return Rollout(prompt=prompt, completion=completion, text=text, rewards=rewards or {}, reward=reward)


def read_records(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_scalars(run_dir, tag):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]


# --- the ledger


def test_ledger_splits_a_step_into_phases_and_the_rest(clock):
    ledger = Ledger()
    clock.now += 1.0
    with ledger.phase("generate"):
        clock.now += 5.0
    with ledger.phase("train"):
        clock.now += 2.0
    with ledger.phase("train"):
        clock.now += 0.5
    clock.now += 0.25
    assert ledger.close_step() == {"time/generate": 5.0, "time/train": 2.5, "time/other": 1.25, "time/step": 8.75}


def test_ledger_starts_the_next_step_where_the_last_one_ended(clock):
    ledger = Ledger()
    with ledger.phase("generate"):
        clock.now += 5.0
    ledger.close_step()
    clock.now += 3.0
    assert ledger.close_step() == {"time/other": 3.0, "time/step": 3.0}


def test_ledger_inner_phase_pauses_the_outer_one(clock):
    ledger = Ledger()
    with ledger.phase("reference"):
        clock.now += 1.0
        with ledger.phase("reward"):
            clock.now += 4.0
        clock.now += 2.0
    assert ledger.close_step() == {"time/reference": 3.0, "time/reward": 4.0, "time/other": 0.0, "time/step": 7.0}


def test_ledger_counts_a_phase_that_raised(clock):
    ledger = Ledger()
    with pytest.raises(RuntimeError), ledger.phase("generate"):
        clock.now += 1.0
        raise RuntimeError
    assert ledger.close_step()["time/generate"] == 1.0


def test_ledger_refuses_to_close_a_step_inside_a_phase():
    ledger = Ledger()
    with ledger.phase("sync"), pytest.raises(ValueError, match="inside phase sync"):
        ledger.close_step()


@pytest.mark.parametrize("name", ["other", "step"])
def test_ledger_refuses_names_it_computes(name):
    with pytest.raises(ValueError, match=f"time/{name}"), Ledger().phase(name):
        pass


# --- metrics of rollouts


def test_rollout_metrics_of_two_groups():
    file_reward = "rewards/mine.py:brevity"
    rollouts = [
        make_rollout(1.0, {"math_reward": 1.0, file_reward: 0.5}, num_tokens=4, prompt_tokens=2),
        make_rollout(1.0, {"math_reward": 1.0, file_reward: None}, num_tokens=6, prompt_tokens=2),
        make_rollout(4.0, {"math_reward": 0.0, file_reward: 0.1}, num_tokens=8, truncated=True, prompt_tokens=6),
        make_rollout(None, {"math_reward": None, file_reward: None}, num_tokens=2, prompt_tokens=6),
    ]
    # The second group has one reward, which differs from no other: both groups have no variance.
    assert rollout_metrics(rollouts, group_size=2) == pytest.approx(
        {
            "reward/mean": 2.0,  # (1 + 1 + 4) / 3
            "reward/std": math.sqrt(2.0),  # sqrt((1 + 1 + 4) / 3)
            "reward/none_count": 1,
            "reward/math_reward": 2 / 3,
            "reward/brevity": 0.3,
            "completion/length_mean": 5.0,
            "completion/length_max": 8,
            "completion/truncated_share": 0.25,
            "prompt/length_mean": 4.0,
            "groups/zero_variance_share": 1.0,
        }
    )


def test_zero_variance_share_counts_groups_not_completions():
    rollouts = [make_rollout(reward) for reward in (1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.5)]
    assert rollout_metrics(rollouts, group_size=2)["groups/zero_variance_share"] == 0.5
    assert rollout_metrics(rollouts, group_size=4)["groups/zero_variance_share"] == 0.0


def test_rollout_metrics_without_any_reward_are_nan_not_zero():
    numbers = rollout_metrics([make_rollout(None, {"f": None}), make_rollout(None, {"f": None})], group_size=2)
    assert math.isnan(numbers["reward/mean"]) and math.isnan(numbers["reward/std"]) and math.isnan(numbers["reward/f"])
    assert numbers["reward/none_count"] == 2


@pytest.mark.parametrize("count", [0, 3])
def test_rollout_metrics_refuse_broken_groups(count):
    with pytest.raises(ValueError, match=f"{count} rollouts are not whole groups of 2"):
        rollout_metrics([make_rollout(1.0)] * count, group_size=2)


def test_reward_functions_of_one_name_keep_their_full_names():
    names = metrics.function_names(["a.py:score", "b.py:score", "c.py:mean", "c.py:other"])
    assert names == {
        "a.py:score": "a.py:score",
        "b.py:score": "b.py:score",
        "c.py:mean": "c.py:mean",
        "c.py:other": "other",
    }


# --- files


def test_json_lines_hold_every_metric_and_null_for_what_is_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.time, "time", lambda: 1234.5)
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=10)
    log.log(1, {"loss": 0.25, "reward/mean": math.nan, "kl": math.inf, "completion/length_max": 7})
    log.log_evaluation(1, {"accuracy": 0.5, "eval/reward_mean": 0.75})
    log.close()
    assert read_records(tmp_path) == [
        {"step": 1, "time": 1234.5, "loss": 0.25, "reward/mean": None, "kl": None, "completion/length_max": 7.0},
        {"step": 1, "time": 1234.5, "eval/accuracy": 0.5, "eval/reward_mean": 0.75},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_a_line_is_on_disk_before_the_run_is_closed(tmp_path):
    log = RunLog(MetricsConfig(), str(tmp_path), num_steps=10)
    log.log(1, {"loss": 0.25})
    assert read_records(tmp_path)[0]["loss"] == 0.25
    assert read_scalars(tmp_path, "loss") == [(1, 0.25)]
    log.close()


def test_resume_drops_the_steps_of_the_aborted_part(tmp_path):
    aborted = RunLog(MetricsConfig(), str(tmp_path), num_steps=10)
    aborted.log_evaluation(0, {"accuracy": 0.1})
    for step in (1, 2, 3, 4):
        aborted.log(step, {"loss": float(step)})
    aborted.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "time": 17')  # the process died while writing

    resumed = RunLog(MetricsConfig(), str(tmp_path), num_steps=10, start_step=2)
    assert [record["step"] for record in read_records(tmp_path)] == [0, 1, 2]
    resumed.log(3, {"loss": 30.0})
    resumed.close()

    assert [(record["step"], record.get("loss")) for record in read_records(tmp_path)] == [
        (0, None),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert read_scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert read_scalars(tmp_path, "eval/accuracy") == [(0, 0.1)]
    assert not (tmp_path / "metrics.jsonl.tmp").exists()


def test_a_fresh_start_after_an_abort_without_checkpoint_counts_nothing_twice(tmp_path):
    for accuracy in (0.1, 0.2):
        log = RunLog(MetricsConfig(), str(tmp_path), num_steps=10, start_step=0)
        log.log_evaluation(0, {"accuracy": accuracy})
        log.close()
    assert [record["eval/accuracy"] for record in read_records(tmp_path)] == [0.2]
    assert read_scalars(tmp_path, "eval/accuracy") == [(0, 0.2)]


# --- the console


def test_console_line(tmp_path, capsys):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=200)
    log.log(11, {"time/step": 10.0})
    log.log(12, {"reward/mean": 0.5, "loss": -0.0123, "tokens_per_second": 4560.0, "time/step": 20.0, "adam/odd": 3.0})
    log.log_evaluation(12, {"accuracy": 0.8125, "reward_mean": 0.9})
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "step  11/200   6%  10 s  eta 31m30s",  # 189 steps of 10 s
        "step  12/200   6%  reward 0.5     loss -0.0123  4.56k tok/s  20 s  eta 47m00s",  # 188 steps of 15 s
        "eval  12/200   6%  accuracy 0.812  reward_mean 0.9",
    ]


def test_console_line_with_every_column_fits(tmp_path, capsys):
    log = RunLog(MetricsConfig(tensorboard=False), str(tmp_path), num_steps=1000)
    numbers = [0.512345, -0.0123456, 0.00123456, 1.23456, 1023.4, 0.312345, 0.000123456, 12345.6, 123.456]
    names = [name for name, _, _ in metrics.CONSOLE_COLUMNS]
    log.log(100, dict(zip(names, numbers, strict=True)))
    log.close()
    line = capsys.readouterr().out.rstrip("\n")
    assert len(line) <= 144 and line.isascii()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.1234, "0.123"), (-12.34, "-12.3"), (999.4, "999"), (999.6, "1k"), (12345, "12.3k"), (2.5e6, "2.5M")]
    + [(0.00123, "0.00123"), (0.000123, "1.2e-04"), (math.nan, "nan"), (-math.inf, "-inf")],
)
def test_compact_number(value, text):
    assert compact_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3725, "1h02m")])
def test_compact_duration(seconds, text):
    assert compact_duration(seconds) == text


# --- samples


def test_samples_run_from_best_to_worst(tmp_path):
    rollouts = [make_rollout(reward, text=f"worth {reward}") for reward in (0.3, None, 0.9, 0.1, 0.5)]
    chosen = [rollout.reward for rollout in metrics.spread_by_reward(rollouts, 3)]
    assert chosen == [0.9, 0.3, None]
    assert [r.reward for r in metrics.spread_by_reward(rollouts, 1)] == [0.9]
    assert len(metrics.spread_by_reward(rollouts, 9)) == 5
    assert metrics.spread_by_reward(rollouts, 0) == []


def test_samples_are_readable_text(tmp_path):
    log = RunLog(MetricsConfig(num_samples=1), str(tmp_path), num_steps=10)
    rollout = make_rollout(
        0.75,
        {"math_reward": 1.0, "thinking_reward": None},
        truncated=True,
        text="<think>3</think>\n<answer>3</answer>",
        columns={"question": "1+2", "answer": "3"},
    )
    log.samples(5, [rollout, make_rollout(0.5)])
    log.samples(6, [])
    log.close()
    body = [
        "--- reward 0.75 | math_reward 1 | thinking_reward none | advantage 0 | 2 tokens (truncated)",
        "question: 1+2",
        "answer: 3",
        "completion: <think>3</think>",
        "<answer>3</answer>",
    ]
    lines = (tmp_path / "samples.txt").read_text().splitlines()
    assert lines[0].startswith("===== step 5 ==") and len(lines[0]) == 120
    assert lines[1:] == [*body, ""]

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("samples/text_summary")
    assert event.step == 5
    assert event.tensor_proto.string_val[0].decode().splitlines() == [f"    {line}" for line in body]


# --- curves and the summary


def test_curve_of_a_straight_line():
    assert terminal_curve([0, 1, 2, 3], width=4, height=4).splitlines() == [
        "3 ┤   ╭",
        "2 ┤  ╭╯",
        "1 ┤ ╭╯",
        "0 ┤─╯",
    ]


def test_curve_jumps_by_a_vertical_stroke_and_comes_back():
    assert terminal_curve([0, 2, 2, 0], width=4, height=3).splitlines() == [
        "2 ┤ ╭─╮",
        "1 ┤ │ │",
        "0 ┤─╯ ╰",
    ]


def test_curve_averages_many_values_and_joins_few():
    # means of (0, 2), (4, 4), (1, 3): 1, 4, 2
    assert terminal_curve([0, 2, 4, 4, 1, 3], width=3, height=4) == terminal_curve([1, 4, 2], width=3, height=4)
    # half-way between 0 and 2 lies 1
    assert terminal_curve([0, 2], width=3, height=3) == terminal_curve([0, 1, 2], width=3, height=3)


def test_curve_keeps_to_a_given_range():
    lines = terminal_curve([-5, 0.5, 9], width=3, height=3, low=0, high=1).splitlines()
    assert lines == ["  1 ┤  ╭", "0.5 ┤ ╭╯", "  0 ┤─╯"]


def test_curve_of_constant_missing_and_single_values():
    assert terminal_curve([0.5, math.nan, 0.5], width=3, height=3).splitlines()[1].strip() == "0.5 ┤───"
    assert terminal_curve([math.nan]) == "(no values)"
    lines = terminal_curve([0.3], width=60, height=8).splitlines()
    assert len(lines) == 8 and lines[3] == "   0.3 ┤" + "─" * 60


def test_curve_labels_zero_as_zero():
    labels = [line.split()[0] for line in terminal_curve([-0.3, 0.3], width=3, height=7).splitlines()]
    assert labels == ["0.3", "0.2", "0.1", "0", "-0.1", "-0.2", "-0.3"]


def test_summary_tells_accuracy_time_and_places(tmp_path, capsys):
    log = RunLog(MetricsConfig(), str(tmp_path), num_steps=2)
    log.log_evaluation(0, {"accuracy": 0.25})
    log.log(1, {"reward/mean": 0.5, "time/step": 40.0})
    log.log(2, {"reward/mean": 0.6, "time/step": 50.0})
    log.log_evaluation(2, {"accuracy": 0.75})
    log.close()
    capsys.readouterr()
    summary.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: 2 steps in 1.5 minutes, start-up not counted"
    assert lines[1] == "accuracy on held-out prompts (greedy): 0.25 after step 0, 0.75 after step 2"
    assert lines[3].startswith(" 0.75 ┤") and lines[10].startswith(" 0.25 ┤")
    assert f"TensorBoard: {tmp_path}/tensorboard" in lines
    assert not any(line.startswith("trained model") for line in lines)


def test_summary_without_evaluations_shows_the_reward(tmp_path):
    records = [{"step": 1, "time/step": 1.0, "reward/mean": 0.5}, {"step": 2, "time/step": 1.0, "reward/mean": None}]
    text = summary.summarize(records, tmp_path)
    assert "mean reward of the sampled completions: 0.5 after step 1, 0.5 after step 1" in text


def test_summary_of_no_run_says_so(tmp_path):
    with pytest.raises(SystemExit, match="metrics.jsonl does not exist"):
        summary.main([str(tmp_path)])
