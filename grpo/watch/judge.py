"""Which rank keeps the others waiting, out of what each one tells about itself. Pure; watchdog.py has the thread."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.config import DeadlinesConfig

# What a rank that hangs in a collective would wait for at most, as a share of `roles.timeout_minutes`
SHARE_OF_TIMEOUT = 0.9
# A rank's thread tells where it is every second. One that did not for so long is stopped, gone or starved.
ANSWER_SECONDS = 5.0
# Longer between two looks means that this process itself was stopped (Ctrl-Z, a machine that slept)
OWN_GAP_SECONDS = 10.0
# First notice that a phase takes long, as a share of its deadline; the next ones when it took twice as long
NOTICE_SHARE = 0.1


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    role: str
    phase: str
    changes: int
    """Of the phase so far."""
    entered: dict[str, int]
    """Collectives begun in each of its groups."""
    beat: int
    """Grows by 1 each time the rank tells its place."""
    host: str
    launcher: int
    """Process id of its torchrun."""
    pid: int
    asked: str = ""
    """The signal by which this rank was asked to stop."""


@dataclass(frozen=True)
class Finding:
    """Nothing has happened for a while."""

    ranks: list[int]
    """Those that the others wait for."""
    line: str
    is_late: bool
    """Past the deadline; else the line is a notice."""
    answers: bool = True
    """Whether these ranks still tell where they are."""


def deadline_of(phase: str, deadlines: DeadlinesConfig, timeout_minutes: float) -> tuple[float, str]:
    """Seconds that nothing may happen in a phase, and the field that says so."""
    if phase in ("start", "startup"):
        minutes, name = deadlines.startup_minutes, "deadlines.startup_minutes"
    elif phase in ("generate", "reward", "evaluate"):
        minutes, name = deadlines.generate_minutes, "deadlines.generate_minutes"
    else:
        minutes, name = deadlines.phase_minutes, "deadlines.phase_minutes"
    if minutes > SHARE_OF_TIMEOUT * timeout_minutes:
        return 60 * SHARE_OF_TIMEOUT * timeout_minutes, "0.9 roles.timeout_minutes"
    return 60 * minutes, name


def awaited(places: Mapping[int, Place]) -> list[int]:
    """The ranks that keep others waiting, while nothing moves.

    In a group, whoever has begun fewer collectives than another member is awaited by it. A rank that waits in one group
    itself is excused for its absence in the others. Empty if nobody is behind.
    """
    behind, waiting = set(), set()
    for group in {name for place in places.values() for name in place.entered}:
        begun = {rank: place.entered[group] for rank, place in places.items() if group in place.entered}
        fewest = min(begun.values())
        if fewest != max(begun.values()):
            behind |= {rank for rank, number in begun.items() if number == fewest}
            waiting |= {rank for rank, number in begun.items() if number > fewest}
    return sorted(behind - waiting)


class Judge:
    """Looks at all places again and again, and finds when nothing has happened for too long."""

    def __init__(self, deadlines: DeadlinesConfig, timeout_minutes: float, patience: float = 0.0):
        """patience: seconds after the deadline, for a deputy."""
        self.deadlines, self.timeout_minutes, self.patience = deadlines, timeout_minutes, patience
        self.places: dict[int, Place] = {}
        self.answered: dict[int, float] = {}
        self.moved = self.looked = float("-inf")
        self.noticed: dict[str, float] = {}  # longest wait of a phase that was told of

    def look(self, places: Mapping[int, Place], now: float) -> Finding | None:
        """What is wrong, if anything; `now` in seconds of a steady clock."""
        gap = now - self.looked
        if gap > OWN_GAP_SECONDS:  # nobody was watched meanwhile; the first look too
            self.moved += gap
            self.answered = {rank: at + gap for rank, at in self.answered.items()}
        if self.looked == float("-inf"):
            self.moved = now
        self.looked = now
        for rank, place in places.items():
            before = self.places.get(rank)
            if before is None or place.beat != before.beat:
                self.answered[rank] = now
            if before is None or (place.changes, place.entered) != (before.changes, before.entered):
                self.moved = now
        self.places = dict(places)
        return self._judge(now - self.moved, now) if places else None

    def _judge(self, silent: float, now: float) -> Finding | None:
        places = self.places
        mute = [rank for rank in sorted(places) if now - self.answered[rank] > ANSWER_SECONDS]
        ranks = mute or awaited(places)
        phases = {places[rank].phase for rank in ranks or places}
        limit, field = max(deadline_of(phase, self.deadlines, self.timeout_minutes) for phase in phases)
        if silent > limit + self.patience:
            line = self._late_line(ranks, mute, silent, limit, field)
            return Finding(ranks or sorted(places), line, is_late=True, answers=not mute)
        phase = places[(ranks or sorted(places))[0]].phase
        # doubled, because a step that takes long each time is no news
        if ranks and silent > max(NOTICE_SHARE * limit, 2 * self.noticed.get(phase, 0.0)):
            self.noticed[phase] = silent
            who = ", ".join(map(self._name, ranks))
            return Finding(
                ranks, f"waiting for {who} in phase {phase}, for {silent:.0f} s; deadline {limit:.0f} s", False
            )
        return None

    def _late_line(self, ranks: list[int], mute: list[int], silent: float, limit: float, field: str) -> str:
        places = self.places
        why = f"nothing has happened for {silent:.0f} s, and {field} allows {limit:.0f} s"
        if not ranks and len(places) > 1:
            phases = ", ".join(f"{self._name(rank)} in {places[rank].phase}" for rank in sorted(places))
            return f"error: all ranks wait in collectives that do not end: {phases}; {why}"
        ranks = ranks or sorted(places)
        phases = sorted({places[rank].phase for rank in ranks})
        verb = "does not answer, last seen" if mute else "hangs"
        if len(ranks) > 1:
            verb = "do not answer, last seen" if mute else "hang"
        return f"error: {', '.join(map(self._name, ranks))} {verb} in phase {' and '.join(phases)}: {why}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.places[rank].role})"
