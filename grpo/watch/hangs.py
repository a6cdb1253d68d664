"""Which rank keeps the others waiting, out of what each one tells about itself. Pure; watchdog.py has the thread."""

from collections.abc import Mapping
from dataclasses import dataclass

# Phases that load models, wait for vLLM or for reward functions, and how much longer they may take
LONG_PHASES = ("start", "startup", "generate", "reward", "evaluate")
LONGER = 3
# A rank's thread tells where it is every second. One that did not for so long is stopped, gone or starved.
ANSWER_SECONDS = 5.0
# Longer between two looks means that this process itself was stopped (Ctrl-Z, a machine that slept)
OWN_GAP_SECONDS = 10.0


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    role: str
    phase: str
    changes: int
    """Phases begun so far."""
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
class Hang:
    """Nothing has happened for longer than the deadline."""

    ranks: list[int]
    """Those that the others wait for."""
    line: str


def deadline_seconds(phase: str, deadline_minutes: float) -> float:
    """Seconds for which nothing may happen in a phase."""
    return 60 * deadline_minutes * (LONGER if phase in LONG_PHASES else 1)


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


class HangDetector:
    """Looks at all places again and again, and finds when nothing has happened for too long."""

    def __init__(self, deadline_minutes: float, patience: float = 0.0):
        """patience: seconds after the deadline, for a rank that only stands in for another."""
        self.deadline_minutes, self.patience = deadline_minutes, patience
        self.places: dict[int, Place] = {}
        self.answered: dict[int, float] = {}
        self.moved = self.looked = float("-inf")

    def look(self, places: Mapping[int, Place], now: float) -> Hang | None:
        """Who hangs, if anybody; `now` in seconds of a steady clock."""
        if now - self.looked > OWN_GAP_SECONDS:  # nobody was watched meanwhile; the first look too
            self.moved, self.answered = now, dict.fromkeys(places, now)
        self.looked = now
        for rank, place in places.items():
            before = self.places.get(rank)
            if before is None or place.beat != before.beat:
                self.answered[rank] = now
            if before is None or (place.changes, place.entered) != (before.changes, before.entered):
                self.moved = now
        self.places = dict(places)
        mute = [rank for rank in sorted(places) if now - self.answered[rank] > ANSWER_SECONDS]
        ranks = mute or awaited(places) or sorted(places)
        limit = max((deadline_seconds(places[rank].phase, self.deadline_minutes) for rank in ranks), default=0.0)
        silent = now - self.moved
        if not ranks or silent <= limit + self.patience:
            return None
        return Hang(ranks, self._line(ranks, bool(mute), silent, limit))

    def _line(self, ranks: list[int], is_mute: bool, silent: float, limit: float) -> str:
        places, several = self.places, len(ranks) > 1
        why = f"nothing has happened for {silent:.0f} s, and deadline_minutes allows {limit:.0f} s here"
        names = {rank: f"rank {rank} ({places[rank].role})" for rank in ranks}
        if several and not is_mute and not awaited(places):
            phases = ", ".join(f"{name} in {places[rank].phase}" for rank, name in names.items())
            return f"error: all ranks wait in collectives that do not end: {phases}; {why}"
        verb = (
            ("do not answer" if several else "does not answer") + ", last seen" if is_mute else "hang" + "s"[several:]
        )
        phases = " and ".join(sorted({places[rank].phase for rank in ranks}))
        return f"error: {', '.join(names.values())} {verb} in phase {phases}: {why}"
