"""Whether a run fits the machine: what `--dry-run` prints as a table, and a start as warnings."""

from typing import Any


def judge(needs: Any) -> int:
    """Compare what a run needs with what there is, print what does not fit, and return the number of problems."""
    from grpo.features.machine import verdicts

    return verdicts.judge(needs)
