"""Who keeps the others waiting, and since when: places made by hand, a clock that the test turns."""

import pytest

from grpo.config import DeadlinesConfig
from grpo.watch.judge import Judge, Place, awaited, deadline_of

# 2 trainers, a reference, a generator; minutes that are easy to tell apart
DEADLINES = DeadlinesConfig(startup_minutes=30, generate_minutes=20, phase_minutes=10)
ROLES = ("trainer", "trainer", "reference", "generator")


def places(phase: str, control: str, trainers: str = "55", beat: int = 1, changes: int = 1) -> dict[int, Place]:
    """One digit a rank: how many collectives it has begun on `control`, and in the trainers' group."""
    found = {}
    for rank, role in enumerate(ROLES):
        entered = {"control": int(control[rank])} | ({"0/trainers": int(trainers[rank])} if rank < 2 else {})
        found[rank] = Place(role, phase, changes, entered, beat, "host", 1, 100 + rank)
    return found


@pytest.mark.parametrize(
    ("control", "trainers", "ranks"),
    [
        ("7776", "55", [3]),  # the generator has not come to the gathering
        ("6777", "55", [0]),  # the driver does not broadcast
        ("6677", "65", [1]),  # both trainers are missing on control, and 0 waits for 1 in their own group
        ("6677", "55", [0, 1]),  # both are: neither waits
        ("7777", "55", []),
    ],
)
def test_who_is_awaited(control, trainers, ranks):
    assert awaited(places("train", control, trainers)) == ranks


def test_a_phase_is_late_when_nothing_moved_for_its_deadline():
    judge = Judge(DEADLINES, timeout_minutes=60)
    assert judge.look(places("generate", "7776"), now=100.0) is None
    findings = []
    for second in range(101, 1310):
        finding = judge.look(places("generate", "7776", beat=second), now=float(second))
        findings += [(second - 100, finding)] if finding else []
    # notices after 2 of the 20 minutes, then each time it took twice as long
    notices = [after for after, finding in findings if not finding.is_late]
    assert notices == [121, 243, 487, 975]
    late = [(after, finding) for after, finding in findings if finding.is_late]
    assert late[0][0] == 1201 and late[0][1].ranks == [3]
    assert late[0][1].line == (
        "error: rank 3 (generator) hangs in phase generate: nothing has happened for 1201 s, and "
        "deadlines.generate_minutes allows 1200 s"
    )
    assert findings[0][1].line == "waiting for rank 3 (generator) in phase generate, for 121 s; deadline 1200 s"


def test_any_collective_or_phase_of_any_rank_is_progress():
    judge = Judge(DEADLINES, timeout_minutes=60)
    for second in range(0, 3000, 5):  # a train phase of 50 minutes, whose trainers begin a collective every 5 s
        assert judge.look(places("train", "6677", f"{second // 5 % 9}5", beat=second), now=float(second)) is None


def test_a_rank_that_does_not_answer_is_the_one():
    """Rank 1 is stopped: its beat stays. Rank 0, which waits for it, is behind on control."""
    judge = Judge(DEADLINES, timeout_minutes=60)
    finding = None
    for second in range(0, 610, 5):
        now = places("train", "6677", "65", beat=second)
        now[1] = places("train", "6677", "65", beat=0)[1]
        found = judge.look(now, now=float(second))
        finding = found if found and found.is_late else finding
    assert finding.ranks == [1]
    assert finding.line.startswith("error: rank 1 (trainer) does not answer, last seen in phase train: ")


def test_a_machine_that_slept_blames_nobody():
    judge = Judge(DEADLINES, timeout_minutes=60)
    judge.look(places("train", "6677", "65", beat=1), now=0.0)
    judge.look(places("train", "6677", "65", beat=2), now=1.0)
    assert judge.look(places("train", "6677", "65", beat=3), now=36_000.0) is None
    assert judge.look(places("train", "6677", "65", beat=4), now=36_001.0) is None


def test_deadlines_end_before_collectives_time_out():
    assert deadline_of("startup", DEADLINES, 60) == (1800, "deadlines.startup_minutes")
    assert deadline_of("evaluate", DEADLINES, 60) == (1200, "deadlines.generate_minutes")
    assert deadline_of("save", DEADLINES, 60) == (600, "deadlines.phase_minutes")
    assert deadline_of("generate", DEADLINES, 10) == (540, "0.9 roles.timeout_minutes")


def test_all_in_one_collective():
    judge = Judge(DEADLINES, timeout_minutes=60, patience=10.0)
    found = [judge.look(places("sync", "7777", beat=second), now=float(second)) for second in range(612)]
    assert found[:611] == [None] * 611  # nobody to wait for, and the deputy's patience
    assert found[611].ranks == [0, 1, 2, 3] and "rank 3 (generator) in sync" in found[611].line
