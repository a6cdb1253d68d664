"""Learning curves as an SVG, written by hand: nothing to install, and a diff shows what changed.

    python tests/bench/curve.py PICTURE.svg LEARNING.json ...
    python tests/bench/curve.py PICTURE.svg 'LABEL=REAL.jsonl' ...

reads what learning.py wrote, in one call or several, or what real.py wrote of a run. One thin line for each run, a dot
for each evaluation; two panels share the vertical axis.
"""

import itertools
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 420, 280  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 46
LETTER = 6  # width, pixels
COLORS = ("#1f5fa8", "#c4661f", "#2e7d32", "#8e44ad", "#b71c1c", "#555555")  # of the methods, in their order


def main(picture: str, *results: str) -> None:
    rows = [row for result in results for row in rows_of(result)]
    pathlib.Path(picture).write_text(draw([row for row in rows if row.get("curve")]))


def rows_of(result: str) -> list[dict[str, Any]]:
    """Read the runs of a file of learning.py, or the one run of LABEL=FILE, which real.py wrote."""
    label, _, file = result.rpartition("=")
    text = pathlib.Path(file).read_text()
    if not label:
        return json.loads(text)["rows"]
    lines = [json.loads(line) for line in text.splitlines()]
    curve = [[line["step"], line["seconds"], line["eval/accuracy"]] for line in lines if "eval/accuracy" in line]
    return [{"method": label, "curve": curve}]


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """Draw runs that have `method` and `curve`: [step, seconds, accuracy] of each evaluation."""
    panels = [panel(runs, 0, "steps"), panel(runs, 1, "seconds since the launch")]
    parts = [f'<g transform="translate({i * WIDTH} 0)">{drawn}</g>' for i, drawn in enumerate(panels)]
    size = f'width="{2 * WIDTH}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


def panel(runs: Sequence[dict[str, Any]], column: int, name: str) -> str:
    """Draw held-out accuracy over one column of the curves."""
    last = max((point[column] for run in runs for point in run["curve"]), default=0) or 1
    accuracies = [point[2] for run in runs for point in run["curve"]] or [0, 1]
    bottom = math.floor(10 * min(accuracies))  # in tenths
    top = max(math.ceil(10 * max(accuracies)), bottom + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        height = (10 * y - bottom) / (top - bottom)
        return LEFT + x / last * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM)

    methods = list(dict.fromkeys(run["method"] for run in runs))
    colors = dict(zip(methods, itertools.cycle(COLORS)))
    parts = []
    for tenth in range(bottom, top + 1):
        x, y = place(0, tenth / 10)
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for tick in range(0, int(last) + 1, spacing(last)):
        x, y = place(tick, bottom / 10)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>')
    for run in runs:
        color = colors[run["method"]]
        places = [place(point[column], point[2]) for point in run["curve"]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}"/>' for x, y in places]
    if column == 0:
        parts.append(f'<text x="{LEFT}" y="18">held-out accuracy</text>')
    else:
        x = LEFT
        for method, color in colors.items():
            parts.append(f'<rect x="{x}" y="9" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{x + 15}" y="18">{method}</text>')
            x += 30 + LETTER * len(method)
    return "".join(parts)


def spacing(last: float) -> int:
    """Return 1, 2 or 5 times a power of ten, so that at most six steps lead to `last`."""
    tens = 10 ** max(0, math.floor(math.log10(last / 6)))
    return next(tens * factor for factor in (1, 2, 5, 10) if last / (tens * factor) <= 6)


if __name__ == "__main__":
    main(*sys.argv[1:])
