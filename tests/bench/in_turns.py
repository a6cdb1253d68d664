"""One measurement of several checkouts in turns, each in a process of its own, for the benches beside this file."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable


def in_turns(measure: Callable[[], dict[str, float]], bench: str, about: str, rounds: int) -> None:
    """Compare checkouts in turns by `bench`, whose process has a checkout first on its path: name -> number.

    Prints median, lowest and highest of each number for each checkout named on the command line, by default this one.
    """
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(measure()))
        return
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", default=[str(pathlib.Path(__file__).parents[2])])
    parser.add_argument("--rounds", type=int, default=rounds)
    arguments = parser.parse_args()
    rounds_of: dict[str, list[dict[str, float]]] = {checkout: [] for checkout in arguments.checkouts}
    for _ in range(arguments.rounds):
        for checkout, measured in rounds_of.items():
            environment = os.environ | {"PYTHONPATH": os.path.abspath(checkout)}
            command = [sys.executable, bench, "--child"]
            measured.append(json.loads(subprocess.check_output(command, env=environment, cwd=checkout)))
    for checkout, measured in rounds_of.items():
        for name in measured[0]:
            values = [figures[name] for figures in measured]
            print(f"{checkout} {name}: {statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
