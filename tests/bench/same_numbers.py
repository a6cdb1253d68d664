"""Do two runs have the same numbers, to the last digit? For a change that must not change what is computed.

    python tests/bench/same_numbers.py OLD_RUN_DIR NEW_RUN_DIR [OLD_NAME=NEW_NAME ...]

Compares metrics.jsonl, completions.jsonl and evaluation.jsonl line by line; clocks are left out, and so is the folder
of a user's reward file. OLD_NAME=NEW_NAME: a key that has another name in the new run. Exit code 1 if anything differs,
or if a run trains and no step of it has a gradient, which no comparison could tell from another.
"""

import json
import pathlib
import sys

CLOCKS = ("time", "tokens_per_second", "memory/")


def main(old: pathlib.Path, new: pathlib.Path, *renamed: str) -> int:
    """Print what was compared and each name with a difference; returns the exit code."""
    names = dict(pair.split("=") for pair in renamed)
    code = 0
    for file in ("metrics.jsonl", "completions.jsonl", "evaluation.jsonl"):
        if not (old / file).exists():
            continue
        before, after = ([values(line) for line in (run / file).read_text().splitlines()] for run in (old, new))
        before = [{names.get(name, name): value for name, value in line.items()} for line in before]
        differences: dict[str, list] = {}
        for a, b in zip(before, after, strict=True):
            for name in a.keys() | b.keys():
                if a.get(name) != b.get(name):
                    differences.setdefault(name, []).append((a["step"], a.get(name), b.get(name)))
        print(f"{file}: {len(before)} lines, {sum(map(len, before))} values, {len(differences) or 'no'} names differ")
        for name, where in sorted(differences.items()):
            print(f"  {name}: {len(where)} times, first (step, old, new) {where[0]}")
        code |= bool(differences)
        gradients = [line["grad_norm"] for line in before if line.get("grad_norm") is not None]
        if gradients and not any(gradients):
            print("  blind: grad_norm is 0 in each step")
            code = 1
    return code


def values(line: str) -> dict:
    """Read a line of metrics without its clocks."""
    values = {name: value for name, value in json.loads(line).items() if not name.startswith(CLOCKS)}
    if "rewards" in values:
        values["rewards"] = {name.rsplit("/", 1)[-1]: value for name, value in values["rewards"].items()}
    return values


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:3]), *sys.argv[3:]))
