"""The reward pool: whatever a verifier does, it costs that completion its reward, and nothing else."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from grpo.config import RewardConfig
from grpo.rewards.loading import start_early
from grpo.rewards.pool import RewardError, RewardPool, call_columns, check_all_failed
from grpo.types import Prompt, Rollout
from grpo.workers import processes
from grpo.workers.processes import Call
from tests import ROOT, read_lines
from tests.rollouts import completion
from tests.unit.workers.processes import DEADLINE, alive, family, wait_until

# Nothing here may hang: that is the subject.

# Seconds that a misdeed may take
SHORT = 0.5

# `act` is worth the length of the text, unless the text starts with the name of a misdeed.
REWARD_FILE = r'''
import contextlib, ctypes, fcntl, functools, json, math, os, pathlib, resource, signal, subprocess, sys, threading, time
from grpo.rewards.builtin import group_level

HERE = pathlib.Path(__file__).parent
hoard = []

def leave_traces(completions, **columns):
    (HERE / f"trace-{completions[0]}").touch()
    return [1.0]

def act(completions, **columns):
    word = completions[0].partition(" ")[0]
    if word.startswith("forge:"):
        forge(word.removeprefix("forge:").replace("_", " "))
    return MISDEEDS[word]() if word in MISDEEDS else [float(len(completions[0]))]

def loop():
    while True:
        pass

def stubborn():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            while True:
                pass
        except:
            pass

def allocate():
    while True:
        hoard.append(bytearray(10**7))

def hoarding():
    while True:
        with contextlib.suppress(MemoryError):
            allocate()

def raises():
    raise ValueError("line one\nline two \ud800")  # a lone surrogate cannot be written to a terminal

def unspeakable():
    class Unspeakable(Exception):
        def __str__(self):
            raise KeyError("no words")
    raise Unspeakable

def recursion():
    return recursion()

def print_much():
    for _ in range(100):
        print("x" * 10**6)
        sys.stderr.write("y" * 10**6)
    os.write(1, b"{}\n" * 10**5)
    return [1.0]

def close_all():
    os.closerange(0, 1000)
    loop()

def write_everywhere(text):
    for fd in range(3, 100):
        try:
            os.write(fd, text.encode())
        except OSError:
            pass
    loop()

def forge(outcome):
    if outcome == "escapes":
        answer(json.dumps("\x1b[31m" + "x" * 10**5) + ', "cause": "raised"', "failed")
    if outcome == "megabytes":
        outcome = "[" + "[]," * 10**6 + "1.0]"
    answer(outcome)

def answer(outcome, kind="value"):
    """Answer the call that is running in place of the worker, which a completion that took it over could do."""
    frame = sys._getframe()
    while frame.f_code.co_name != "work":
        frame = frame.f_back
    write_everywhere(f'{{"call": {frame.f_locals["call"]}, "{kind}": {outcome}}}\n')

def fork_and_kill():
    """The child keeps the connection open while the parent is gone."""
    if os.fork() == 0:
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)

def return_twice():
    """Also the forked child comes back."""
    os.fork()
    return [1.0]

def detach_and_loop():
    subprocess.Popen(["sh", "-c", "echo $$ > detached.pid; sleep 1000"], cwd=HERE, start_new_session=True)
    if os.fork() == 0:  # a daemon: its parent is gone, and so are session and group
        os.setsid()
        if os.fork() == 0:
            HERE.joinpath("daemon.pid").write_text(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    loop()

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

def set_alarms():
    for timer in TIMERS:
        signal.setitimer(timer, 1000)
    return [1.0]

def no_alarms():
    return [float(not any(signal.getitimer(timer)[0] for timer in TIMERS))]

def fork_on_and_on():
    """A process that forks and exits, and so does its child: none lives for longer than a moment. They hold a lock."""
    if os.fork() == 0:
        file = open(HERE / "held", "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        (HERE / "began").touch()
        while True:
            if os.fork():
                os._exit(0)
    return [1.0]

def die_later():
    def die():
        while not (HERE / "die").exists():
            time.sleep(0.01)
        os._exit(7)
    threading.Thread(target=die).start()
    return [1.0]

MISDEEDS = {
    "loop": loop, "stubborn": stubborn, "allocate": allocate, "hoarding": hoarding, "sleep": lambda: time.sleep(1000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "segfault": lambda: ctypes.string_at(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "exit0": lambda: os._exit(0), "raises": raises,
    "unspeakable": unspeakable, "wordy": lambda: {}["x" * 10**6], "recursion": recursion,
    "leave": lambda: sys.exit(5), "library": lambda: json.loads("{"), "nan": lambda: [math.nan],
    "two": lambda: [1.0, 2.0], "print": print_much, "stdin": lambda: [float(len(sys.stdin.read()))],
    "twice": return_twice, "set_alarms": set_alarms, "no_alarms": no_alarms, "die_later": die_later,
    "fork_on": fork_on_and_on,
    "close_all": close_all, "babble": lambda: write_everywhere("\n[1]\n{half a line"),
    "lie": lambda: write_everywhere('{"call": 99, "value": [1.0]}\n'), "fork_and_kill": fork_and_kill,
    "detach": detach_and_loop,
}

def length(completions, **columns):
    return [float(len(text)) for text in completions]

import asyncio
lock = asyncio.Lock()  # bound to the loop in which somebody waited for it, as a client's connections are

async def waits_for_a_client(completions, **columns):
    async def score(text):
        async with lock:
            await asyncio.sleep(0)
            return len(text)
    return await asyncio.gather(*map(score, completions))

def some(completions, **columns):
    """Nothing for every other word count."""
    return [None if len(text.split()) % 2 else 10.0 for text in completions]

def inverse(completions, answer, **columns):
    return [1 / int(text) for text in completions]

def record(completions, **columns):
    """Write down what it was called with."""
    with open(HERE / "calls.jsonl", "a") as file:
        file.write(json.dumps([completions, columns]) + "\n")
    return [float(i) for i in range(len(completions))]

@group_level
def whole_group(completions, **columns):
    return record(completions, **columns)

record_group = functools.partial(whole_group)

@group_level
def act_on_group(completions, **columns):
    for text in completions:
        act([text])
    return [float(len(completions))] * len(completions)

@group_level
def last_turns(completions, turns, environments, **columns):
    return [100 * len(completions) + len(texts[-1]) + e.score for texts, e in zip(turns, environments)]

def main_thread(completions, **columns):
    return [float(threading.current_thread() is threading.main_thread())]

def limits(completions, **columns):
    memory, core = (resource.getrlimit(what) for what in (resource.RLIMIT_AS, resource.RLIMIT_CORE))
    return [float(memory == (2**29, 2**29) and core == (0, 0))]
'''
RAISING_LINE = next(n for n, line in enumerate(REWARD_FILE.splitlines(), start=1) if "line one" in line)


def rollout(text: str, index: int = 0, num_tokens: int = 1, truncated: bool = False, **columns) -> Rollout:
    prompt = Prompt(index, [1], columns, content="what?")
    return completion([2] * num_tokens, prompt=prompt, text=text, ended_by="tokens" if truncated else "stop")


def test_an_async_function_keeps_its_client_from_step_to_step(open_pool):
    pool = open_pool({"waits_for_a_client": 1.0}, num_workers=1)
    for step in (1, 2, 3):
        pool.submit([rollout("a"), rollout("bc")], 1, step)
        assert [(scored.reward, scored.failures) for scored in pool.collect()] == [(1.0, {}), (2.0, {})]


@pytest.fixture
def open_pool(tmp_path):
    """Pools of functions of REWARD_FILE, by name and weight; afterwards nothing may be left of them."""
    (tmp_path / "mine.py").write_text(REWARD_FILE)
    pools = []

    def open_pool(functions: dict[str, float], **fields) -> RewardPool:
        fields = {"num_workers": 2, "timeout_seconds": DEADLINE, "memory_gib": 0.5} | fields
        table = {name if name.endswith("_reward") else mine(tmp_path, name): w for name, w in functions.items()}
        pools.append(RewardPool(RewardConfig(functions=table, **fields), max_completion_tokens=100))
        return pools[-1]

    yield open_pool
    for pool in pools:
        started = [pid for workers in pool.workers.values() for pid in family(workers.supervisor.pid)]
        pool.close()
        wait_until(lambda started=started: not any(map(alive, started)), f"{started} to be gone")


def test_a_thought_that_the_prompt_opens_counts(open_pool):
    pool = open_pool({"thinking_reward": 1.0, "format_reward": 1.0})
    rollouts = [rollout("3 + 4 is 7</think><answer>7</answer>")]
    assert [r.reward for r in score(pool, rollouts, 1)] == [0.5]
    pool.opening = "<think>\n"
    assert [r.reward for r in score(pool, rollouts, 1)] == [2.0]

    turns = [{"text": "a", "answers": ["b"]}, {"text": "c", "answers": ["d"], "role": "user"}]
    episode = {"opening": None, "turns": turns, "info": {}}
    columns = call_columns([replace(rollouts[0], episode=episode)], 1, False, pool.opening)
    assert columns["turns"] == [["<think>\na", "<think>\nc"]]
    _, *said = [tuple(message.values()) for message in columns["messages"][0]]
    assert said == [("assistant", "<think>\na"), ("tool", "b"), ("assistant", "<think>\nc"), ("user", "d")]


def supervisor(pool: RewardPool) -> subprocess.Popen:
    """The one of unconfined functions."""
    return pool.workers[False].supervisor


def score(pool: RewardPool, rollouts: list[Rollout], group_size: int) -> list[Rollout]:
    pool.submit(rollouts, group_size, step=7)
    return pool.collect()


def mine(folder: pathlib.Path, name: str) -> str:
    return f"{folder}/mine.py:{name}"


def read_pids(folder: pathlib.Path) -> list[int]:
    """Those that `detach` left, once they are there."""
    files = [folder / "detached.pid", folder / "daemon.pid"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the processes to detach")
    return [int(file.read_text()) for file in files]


def workers(pool: RewardPool) -> list[int]:
    return [pid for pid in family(supervisor(pool).pid) if pid != supervisor(pool).pid]


# ---- Misdeeds

TOO_LONG = f"took longer than {SHORT:g} s"
IN_THE_LINE = "the process wrote into its connection to its parent"
# For one completion, as JSON; _ stands for a blank.
FORGED = ["[NaN]", "[Infinity]", "[-Infinity]", "[1e999]", '["1.0"]', "[[1.0]]", "[]", "[1.0,_2.0]"]
FORGED += ["1.0", "null", "{}", '"text"', f"[{'9' * 5000}]", '[1.0]}_{"call":_0', "[1e300]", "megabytes"]
# What the text says that a function does -> the failure of its completion.
MISDEEDS = {
    "overdue": dict.fromkeys(("loop", "stubborn", "sleep", "hoarding", "stop", "detach"), TOO_LONG),
    "dead": {
        "kill": "the process was killed by signal 9",
        "segfault": "the process was killed by signal 11",
        "fork_and_kill": "the process was killed by signal 9",
        "exit0": "the process exited with code 0",
        "close_all": "the process closed its connection to its parent",
    },
    "forged": dict.fromkeys(("babble", "lie", *(f"forge:{outcome}" for outcome in FORGED)), IN_THE_LINE),
    "failed": {
        "allocate": "MemoryError",
        "raises": rf"ValueError: line one line two \\ud800 \(/.*/mine.py:{RAISING_LINE}\)",
        "unspeakable": r"Unspeakable \(/.*/mine.py:\d+\)",
        "wordy": r"KeyError: 'x+ \[\.\. \d+ characters \.\.\] x+' \(/.*/mine.py:\d+\)",
        "library": r"JSONDecodeError: Expecting property name .* \(/.*/mine.py:\d+\)",
        "leave": r"SystemExit: 5 \(/.*/mine.py:\d+\)",
        "recursion": r"RecursionError: maximum recursion depth exceeded.* \(/.*/mine.py:\d+\)",
        "nan": r"returned nan \(float\), not None or a finite number of at most 1e\+09",
        "two": "returned 2 values for 1 completions",
    },
}


def shorten(pool: RewardPool) -> None:
    """Give misdeeds, and nothing else, a short deadline."""
    (workers,) = pool.workers.values()
    submit = workers.submit

    def shortened(call: Call) -> Call:
        is_misdeed = b"mine.py:act" in call.arguments and b"and so on" in call.arguments
        return replace(call, seconds=SHORT) if is_misdeed else call

    workers.submit = lambda calls: submit(list(map(shortened, calls)))


@pytest.mark.parametrize("kind", MISDEEDS)
def test_a_misdeed_costs_that_completion_its_reward(kind, open_pool, tmp_path):
    pool = open_pool({"act": 1.0, "length": 0.5})
    if kind == "overdue":
        shorten(pool)
    act, length = mine(tmp_path, "act"), mine(tmp_path, "length")
    texts = [text for misdeed in MISDEEDS[kind] for text in (f"{misdeed} and so on", "good", "good too")]
    scored = score(pool, [rollout(text) for text in texts], group_size=1)
    assert [r.text for r in scored] == texts
    for good in [r for r in scored if r.text.startswith("good")]:
        assert good.failures == {} and good.reward == 1.5 * len(good.text)
    for bad, failure in zip(scored[::3], MISDEEDS[kind].values(), strict=True):
        assert bad.reward is None and bad.rewards == {act: None, length: float(len(bad.text))}
        assert list(bad.failures) == [act]
        assert re.fullmatch(failure, bad.failures[act]) and len(bad.failures[act]) < 3000, bad.failures[act]


def test_a_failure_that_a_worker_tells_is_short_and_does_nothing_to_a_terminal(open_pool, tmp_path):
    (scored,) = score(open_pool({"act": 1.0}), [rollout("forge:escapes")], group_size=1)
    failure = scored.failures[mine(tmp_path, "act")]
    assert scored.reward is None and failure.startswith("\\x1b[31mxxx") and len(failure) < 3000


def test_what_forks_on_and_on_ends_with_its_batch(open_pool, tmp_path):
    pool = open_pool({"act": 1.0}, num_workers=1)
    assert score(pool, [rollout("fork_on")], group_size=1)[0].reward == 1.0
    wait_until((tmp_path / "began").exists, "the processes to begin")
    assert score(pool, [rollout("good")], group_size=1)[0].reward == 4.0
    with open(tmp_path / "held") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # waits until the last process that holds it is gone


def test_what_is_odd_but_no_failure(open_pool, capfd):
    pool = open_pool({"act": 1.0}, num_workers=1)
    before = workers(pool)
    values = {"print": 1.0, "stdin": 0.0, "twice": 1.0, "set_alarms": 1.0, "no_alarms": 1.0, "good": 4.0}
    for _ in range(2):
        scored = score(pool, [rollout(deed) for deed in values], group_size=1)
        assert [r.reward for r in scored] == list(values.values())
    assert before[0] in workers(pool)
    assert capfd.readouterr() == ("", "")


def test_a_killed_worker_is_replaced_and_takes_all_it_started_along(open_pool, tmp_path):
    pool = open_pool({"act": 1.0}, num_workers=1)
    (before,) = workers(pool)
    assert len(os.listdir(f"/proc/{before}/fd")) == 4  # the standard ones and its connection, no other
    pool.submit([rollout("detach"), rollout("good")], group_size=1)
    detached = read_pids(tmp_path)
    assert all(map(alive, detached))
    os.kill(before, signal.SIGKILL)
    assert [r.reward for r in pool.collect()] == [None, 4.0]
    wait_until(lambda: not any(map(alive, detached)), "the detached processes to be gone")
    wait_until(lambda: before not in workers(pool) and len(workers(pool)) == 1, "another worker in its place")


def test_a_worker_that_dies_between_two_calls_is_nobodys_fault(open_pool, tmp_path):
    pool = open_pool({"act": 1.0}, num_workers=1)
    (before,) = workers(pool)
    assert score(pool, [rollout("die_later")], group_size=1)[0].reward == 1.0
    (tmp_path / "die").touch()
    wait_until(lambda: before not in workers(pool), "the worker to die")
    assert [r.reward for r in score(pool, [rollout("good")] * 20, group_size=1)] == [4.0] * 20


def test_what_fills_the_memory_does_not_stay(open_pool):
    pool = open_pool({"act": 1.0}, num_workers=1)
    (before,) = workers(pool)
    scored = score(pool, [rollout("allocate"), *[rollout("good")] * 20], group_size=1)
    assert [r.reward for r in scored] == [None] + [4.0] * 20
    assert workers(pool) != [before]


# ---- Calls


def test_ordinary_functions_get_one_completion_and_group_level_ones_a_group(open_pool, tmp_path):
    pool = open_pool({"record": 1.0, "record_group": 1.0})
    rollouts = [rollout("abcdef"[i], i // 3, 10 + i, i == 5, answer=["p", "q"][i // 3]) for i in range(6)]
    scored = score(pool, rollouts, group_size=3)
    assert [r.rewards[mine(tmp_path, "record_group")] for r in scored] == [0.0, 1.0, 2.0] * 2
    assert [r.rewards[mine(tmp_path, "record")] for r in scored] == [0.0] * 6
    calls = sorted(read_lines(tmp_path / "calls.jsonl"))
    assert [texts for texts, _ in calls] == [["a"], [*"abc"], ["b"], ["c"], ["d"], [*"def"], ["e"], ["f"]]
    assert calls[5][1] == {
        "answer": ["q"] * 3,
        "num_tokens": [13, 14, 15],
        "truncated": [False, False, True],
        "prompts": ["what?"] * 3,
        "step": [7] * 3,
    }


def test_a_group_level_call_fails_as_a_group_and_has_a_groups_time(open_pool, tmp_path):
    pool = open_pool({"length": 1.0, "act_on_group": 1.0})
    granted = []
    (workers,) = pool.workers.values()
    submit = workers.submit

    def submit_and_note(calls: list[Call]) -> None:
        granted.extend(call.seconds for call in calls)
        submit(calls)

    workers.submit = submit_and_note
    texts = ["a", "b", "raises", "d", "e", "f", "g", "h"]
    scored = score(pool, [rollout(text, i // 4) for i, text in enumerate(texts)], group_size=4)
    assert [r.reward for r in scored] == [None] * 4 + [5.0] * 4
    assert [r.rewards[mine(tmp_path, "length")] for r in scored] == [float(len(text)) for text in texts]
    assert all("ValueError: line one" in r.failures[mine(tmp_path, "act_on_group")] for r in scored[:4])
    assert granted == [4 * DEADLINE] * 2 + [DEADLINE] * 8


def test_weighted_sums_leave_none_out(open_pool):
    pool = open_pool({"length": 0.5, "some": 2.0})
    rollouts = [rollout("ab"), rollout("ab cd")]
    scored = score(pool, rollouts, group_size=1)
    assert [list(r.rewards.values()) for r in scored] == [[2.0, None], [5.0, 10.0]]
    assert [r.reward for r in scored] == [1.0, 22.5]
    assert rollouts[0].rewards == {} and rollouts[0].reward is None


def test_a_lost_episode_takes_no_other_along(open_pool, tmp_path):
    pool = open_pool({"last_turns": 1.0, "length": 1.0})
    note = {"opening": None, "info": {"score": 2.0}, "turns": [{"text": "ab", "answers": []}], "failure": ""}
    lost = note | {"info": {}, "turns": [], "failure": "the server is gone"}
    notes = [note, lost, note, note, lost, lost]
    rollouts = []
    for place, episode in enumerate(notes):
        rollouts.append(replace(rollout("ab", place // 3), episode=episode))
    scored = score(pool, rollouts, group_size=3)
    assert [r.reward for r in scored] == [206.0, None, 206.0, 106.0, None, None]
    assert not any(r.failures for r in scored)
    broken = [replace(r, failures={} if r.episode is lost else {"f": "it is wrong"}) for r in rollouts]
    with pytest.raises(RewardError, match="it is wrong"):
        check_all_failed(broken)


def test_a_column_that_json_does_not_have_is_refused(open_pool):
    pool = open_pool({"length": 1.0})
    with pytest.raises(ValueError, match="date is not JSON serializable.*; make text of it in data.row"):
        pool.submit([rollout("a", when=datetime.date(2000, 1, 1))], group_size=1)
    assert score(pool, [rollout("a", nested={"list": [1, None, "ß\n\u2028", 0.1]})], group_size=1)[0].reward == 1.0


def test_calls_run_on_the_main_thread_within_limits(open_pool):
    pool = open_pool({"main_thread": 1.0, "limits": 1.0})
    assert score(pool, [rollout("a")], group_size=1)[0].reward == 2.0


def test_scoring_goes_on_while_the_driver_is_busy(open_pool, tmp_path):
    """`submit` returns before anything is scored, and the work is done without a call of `collect`."""
    pool = open_pool({"leave_traces": 1.0}, num_workers=1)
    pool.submit([rollout(str(i)) for i in range(5)], group_size=1)
    wait_until(lambda: len(list(tmp_path.glob("trace-*"))) == 5, "all calls")  # the driver's own work
    assert [r.reward for r in pool.collect()] == [1.0] * 5


def test_a_large_batch_keeps_its_order(open_pool):
    pool = open_pool({"length": 1.0}, num_workers=3)
    sizes = [(i * 7919) % 30000 for i in range(1000)]  # about 15 MB, more than any socket holds
    pool.submit([rollout("x" * size) for size in sizes], group_size=8)
    assert [r.reward for r in pool.collect()] == sizes


def test_the_functions_find_the_drivers_folder_and_modules(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my_words.py").write_text("def count(text): return len(text.split())\n")
    (tmp_path / "mine.py").write_text(
        "import my_words\ndef words(completions, **columns): return [my_words.count(completions[0])]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    pool = RewardPool(RewardConfig(functions={"mine.py:words": 1.0}, num_workers=1, timeout_seconds=DEADLINE), 100)
    assert score(pool, [rollout("one two three")], group_size=1)[0].rewards == {"mine.py:words": 3.0}
    pool.close()


# ---- What ends a run


def test_a_function_that_fails_for_every_completion_is_an_error(open_pool):
    pool = open_pool({"inverse": 1.0, "length": 1.0})
    with pytest.raises(RewardError) as caught:
        check_all_failed(score(pool, [rollout("0", answer="z" * 2000), rollout("0" * 600, answer="5")], group_size=1))
    message = str(caught.value)
    assert "mine.py:inverse failed for all 2 completions: ZeroDivisionError: division by zero (/" in message
    assert f"  completion: '0'\n  answer: '{'z' * 250} [.. 1500 characters ..] {'z' * 250}'" in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    # the pool goes on, and one good completion is enough
    scored = score(pool, [rollout("0", answer="5"), rollout("2", answer="5")], group_size=1)
    check_all_failed(scored)
    check_all_failed([])
    assert [r.reward for r in scored] == [None, 1.5]


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("os.abort()", "killed by signal 6"),
        ("os.environ['JUDGE_KEY']", "line 3: KeyError: 'JUDGE_KEY'"),
        ("while True: pass", "took longer than 1 s"),
    ],
)
def test_functions_that_only_the_workers_cannot_load_are_reported_at_the_start(there, message, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOAD_SECONDS", 1.0 if "took" in message else DEADLINE)
    source = f"import os\nif os.getpid() != {os.getpid()}:\n    {there}\ndef act(completions, **columns): ..."
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=f"the reward functions cannot be loaded: .*{message}"):
        RewardPool(RewardConfig(functions={mine(tmp_path, "act"): 1.0}, num_workers=2), 100)


def test_functions_that_can_no_longer_be_loaded_end_the_run_only_with_the_last_process(open_pool, tmp_path, capfd):
    pool = open_pool({"act": 1.0})
    (tmp_path / "mine.py").write_text("raise KeyError('late')")
    rollouts = [rollout("kill"), *[rollout("good")] * 20]
    assert [r.reward for r in score(pool, rollouts, group_size=1)] == [None] + [4.0] * 20
    assert [r.reward for r in score(pool, rollouts[1:], group_size=1)] == [4.0] * 20
    # not `readouterr`: it empties the file, and loses what a process writes meanwhile
    stderr = pathlib.Path("/proc/self/fd/2")
    wait_until(lambda: "KeyError: 'late'" in stderr.read_text(), "the warning")
    assert "warning: a worker process cannot be replaced: ValueError: reward file" in stderr.read_text()
    with pytest.raises(RuntimeError, match=r"the reward functions cannot be loaded: .*: KeyError: 'late' "):
        score(pool, rollouts, group_size=1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dead_supervisor_is_an_error_and_takes_the_workers_along(when, open_pool):
    pool = open_pool({"act": 1.0})
    started = family(supervisor(pool).pid)
    if when == "before":
        supervisor(pool).kill()
    pool.submit([rollout("sleep")] * 2, group_size=1)
    supervisor(pool).kill()
    with pytest.raises(RuntimeError, match="supervises the reward functions hung up; it ended with code -9"):
        pool.collect()
    wait_until(lambda: not any(map(alive, started)), "the workers to be gone")


def test_a_pool_takes_the_processes_that_started_early_with_its_arguments(open_pool, tmp_path):
    config = RewardConfig(functions={mine(tmp_path, "act"): 1.0, "math_reward": 1.0}, num_workers=1)
    before = processes.children()
    start_early(config, 100)
    started = processes.children() - before
    assert len(started) == 2
    for limit, is_early in {99: False, 100: True}.items():
        with contextlib.closing(RewardPool(config, limit)) as pool:
            assert ({workers.supervisor.pid for workers in pool.workers.values()} == started) is is_early


FAILED_START = """
import os, sys
sys.argv = ["train_grpo.py", "--run-dir", "run"]
sys.argv += ["--reward.num-workers", "1", "--reward.functions", "mine.py:act", "1.0"]
class Torch:
    def find_spec(self, name, *_):
        if name == "torch":
            with open("pids") as pids:  # a pipe: the worker is loading the function now
                print(pids.read(), flush=True)
            raise ImportError("planted")
