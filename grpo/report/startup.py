"""Where the time before the first step went, on the slowest rank of each role."""

from grpo.roles.comm import gather_to_driver
from grpo.roles.process_groups import Roles

# A part that took less is not told, unless nothing took more
SHORTEST_SECONDS = 0.05


def startup_lines(parts: dict[str, float], roles: Roles) -> list[str]:
    """A line for each role on the driver: the seconds of each part of the start; none elsewhere.

    parts: of this rank, in order; one that begins with "waiting" is for others. Collective over `roles.control`.
    """
    everyone = gather_to_driver((roles.name, parts), roles)
    by_role: dict[str, list[dict[str, float]]] = {}
    for name, of_rank in everyone or []:
        by_role.setdefault(name, []).append(of_rank)
    return [f"{name}: {slowest_of(ranks)}" for name, ranks in by_role.items()]


def slowest_of(ranks: list[dict[str, float]]) -> str:
    """The parts of the rank that worked longest."""

    def work(parts: dict[str, float]) -> float:
        return sum(seconds for part, seconds in parts.items() if not part.startswith("waiting"))

    slowest = max(ranks, key=work)
    told = {part: seconds for part, seconds in slowest.items() if seconds >= SHORTEST_SECONDS} or slowest
    text = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in told.items())
    return text + (f" (the slowest of {len(ranks)} ranks)" if len(ranks) > 1 else "")
