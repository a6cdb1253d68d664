"""The table of methods in docs/methods.md, as the tests read it."""

import pathlib

from grpo.config import AlgorithmConfig


def methods() -> dict[str, tuple[AlgorithmConfig, list[str]]]:
    """Read each row, by its name: the algorithm that its flags set, and the cells behind them."""
    page = (pathlib.Path(__file__).parent.parent / "docs/methods.md").read_text()
    rows = {}
    for line in page.partition("\n| Method | Flags |")[2].partition("\n\n")[0].splitlines()[2:]:
        name, flags, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        words = flags.split() if flags != "-" else []
        fields = {
            flag.removeprefix("--algorithm.").replace("-", "_"): value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        rows[name] = AlgorithmConfig(**fields), cells
    return rows