sys.meta_path.insert(0, Torch())
from grpo.config import GRPOConfig
from grpo.run.command_line import read_config
read_config(GRPOConfig)
import torch
"""


def test_a_start_that_fails_beside_early_processes_leaves_none(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    os.mkfifo(tmp_path / "pids")
    source = """
import os, time
with open("pids", "w") as pids:
    pids.write(f"{os.getppid()} {os.getpid()}")
time.sleep(1000)
"""
    (tmp_path / "mine.py").write_text(source)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{FAILED_START}"]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert "ImportError: planted" in failed.stderr
    pids = [int(word) for word in failed.stdout.split()[-2:]]
    wait_until(lambda: not any(map(alive, pids)), f"{pids} to be gone")


def test_ctrl_c_is_the_drivers_business(open_pool):
    pool = open_pool({"act": 1.0})
    before = family(supervisor(pool).pid)
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert score(pool, [rollout("good")], group_size=1)[0].reward == 4.0
    assert family(supervisor(pool).pid) == before


DRIVER = """
import os, sys, time
import torch
from grpo.config import RewardConfig
from grpo.rewards.loading import load_functions
from grpo.rewards.pool import RewardPool
from grpo.types import Prompt
from tests.rollouts import completion

pool = RewardPool(RewardConfig(functions={sys.argv[1]: 1.0}, num_workers=2, timeout_seconds=1000), 100)
texts = ["detach", "stubborn"]
pool.submit([completion([2], prompt=Prompt(0, [1]), text=text) for text in texts], group_size=1)
if sys.argv[2] == "copied" and os.fork() == 0:
    time.sleep(1000)  # holds a copy of the driver's end of the socket
print(pool.workers[False].supervisor.pid, flush=True)
pool.collect()
"""


@pytest.mark.parametrize(
    ("how", "send", "socket"),
    [(signal.SIGKILL, os.kill, "copied"), (signal.SIGKILL, os.killpg, "alone"), (signal.SIGTERM, os.kill, "alone")],
)
def test_nothing_outlives_the_driver(how, send, socket, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD_FILE)
    command = [sys.executable, "-c", DRIVER, mine(tmp_path, "act"), socket]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        supervisor = int(driver.stdout.readline())
        detached = read_pids(tmp_path)
        started = {pid for pid in (*family(supervisor), *detached) if alive(pid)}
        assert len(started) >= 5 and started.issuperset(detached)
        handle = os.pidfd_open(supervisor)  # its number may soon be another process's
        send(driver.pid, how)
        while alive(supervisor):
            with contextlib.suppress(ProcessLookupError):
                for _ in range(10_000):  # without a pause, so that one comes at each moment of its end
                    signal.pidfd_send_signal(handle, signal.SIGTERM)
        wait_until(lambda: not any(map(alive, started)), f"{started} to be gone")
    finally:
        driver.kill()
        driver.wait(DEADLINE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
