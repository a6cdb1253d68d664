"""Who keeps the others waiting, and since when: states made by hand, a clock that the test turns."""

import pytest

from grpo.watch.watchdog import Hang, HangDetector, RankState, deadline_seconds, ranks_behind

# 2 trainers, a reference, a generator; a deadline of 10 minutes, of 30 in long phases
ROLES = ("trainer", "trainer", "reference", "generator")
MINUTES = 10


def states(phase: str, control: str, trainers: str = "55", beat: int = 1, changes: int = 1) -> dict[int, RankState]:
    """One digit a rank: how many collectives it has begun on `control`, and in the trainers' group."""
    found = {}
    for rank, role in enumerate(ROLES):
        entered = {"control": int(control[rank])} | ({"0/trainers": int(trainers[rank])} if rank < 2 else {})
        found[rank] = RankState(role, phase, changes, entered, beat, "host", 100 + rank)
    return found


def first_hang(seconds: range, states_at, patience: float = 0.0) -> tuple[int, Hang] | None:
    """When a detector that looks at these seconds finds something, and what."""
    detector = HangDetector(MINUTES, patience)
    found = ((second, detector.look(states_at(second), float(second))) for second in seconds)
    return next(((second, hang) for second, hang in found if hang), None)


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
def test_who_is_behind(control, trainers, ranks):
    assert ranks_behind(states("train", control, trainers)) == ranks


@pytest.mark.parametrize(("phase", "seconds"), [("train", 600), ("generate", 1800), ("startup", 1800), ("save", 600)])
def test_a_phase_is_late_when_nothing_moved_for_its_deadline(phase, seconds):
    assert deadline_seconds(phase, MINUTES) == seconds
    second, hang = first_hang(range(100, 2000), lambda second: states(phase, "7776", beat=second))
    assert second == 100 + seconds + 1 and hang.ranks == [3]
    assert hang.line.startswith(
        f"error: rank 3 (generator) hangs in phase {phase}: nothing has happened for {second - 100} s"
    )


def test_any_collective_or_phase_of_any_rank_is_progress():
    """A train phase of 50 minutes, whose trainers begin a collective every 5 s."""
    moving = lambda second: states("train", "6677", f"{second // 5 % 9}5", beat=second)  # noqa: E731
    assert first_hang(range(0, 3000, 5), moving) is None


def test_a_rank_that_does_not_answer_is_the_one():
    """Rank 1 is stopped: its beat stays. Rank 0, which waits for it, is behind on control."""

    def stopped(second: int) -> dict[int, RankState]:
        return states("train", "6677", "65", beat=second) | {1: states("train", "6677", "65", beat=0)[1]}

    _, hang = first_hang(range(0, 700, 5), stopped)
    assert hang.ranks == [1]
    assert "rank 1 (trainer) does not answer" in hang.line


def test_a_machine_that_slept_blames_nobody():
    assert first_hang([0, 1, 36_000, 36_001], lambda second: states("train", "6677", "65", beat=second)) is None


def test_all_in_one_collective():
    """Nobody is behind; the second detector's patience."""
    second, hang = first_hang(range(700), lambda second: states("sync", "7777", beat=second), patience=10.0)
    assert second == 611 and hang.ranks == [0, 1, 2, 3] and "rank 3 (generator) hangs in phase sync" in hang.line
