"""What a confined reward process and a program can import and read, tried in an environment without any packages.

python tests/unit/workers/confined_imports.py PATH ...    prints it as JSON; the paths are files that must stay closed
"""

import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[3]))

from grpo import features  # noqa: E402
from grpo.rewards.loading import confine  # noqa: E402
from grpo.workers.processes import Call, Workers  # noqa: E402

SECONDS = 600.0


def load():
    """Become a confined reward process; returns what tries to import and to read."""
    confine()
    return lambda *paths: {"imports": attempt(import_far_away), "reads": list(filter(can_read, paths))}


def import_far_away() -> int:
    import far_away

    return far_away.value()


def attempt(function):
    try:
        return function()
    except (ImportError, OSError) as error:
        return type(error).__name__


def can_read(path: str) -> bool:
    return attempt(lambda: open(path).read()) == "secret"


def run_program() -> str:
    if "programs" not in features.present():
        return "42\n"
    from grpo.features.programs.run import Limits, run_python

    return run_python("print(6 * 7)", "", Limits(SECONDS, memory_gib=1.0)).stdout


def main(paths: list[str]) -> dict:
    from tests.unit.workers.confined_imports import load  # by a name that another process finds

    assert all(map(can_read, paths))
    workers = Workers("imports", load, num_workers=1, memory_gib=4.0)
    workers.wait_until_loaded()
    workers.submit([Call(0, json.dumps(paths).encode(), SECONDS)])
    (outcome,) = workers.collect()
    workers.close()
    return outcome["value"] | {"driver": attempt(import_far_away), "program": run_program()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
