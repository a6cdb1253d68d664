"""Where the checkout is, and its lists of JSON lines."""

import json
import pathlib
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parent.parent


def read_lines(path: pathlib.Path) -> list[dict]:
    """Return the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: pathlib.Path, values: Iterable[dict]) -> pathlib.Path:
    """Write values as JSON lines, and return the file."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
